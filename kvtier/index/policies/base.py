"""What every eviction policy is: lists of entries over columns, and who of them leaves next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy.typing as npt

NONE = -1
"""No row."""


class Queue:
    """Entries in a row, linked over the policy's columns."""

    __slots__ = ("count", "newest", "oldest")

    def __init__(self) -> None:
        self.newest = NONE
        self.oldest = NONE
        self.count = 0


Group = TypeVar("Group")


class Policy(ABC, Generic[Group]):
    """Orders the entries of one index. It knows them by row and asks for a key only where it says so.

    Entries whose slots can take each other's place, and which one tenant's limit counts, form a group:
    victims are asked for by group. A pinned entry is never a victim. One request uses an entry once:
    `use` counts, `order` does not.

    An entry's life: `enter`, then `link` when its first pin is gone; `hold` and `link` around further
    pins; `forget` when it leaves, with `evicted` before if that was to make room. Not thread-safe: the
    index's owner has a lock.
    """

    name: ClassVar[str]
    """As the settings have it."""

    def __init__(self, pins: array[int], key: Callable[[int], bytes], wall: Callable[[], float]) -> None:
        """`pins` by row, the index's own column; `key` of a row; `wall` tells the seconds since 1970."""
        self._pins = pins
        self._key = key
        self._wall = wall
        self._newer = array("i")
        self._older = array("i")

    @abstractmethod
    def group(self) -> Group:
        """A new group, without entries."""

    def grow(self) -> None:
        """There is one row more."""
        self._newer.append(NONE)
        self._older.append(NONE)

    def enter(self, row: int) -> None:
        """A row stands for a new entry from now on, pinned."""

    @abstractmethod
    def link(self, group: Group, row: int) -> None:
        """Nothing pins an entry any more: it is new, or was used."""

    @abstractmethod
    def hold(self, group: Group, row: int) -> None:
        """An entry is pinned from now on."""

    @abstractmethod
    def use(self, group: Group, rows: Iterable[int]) -> None:
        """A request used entries that nothing pins: tail first, head last."""

    @abstractmethod
    def order(self, group: Group, rows: Iterable[int]) -> None:
        """The same request ended: have the head outlive the tail. It counts for nothing else."""

    @abstractmethod
    def victim(self, group: Group) -> int:
        """Who of a group leaves next, or NONE if all in it are pinned. It stays until `forget`."""

    def evicted(self, row: int) -> None:
        """A victim is about to leave; its key can still be read."""

    @abstractmethod
    def forget(self, group: Group, row: int, pinned: bool) -> None:
        """An entry is gone, `pinned` or not."""

    def take(self, group: Group, most: int) -> list[int]:
        """Have up to `most` victims leave, whose keys can still be read. Returns their rows."""
        rows: list[int] = []
        while len(rows) < most and (row := self.victim(group)) != NONE:
            self.evicted(row)
            self.forget(group, row, False)
            rows.append(row)
        return rows

    def start(self, group: Group, rows: Iterable[int]) -> None:
        """Rows stand for new entries that nothing pins: tail first, head last."""
        for row in rows:
            self.enter(row)
            self.link(group, row)

    @abstractmethod
    def load(self, group: Group, rows: npt.NDArray[np.int32]) -> None:
        """Fill an empty group with entries that nothing pins, least recently used first."""

    def resize(self, rows: int) -> None:
        """Have columns for so many rows, all of an empty index."""
        nobody = np.full(rows, NONE, np.int32).tobytes()
        self._newer = array("i", nobody)
        self._older = array("i", nobody)

    def _push(self, queue: Queue, row: int) -> None:
        newest = queue.newest
        self._older[row] = newest
        self._newer[row] = NONE
        if newest == NONE:
            queue.oldest = row
        else:
            self._newer[newest] = row
        queue.newest = row
        queue.count += 1

    def _remove(self, queue: Queue, row: int) -> None:
        newer, older = self._newer[row], self._older[row]
        if newer == NONE:
            queue.newest = older
        else:
            self._older[newer] = older
        if older == NONE:
            queue.oldest = newer
        else:
            self._newer[older] = newer
        queue.count -= 1

    def _push_all(self, queue: Queue, rows: npt.NDArray[np.int32]) -> None:
        """Fill an empty queue, oldest first."""
        newer, older = np.frombuffer(self._newer, np.int32), np.frombuffer(self._older, np.int32)
        newer[rows[:-1]], older[rows[1:]] = rows[1:], rows[:-1]
        queue.oldest, queue.newest, queue.count = int(rows[0]), int(rows[-1]), len(rows)


class MarkedPolicy(Policy[Group]):
    """A policy that keeps pinned entries where they are, with a byte of marks for each.

    Those that it meets as it looks for a victim leave their list, and come back when nothing pins them.
    """

    def __init__(self, pins: array[int], key: Callable[[int], bytes], wall: Callable[[], float]) -> None:
        super().__init__(pins, key, wall)
        self._mark = array("B")

    def grow(self) -> None:
        """See Policy."""
        super().grow()
        self._mark.append(0)

    def enter(self, row: int) -> None:
        """See Policy."""
        self._mark[row] = 0

    def hold(self, group: Group, row: int) -> None:
        """See Policy."""

    def resize(self, rows: int) -> None:
        """See Policy."""
        super().resize(rows)
        self._mark = array("B", bytes(rows))
