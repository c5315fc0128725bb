"""`fifo`: who came first leaves first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtier.index.policies.base import NONE, MarkedPolicy, Queue

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

_LISTED = 1


class Fifo(MarkedPolicy[Queue]):
    """First in, first out: use changes nothing. An entry that is pinned when its turn comes starts over."""

    name = "fifo"

    def group(self) -> Queue:
        """See Policy."""
        return Queue()

    def link(self, group: Queue, row: int) -> None:
        """See Policy."""
        if not self._mark[row]:
            self._mark[row] = _LISTED
            self._push(group, row)

    def use(self, group: Queue, rows: Iterable[int]) -> None:
        """See Policy."""

    def order(self, group: Queue, rows: Iterable[int]) -> None:
        """See Policy."""

    def victim(self, group: Queue) -> int:
        """See Policy."""
        while (row := group.oldest) != NONE and self._pins[row]:
            self._remove(group, row)
            self._mark[row] = 0
        return row

    def forget(self, group: Queue, row: int, pinned: bool) -> None:
        """See Policy."""
        if self._mark[row]:
            self._remove(group, row)
            self._mark[row] = 0

    def load(self, group: Queue, rows: npt.NDArray[np.int32]) -> None:
        """See Policy."""
        self._push_all(group, rows)
        np.frombuffer(self._mark, np.uint8)[rows] = _LISTED
