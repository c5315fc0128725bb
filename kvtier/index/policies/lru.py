"""`lru`: who was used longest ago leaves first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.index.policies.base import NONE, Policy, Queue

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    import numpy.typing as npt


class Lru(Policy[Queue]):
    """Least recently used. Prefixes are used from tail to head, so that heads outlive tails; pinned
    entries are in no list and come back as the most recently used.
    """

    name = "lru"

    def group(self) -> Queue:
        """See Policy."""
        return Queue()

    def link(self, group: Queue, row: int) -> None:
        """See Policy."""
        self._push(group, row)

    def hold(self, group: Queue, row: int) -> None:
        """See Policy."""
        self._remove(group, row)

    def use(self, group: Queue, rows: Iterable[int]) -> None:
        """See Policy."""
        # As `_remove` and `_push`, without their calls: every request does this to all its chunks.
        newers, olders = self._newer, self._older
        newest = group.newest
        for row in rows:
            newer = newers[row]
            if newer == NONE:
                continue  # the newest already
            older = olders[row]
            olders[newer] = older
            if older == NONE:
                group.oldest = newer
            else:
                newers[older] = newer
            olders[row], newers[row] = newest, NONE
            newers[newest] = newest = row
        group.newest = newest

    def order(self, group: Queue, rows: Iterable[int]) -> None:
        """See Policy."""
        self.use(group, rows)

    def victim(self, group: Queue) -> int:
        """See Policy."""
        return group.oldest

    def forget(self, group: Queue, row: int, pinned: bool) -> None:
        """See Policy."""
        if not pinned:
            self._remove(group, row)

    def take(self, group: Queue, most: int) -> list[int]:
        """See Policy."""
        rows: list[int] = []
        row = group.oldest
        while len(rows) < most and row != NONE:
            rows.append(row)
            row = self._newer[row]
        group.oldest = row
        group.count -= len(rows)
        if row == NONE:
            group.newest = NONE
        else:
            self._older[row] = NONE
        return rows

    def start(self, group: Queue, rows: Iterable[int]) -> None:
        """See Policy."""
        newers, olders, newest = self._newer, self._older, group.newest
        for row in rows:
            olders[row] = newest
            if newest == NONE:
                group.oldest = row
            else:
                newers[newest] = row
            newest = row
            group.count += 1
        if newest != NONE:
            newers[newest] = NONE
        group.newest = newest

    def load(self, group: Queue, rows: npt.NDArray[np.int32]) -> None:
        """See Policy."""
        self._push_all(group, rows)
