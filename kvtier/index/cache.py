"""SlotCache: the index of one tier. Keys, slots, pins and recency over flat columns; no I/O, no lock."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from kvtier.index.slots import UNASSIGNED, SlotAllocator
from kvtier.index.table import EMPTY, KeyTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy.typing as npt

NO_ROW = EMPTY
_GONE = 1  # discarded while pinned: out of the table, slot still in use
SUSPECT = 2  # the device failed to read it: a put replaces it


class SlotCache:
    """Maps keys to slots of an area and evicts the least recently used unpinned chunk.

    A row number names an entry until it is discarded and its last pin is gone. `on_evict` is called
    with each row that is dropped to make room, while its key and columns can still be read.
    """

    def __init__(
        self,
        area: int,
        extent_bytes: int,
        *,
        expected: int = 0,
        on_evict: Callable[[int], None] = lambda row: None,
    ) -> None:
        self.slots = SlotAllocator(area, extent_bytes)
        self.table = KeyTable(expected)
        self.used_bytes = 0
        self.evicted = 0
        self._on_evict = on_evict
        self._tick = 0
        self._spare: list[int] = []  # rows to use again
        self._busy = np.zeros(self.slots.extents, np.int64)  # reserved or pinned slots per extent
        self._heat = np.zeros(self.slots.extents, np.int64)  # latest touch of any chunk per extent
        self._ends: dict[int, list[int]] = {}  # slot size -> [most, least] recently used row
        self.offset = array("q")
        self.nbytes = array("I")
        self.generation = array("Q")
        self._pins = array("I")
        self._flags = array("B")
        self._touched = array("Q")
        self._newer = array("i")
        self._older = array("i")

    def __len__(self) -> int:
        return len(self.table)

    def find(self, key: bytes) -> int:
        """Row of `key`, or NO_ROW."""
        return self.table.find(key)

    def is_sound(self, key: bytes) -> bool:
        """Whether there is an entry for `key`, and the device did not last fail to read it."""
        row = self.table.find(key)
        return row != NO_ROW and not self._flags[row] & SUSPECT

    def key(self, row: int) -> bytes:
        """Key of an entry."""
        return self.table.key(row)

    def reserve(self, nbytes: int) -> int | None:
        """Offset of a slot for `nbytes`, evicting as needed; None if all else is pinned or reserved.

        The slot belongs to the caller until `insert` or `release`.
        """
        while (offset := self.slots.allocate(nbytes)) is None:
            if not self._make_room(self.slots.size_for(nbytes)):
                return None
        extent = offset // self.slots.extent_bytes
        self._busy[extent] += 1
        self.used_bytes += self.slots.size_at(offset)
        return offset

    def release(self, offset: int) -> None:
        """Give back a reserved slot that was not inserted."""
        self._busy[offset // self.slots.extent_bytes] -= 1
        self.used_bytes -= self.slots.size_at(offset)
        self.slots.free(offset)

    def insert(self, key: bytes, offset: int, nbytes: int, generation: int = 0) -> int:
        """Bind a key that is not in the tier to a reserved slot; the new entry is pinned once."""
        if self._spare:
            row = self._spare.pop()
            self.offset[row] = offset
            self.nbytes[row] = nbytes
            self.generation[row] = generation
            self._pins[row] = 1
            self._flags[row] = 0
        else:
            row = len(self.offset)
            self.offset.append(offset)
            self.nbytes.append(nbytes)
            self.generation.append(generation)
            self._pins.append(1)
            self._flags.append(0)
            self._touched.append(0)
            self._newer.append(NO_ROW)
            self._older.append(NO_ROW)
        self.table.insert(key, row)
        return row

    def pin(self, row: int) -> None:
        """Keep an entry, and its slot if it is discarded, until `unpin`."""
        if self._pins[row] == 0:
            self._unlink(row)
            self._busy[self.offset[row] // self.slots.extent_bytes] += 1
        self._pins[row] += 1

    def unpin(self, row: int) -> None:
        """Undo one `pin`. The last one makes the entry the most recently used, or frees it if gone."""
        self._pins[row] -= 1
        if self._pins[row]:
            return
        self._busy[self.offset[row] // self.slots.extent_bytes] -= 1
        if self._flags[row] & _GONE:
            self._free(row)
        else:
            self._link(row)

    def touch(self, rows: Iterable[int]) -> None:
        """Make unpinned entries the most recently used, in the order given: tail first, head last."""
        for row in rows:
            if self._pins[row] == 0:
                self._unlink(row)
                self._link(row)

    def discard(self, row: int) -> None:
        """Forget an entry now; its slot is free once nothing pins it."""
        self.table.remove(self.table.key(row))
        self._flags[row] |= _GONE
        if self._pins[row] == 0:
            self._unlink(row)
            self._free(row)

    def is_gone(self, row: int) -> bool:
        """Whether a pinned entry was discarded."""
        return bool(self._flags[row] & _GONE)

    def suspect(self, row: int, value: bool | None = None) -> bool:
        """Whether the device last failed to read this entry; `value` sets it."""
        if value is not None:
            self._flags[row] = self._flags[row] & ~SUSPECT | (SUSPECT if value else 0)
        return bool(self._flags[row] & SUSPECT)

    def pinned(self) -> int:
        """Number of slots that are pinned or reserved: 0 when nothing is going on."""
        return int(self._busy.sum())

    def by_age(self) -> npt.NDArray[np.int64]:
        """Rows in the table, shape (n,): least recently used first, pinned ones last."""
        rows = self.table.rows().astype(np.int64)
        ages = np.frombuffer(self._touched, np.uint64)[rows] if rows.size else np.empty(0, np.uint64)
        pinned = np.frombuffer(self._pins, np.uint32)[rows] > 0 if rows.size else np.empty(0, bool)
        return rows[np.lexsort((ages, pinned))]

    def load(
        self,
        keys: bytes,
        slot_bytes: npt.NDArray[np.int64],
        offsets: npt.NDArray[np.int64],
        nbytes: npt.NDArray[np.uint32],
        generations: npt.NDArray[np.uint64],
    ) -> None:
        """Fill an empty index: n distinct keys joined, columns of shape (n,), oldest first."""
        n = len(offsets)
        self.table.load(keys)
        self.slots.load(slot_bytes, offsets)
        sizes = slot_bytes[offsets // self.slots.extent_bytes]
        self.used_bytes = int(sizes.sum())
        self._tick = n
        for column, values in (
            (self.offset, offsets.astype(np.int64)),
            (self.nbytes, nbytes.astype(np.uint32)),
            (self.generation, generations.astype(np.uint64)),
            (self._pins, np.zeros(n, np.uint32)),
            (self._flags, np.zeros(n, np.uint8)),
            (self._touched, np.arange(1, n + 1, dtype=np.uint64)),
        ):
            column.frombytes(values.tobytes())
        newer, older = np.full(n, NO_ROW, np.int32), np.full(n, NO_ROW, np.int32)
        for size in np.unique(sizes).tolist():
            rows = np.flatnonzero(sizes == size).astype(np.int32)
            newer[rows[:-1]], older[rows[1:]] = rows[1:], rows[:-1]
            self._ends[size] = [int(rows[-1]), int(rows[0])]
        self._newer.frombytes(newer.tobytes())
        self._older.frombytes(older.tobytes())
        np.maximum.at(self._heat, offsets // self.slots.extent_bytes, np.arange(1, n + 1))

    def evict_oldest(self) -> bool:
        """Evict the least recently used chunk of any size; False if all are pinned."""
        oldest = [ends[1] for ends in self._ends.values() if ends[1] != NO_ROW]
        if not oldest:
            return False
        self._evict(min(oldest, key=self._touched.__getitem__))
        return True

    def _link(self, row: int) -> None:
        self._tick += 1
        self._touched[row] = self._tick
        extent = self.offset[row] // self.slots.extent_bytes
        self._heat[extent] = self._tick
        ends = self._ends.setdefault(self.slots.size_at(self.offset[row]), [NO_ROW, NO_ROW])
        newest = ends[0]
        self._older[row], self._newer[row] = newest, NO_ROW
        if newest == NO_ROW:
            ends[1] = row
        else:
            self._newer[newest] = row
        ends[0] = row

    def _unlink(self, row: int) -> None:
        ends = self._ends[self.slots.size_at(self.offset[row])]
        newer, older = self._newer[row], self._older[row]
        if newer == NO_ROW:
            ends[0] = older
        else:
            self._older[newer] = older
        if older == NO_ROW:
            ends[1] = newer
        else:
            self._newer[older] = newer

    def _free(self, row: int) -> None:
        self.used_bytes -= self.slots.size_at(self.offset[row])
        self.slots.free(self.offset[row])
        self._spare.append(row)

    def _evict(self, row: int) -> None:
        self._on_evict(row)
        self.discard(row)
        self.evicted += 1

    def _make_room(self, size: int) -> bool:
        """Evict the oldest chunk of this slot size, or empty an extent of another size if all in it
        is older still; False if there is neither.
        """
        victim = self._ends.get(size, (NO_ROW, NO_ROW))[1]
        extent = self._coldest_extent(size)
        if extent is not None and (victim == NO_ROW or self._heat[extent] < self._touched[victim]):
            rows = self.table.rows().astype(np.int64)
            offsets = np.frombuffer(self.offset, np.int64)[rows]
            for row in rows[offsets // self.slots.extent_bytes == extent].tolist():
                self._evict(row)
            return True
        if victim == NO_ROW:
            near = (ends[1] for other, ends in self._ends.items() if size < other <= size + size // 8)
            victim = next((row for row in near if row != NO_ROW), NO_ROW)
        if victim == NO_ROW:
            return False
        self._evict(victim)
        return True

    def _coldest_extent(self, size: int) -> int | None:
        """The longest untouched extent of another slot size that nothing pins."""
        sizes = self.slots.slot_bytes
        if len(self._ends) < 2 and size in self._ends:
            return None
        movable = np.flatnonzero((sizes != UNASSIGNED) & (sizes != size) & (self._busy == 0))
        return int(movable[np.argmin(self._heat[movable])]) if movable.size else None
