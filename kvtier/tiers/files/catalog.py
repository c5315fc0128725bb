"""Catalog: what this process knows of the files in a directory, and which of them are to go. Memory only."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from kvtier.index.bytes import ByteCache
from kvtier.index.rows import NO_ROW
from kvtier.tiers.files.format import DELETE, EVICT, PUT, ChunkFile, Event

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kvtier.config import PolicyName
    from kvtier.index.owners import Owners
    from kvtier.tiers.files.directory import Listed

T = TypeVar("T")
_AT_A_TIME = 256
"""Files that are taken in while the store's lock is held: some milliseconds."""
_TOUCH_EVERY = 60 * 10**9
"""Nanoseconds after which a file that is used is marked so again."""


@dataclass(frozen=True, slots=True)
class Grave:
    """A file that is to go."""

    file: ChunkFile
    mtime: int
    kind: int
    """DELETE if somebody asked for that, else EVICT."""
    may_stay: bool = False
    """Whether it stays if somebody else has used it since `mtime`."""


class Catalog:
    """The index of a directory, in agreement with what other processes do. The store's lock guards it."""

    def __init__(
        self,
        capacity: int,
        owners: Owners | None = None,
        limits: Mapping[str, int] | None = None,
        wall: Callable[[], float] = time.time,
        policy: PolicyName = "lru",
    ) -> None:
        """`capacity` in bytes of all chunks; the rest as of SlotCache."""
        self.index = ByteCache(
            capacity, on_evict=lambda row: self._evicted(row), owners=owners, limits=limits, wall=wall,
            policy=policy,
        )  # fmt: skip
        self.graves: list[Grave] = []
        self.deleted: list[bytes] = []
        """Keys that others deleted, as far as nobody was told yet."""
        self._mtime = array("q")  # by row, nanoseconds, as last seen
        self._stale: dict[bytes, None] = {}  # keys whose files are to be marked as used

    def file(self, row: int) -> ChunkFile:
        """The file of an entry."""
        index = self.index
        return ChunkFile(
            index.key(row), index.nbytes[row], index.stored_bytes[row], index.codec[row], index.owner[row],
            index.expires_at[row], index.generation[row],
        )  # fmt: skip

    def row_of(self, file: ChunkFile) -> int:
        """The row of exactly this file, or NO_ROW."""
        row = self.index.find(file.key)
        return row if row != NO_ROW and self.file(row) == file else NO_ROW

    def insert(self, offset: int, file: ChunkFile, mtime: int) -> int:
        """Enter a file that has its room, pinned once, unless its key is there. Returns the row."""
        row = self.index.find(file.key)
        if row != NO_ROW:
            self.index.release(offset)
            self.index.pin(row)
            return row
        row = self.index.insert(
            file.key, offset, file.payload_bytes, file.digest,
            stored_bytes=file.stored_bytes, codec=file.codec, stored_at=mtime // 10**9,
            expires_at=file.expires_at,
        )  # fmt: skip
        self.saw(row, mtime)
        return row

    def take_in(self, file: ChunkFile, mtime: int) -> None:
        """Enter a file that is there, in place of another one of the same key."""
        row = self.index.find(file.key)
        if row != NO_ROW and self.file(row) != file:
            self.index.discard(row)
            row = NO_ROW
        if row == NO_ROW:
            row = self.index.adopt(
                file.key, file.payload_bytes, file.digest, stored_bytes=file.stored_bytes, codec=file.codec,
                owner=file.owner, stored_at=mtime // 10**9, expires_at=file.expires_at,
            )  # fmt: skip
            self.index.unpin(row)
        self.saw(row, mtime)

    def saw(self, row: int, mtime: int) -> None:
        """Note when a file was changed."""
        if row == len(self._mtime):
            self._mtime.append(mtime)
        else:
            self._mtime[row] = mtime

    def doom(self, row: int, kind: int) -> None:
        """Forget an entry, and have its file removed."""
        self.graves.append(Grave(self.file(row), self._mtime[row], kind))
        self.index.discard(row)

    def evict_oldest(self) -> Grave | None:
        """Turn the least recently used unpinned entry into a grave, the caller's; None if there is none."""
        return self.graves.pop() if self.index.evict_oldest() else None

    def _evicted(self, row: int) -> None:
        self.graves.append(Grave(self.file(row), self._mtime[row], EVICT, may_stay=True))

    def touch(self, rows: Iterable[int]) -> None:
        """Make entries the most recently used, and have their files marked if that is long ago."""
        rows = list(rows)
        self.index.touch(rows)
        old = time.time_ns() - _TOUCH_EVERY
        for row in rows:
            if self._mtime[row] < old:
                self._stale[self.index.key(row)] = None

    def take_stale(self, most: int) -> list[ChunkFile]:
        """Some of the files to mark as used, which then count as marked."""
        keys = list(self._stale)[:most]
        for key in keys:
            del self._stale[key]
        return [self.file(row) for key in keys if (row := self.index.find(key)) != NO_ROW]

    def apply(self, lock: threading.Lock, events: Sequence[Event]) -> None:
        """Follow what other processes did. Takes the store's lock for some of it at a time."""
        for some in _slices(events):
            with lock:
                for event in some:
                    self._apply(event)

    def _apply(self, event: Event) -> None:
        if event.kind == PUT:
            self.take_in(event.file, event.mtime)
            return
        self.graves = [g for g in self.graves if g.file != event.file or g.kind == DELETE]
        if (row := self.row_of(event.file)) != NO_ROW:
            self.index.discard(row)
        if event.kind == DELETE:
            self.deleted.append(event.file.key)

    def compare(self, lock: threading.Lock, listing: Iterable[Listed], part_bytes: int) -> None:
        """Make the index that of a listing, but for what is about to be removed. Takes the store's lock for
        some of it at a time; no name may change meanwhile.
        """
        there = {
            listed.file: listed.mtime
            for listed in listing
            if listed.file is not None and listed.is_whole(part_bytes)
        }
        with lock:
            files = [self.file(row) for row in self.index.table.rows().tolist()]
        for some in _slices([file for file in files if file not in there]):
            with lock:
                for file in some:
                    if (row := self.row_of(file)) != NO_ROW:
                        self.deleted.append(file.key)  # or it was evicted: that is not known
                        self.index.discard(row)
        for part in _slices(list(there.items())):
            with lock:
                doomed = {grave.file for grave in self.graves}
                for file, mtime in part:
                    if file not in doomed:
                        self.take_in(file, mtime)


def _slices(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[start : start + _AT_A_TIME] for start in range(0, len(items), _AT_A_TIME))


def without_mercy(grave: Grave) -> Grave:
    """The same, whoever has used it."""
    return replace(grave, may_stay=False)
