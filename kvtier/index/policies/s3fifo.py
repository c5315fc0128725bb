"""`s3fifo`: newcomers pass a small queue, and only those that are used again get into the main one.

Yang et al., "FIFO queues are all you need for cache eviction", SOSP'23.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtier.index.policies.base import NONE, MarkedPolicy, Queue
from kvtier.index.policies.ghost import STAMPS, Ghost

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterable

    import numpy.typing as npt

_USES, _MAIN, _LISTED = 3, 4, 8
"""Marks: uses since it came or its turn last was, up to 3; in the main queue, or to go there; in a queue."""


class Pair:
    """The two queues of a group, and how many entries it has when nobody is on the way in or out."""

    __slots__ = ("_before", "_links", "full", "main", "small")

    def __init__(self) -> None:
        self.small = Queue()
        self.main = Queue()
        self.full = 0
        self._before = 0
        self._links = 0

    def note_size(self) -> None:
        """The most there were of late: those whose slots are being filled again are newcomers to be."""
        total = self.small.count + self.main.count
        self._links += 1
        if self._links > 2 * self.full:
            self._before, self.full, self._links = self.full, total, 0
        self.full = max(self.full, total)

    @property
    def is_main_full(self) -> bool:
        """Whether the main queue has its nine tenths."""
        return 10 * self.main.count > 9 * max(self.full, self._before)


class S3Fifo(MarkedPolicy[Pair]):
    """The small queue has a tenth of a group. What leaves it unused is remembered until as many more have
    left as there are entries; if it comes again by then, it goes to the main queue at once.
    """

    name = "s3fifo"

    def __init__(self, pins: array[int], key: Callable[[int], bytes], wall: Callable[[], float]) -> None:
        super().__init__(pins, key, wall)
        self._ghost = Ghost()
        self._left = 0  # entries that left the small queue, ever
        self._listed = 0

    def group(self) -> Pair:
        """See Policy."""
        return Pair()

    def enter(self, row: int) -> None:
        """See Policy."""
        found = self._ghost.recall(self._key(row))
        is_known = found is not None and (self._left - found[1]) % STAMPS <= self._listed
        self._mark[row] = _MAIN if is_known else 0

    def link(self, group: Pair, row: int) -> None:
        """See Policy."""
        mark = self._mark[row]
        if mark & _LISTED:
            self.use(group, (row,))
        else:
            self._mark[row] = mark & _MAIN | _LISTED
            self._push(group.main if mark & _MAIN else group.small, row)
            self._listed += 1
            group.note_size()

    def use(self, group: Pair, rows: Iterable[int]) -> None:
        """See Policy."""
        marks = self._mark
        for row in rows:
            if marks[row] & _USES < _USES:
                marks[row] += 1

    def order(self, group: Pair, rows: Iterable[int]) -> None:
        """See Policy."""

    def victim(self, group: Pair) -> int:
        """See Policy."""
        small, main, marks = group.small, group.main, self._mark
        while small.count or main.count:
            is_small = small.count > 0 and not group.is_main_full
            queue = small if is_small else main
            row = queue.oldest
            if self._pins[row]:
                self._remove(queue, row)
                self._listed -= 1
                marks[row] = _MAIN
            elif not marks[row] & _USES:
                return row
            else:
                self._remove(queue, row)
                self._push(main, row)
                marks[row] = _MAIN | _LISTED if is_small else marks[row] - 1
        return NONE

    def evicted(self, row: int) -> None:
        """See Policy."""
        if not self._mark[row] & _MAIN:
            if 2 * self._listed > len(self._ghost):
                self._ghost.grow()
            self._ghost.remember(self._key(row), 0, self._left)
            self._left += 1

    def forget(self, group: Pair, row: int, pinned: bool) -> None:
        """See Policy."""
        mark = self._mark[row]
        if mark & _LISTED:
            self._remove(group.main if mark & _MAIN else group.small, row)
            self._listed -= 1
        self._mark[row] = 0

    def load(self, group: Pair, rows: npt.NDArray[np.int32]) -> None:
        """See Policy. All come to the main queue: those that have to make room do so in their order."""
        self._push_all(group.main, rows)
        np.frombuffer(self._mark, np.uint8)[rows] = _MAIN | _LISTED
        self._listed += len(rows)
        group.full = len(rows)
