"""`sieve`: a hand passes from old to new and takes the first entry that was not used since it last came by.

Zhang et al., "SIEVE is Simpler than LRU", NSDI'24.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtier.index.policies.base import NONE, MarkedPolicy, Queue

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

_LISTED, _VISITED = 1, 2


class Hand(Queue):
    """A queue, and where the hand is: at the next entry to look at, or at NONE for the oldest."""

    __slots__ = ("at",)

    def __init__(self) -> None:
        super().__init__()
        self.at = NONE


class Sieve(MarkedPolicy[Hand]):
    """Use sets a mark and moves nothing; an entry that is pinned when the hand comes starts over, marked."""

    name = "sieve"

    def group(self) -> Hand:
        """See Policy."""
        return Hand()

    def link(self, group: Hand, row: int) -> None:
        """See Policy."""
        if self._mark[row] & _LISTED:
            self._mark[row] |= _VISITED
        else:
            self._mark[row] |= _LISTED
            self._push(group, row)

    def use(self, group: Hand, rows: Iterable[int]) -> None:
        """See Policy."""
        marks = self._mark
        for row in rows:
            marks[row] |= _VISITED

    def order(self, group: Hand, rows: Iterable[int]) -> None:
        """See Policy."""

    def victim(self, group: Hand) -> int:
        """See Policy."""
        row = group.at
        while group.count:
            if row == NONE:
                row = group.oldest
            newer = self._newer[row]
            if self._pins[row]:
                self._remove(group, row)
                self._mark[row] = _VISITED
            elif self._mark[row] & _VISITED:
                self._mark[row] = _LISTED
            else:
                group.at = row
                return row
            row = newer
        group.at = NONE
        return NONE

    def forget(self, group: Hand, row: int, pinned: bool) -> None:
        """See Policy."""
        if self._mark[row] & _LISTED:
            if group.at == row:
                group.at = self._newer[row]
            self._remove(group, row)
        self._mark[row] = 0

    def load(self, group: Hand, rows: npt.NDArray[np.int32]) -> None:
        """See Policy."""
        self._push_all(group, rows)
        np.frombuffer(self._mark, np.uint8)[rows] = _LISTED
