"""SlotCache: the index of one tier. Keys, slots, pins and recency over flat columns; no I/O, no lock."""

from __future__ import annotations

import itertools
import time
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.config import page_up
from kvtier.index.expiry import Expiry
from kvtier.index.lifetimes import Lifetimes
from kvtier.index.owners import Holdings, Owners
from kvtier.index.slots import UNASSIGNED, SlotAllocator
from kvtier.index.table import EMPTY, KeyTable
from kvtier.owner import NOBODY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import numpy.typing as npt

NO_ROW = EMPTY
COLUMNS = {
    "offset": "q", "nbytes": "I", "generation": "Q", "stored_bytes": "I", "codec": "B", "owner": "Q",
    "stored_at": "I", "expires_at": "I",
}  # fmt: skip
"""What an index keeps of every chunk, by row: attributes of SlotCache, and their array type codes."""
_GONE = 1  # discarded while pinned: out of the table, slot still in use
_FEW_ROWS = 1 << 14
SUSPECT = 2  # the device failed to read it: a put replaces it
_ENDS = 4  # it expires at some time


class SlotCache:
    """Maps keys to slots of an area and evicts the least recently used unpinned chunk.

    A row number names an entry until it is discarded and its last pin is gone. `on_evict` is called
    with each row that is dropped to make room, while its key and columns can still be read.

    Tenants that have a limit evict their own chunks above it: those are in LRU lists of their own.
    """

    def __init__(
        self,
        area: int,
        extent_bytes: int,
        *,
        expected: int = 0,
        on_evict: Callable[[int], None] = lambda row: None,
        slots: SlotAllocator | None = None,
        owners: Owners | None = None,
        limits: Mapping[str, int] | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`limits` are bytes of slots by tenant, `wall` tells the seconds since 1970."""
        self.slots = slots or SlotAllocator(area, extent_bytes)
        self.table = KeyTable(expected)
        self.used_bytes = 0
        self.evicted = 0
        self.expired = 0
        owners = owners or Owners()
        owners.join(self)
        self.holdings = Holdings(owners, limits or {})
        self.expiry = Expiry(wall)
        self.lifetimes = Lifetimes(wall)
        self._reserved: dict[int, int] = {}  # offset -> owner
        self._on_evict = on_evict
        self.on_change: Callable[[bytes, bool], None] | None = None
        """Told each key that `has` begins or ceases to be true of, and which of the two it is."""
        self._tick = 0
        self._spare: list[int] = []  # rows to use again
        self._busy = np.zeros(self.slots.extents, np.int64)  # reserved or pinned slots per extent
        self._heat = np.zeros(self.slots.extents, np.int64)  # latest touch of any chunk per extent
        self._ends: dict[int, list[int]] = {}  # class of slots -> [most, least] recently used row
        # By tenant that has a limit; "": all others.
        self._lists: dict[str, dict[int, list[int]]] = {"": self._ends, **{name: {} for name in limits or ()}}
        self._limited = bool(limits)
        self.offset = array("q")
        self.nbytes = array("I")
        self.generation = array("Q")
        self.stored_bytes = array("I")  # in the slot: whole pages
        self.codec = array("B")
        self.owner = array("Q")  # names namespace and tenant; 0: nobody
        self.stored_at = array("I")  # seconds since 1970
        self.expires_at = array("I")  # the same; 0: never
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
        """Whether there is an entry for `key` in its time, and the device did not last fail to read it."""
        row = self.table.find(key)
        if row == NO_ROW:
            return False
        flags = self._flags[row]
        return not flags or not (flags & SUSPECT or self.is_expired(row))

    def has(self, key: bytes) -> bool:
        """As `is_sound`, whatever the time: an entry ends when it is swept."""
        row = self.table.find(key)
        return row != NO_ROW and not self._flags[row] & SUSPECT

    def is_expired(self, row: int) -> bool:
        """Whether the time of an entry is over."""
        return self.expiry.is_over(self.expires_at[row])

    def key(self, row: int) -> bytes:
        """Key of an entry."""
        return self.table.key(row)

    def reserve(self, nbytes: int, owner: int = NOBODY) -> int | None:
        """Offset of a slot for `nbytes`, evicting as needed; None if all else is pinned or reserved, or
        if all that the owner's tenant may have is.

        The slot belongs to the caller until `insert` or `release`.
        """
        while True:
            if owner != NOBODY and self.over_limit(nbytes, owner):
                if not self._evict_first(self._lists[self.holdings.tenant_of(owner)].values()):
                    return None
            elif (offset := self.slots.allocate(nbytes)) is not None:
                break
            elif not self._make_room(self.slots.size_for(nbytes)):
                return None
        extent = offset // self.slots.extent_bytes
        self._busy[extent] += 1
        size = self.slots.size_at(offset)
        self.used_bytes += size
        if owner != NOBODY:
            self._reserved[offset] = owner
            self.holdings.charge(owner, size)
        return offset

    def over_limit(self, nbytes: int, owner: int) -> bool:
        """Whether a slot for `nbytes` would take the owner's tenant above its limit."""
        return owner != NOBODY and self.holdings.is_over(owner, self.slots.size_for(nbytes))

    def reserved_for(self, offset: int) -> int:
        """The owner that a slot was reserved for."""
        return self._reserved.get(offset, NOBODY)

    def release(self, offset: int) -> None:
        """Give back a reserved slot that was not inserted."""
        self._busy[offset // self.slots.extent_bytes] -= 1
        size = self.slots.size_at(offset)
        self.used_bytes -= size
        self.holdings.charge(self._reserved.pop(offset, NOBODY), -size)
        self.slots.free(offset)

    def insert(
        self,
        key: bytes,
        offset: int,
        nbytes: int,
        generation: int = 0,
        *,
        stored_bytes: int = 0,
        codec: int = 0,
        stored_at: int = 0,
        expires_at: int = 0,
    ) -> int:
        """Bind a key that is not in the tier to a reserved slot; the new entry is pinned once.

        Its owner is the one that the slot was reserved for. `stored_bytes` of the slot are used, by
        default `nbytes` up to whole pages.
        """
        stored_bytes = stored_bytes or page_up(nbytes)
        owner = self._reserved.pop(offset, NOBODY)
        if expires_at:
            self.expiry.add(expires_at)
        if self._spare:
            row = self._spare.pop()
            self.offset[row] = offset
            self.nbytes[row] = nbytes
            self.generation[row] = generation
            self.stored_bytes[row] = stored_bytes
            self.codec[row] = codec
            self.owner[row] = owner
            self.stored_at[row] = stored_at
            self.expires_at[row] = expires_at
            self._pins[row] = 1
            self._flags[row] = _ENDS if expires_at else 0
        else:
            row = len(self.offset)
            self.offset.append(offset)
            self.nbytes.append(nbytes)
            self.generation.append(generation)
            self.stored_bytes.append(stored_bytes)
            self.codec.append(codec)
            self.owner.append(owner)
            self.stored_at.append(stored_at)
            self.expires_at.append(expires_at)
            self._pins.append(1)
            self._flags.append(_ENDS if expires_at else 0)
            self._touched.append(0)
            self._newer.append(NO_ROW)
            self._older.append(NO_ROW)
        self.lifetimes.enter(row)
        self.table.insert(key, row)
        if self.on_change is not None:
            self.on_change(key, True)
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
        key = self.table.key(row)
        self.table.remove(key)
        if self.on_change is not None and not self._flags[row] & SUSPECT:
            self.on_change(key, False)
        self._flags[row] |= _GONE
        if self.expires_at[row]:
            self.expiry.count -= 1
        if self._pins[row] == 0:
            self._unlink(row)
            self._free(row)

    def is_gone(self, row: int) -> bool:
        """Whether a pinned entry was discarded."""
        return bool(self._flags[row] & _GONE)

    def suspect(self, row: int, value: bool | None = None) -> bool:
        """Whether the device last failed to read this entry; `value` sets it."""
        before = bool(self._flags[row] & SUSPECT)
        if value is None or value == before:
            return before
        self._flags[row] ^= SUSPECT
        if self.on_change is not None and not self.is_gone(row):
            self.on_change(self.table.key(row), not value)
        return value

    def pinned(self) -> int:
        """Number of slots that are pinned or reserved: 0 when nothing is going on."""
        return int(self._busy.sum())

    def by_age(self) -> npt.NDArray[np.int64]:
        """Rows in the table, shape (n,): least recently used first, pinned ones last."""
        rows = self.table.rows().astype(np.int64)
        ages = np.frombuffer(self._touched, np.uint64)[rows] if rows.size else np.empty(0, np.uint64)
        pinned = np.frombuffer(self._pins, np.uint32)[rows] > 0 if rows.size else np.empty(0, bool)
        return rows[np.lexsort((ages, pinned))]

    def columns(self, start: int, stop: int) -> dict[str, npt.NDArray[Any]]:
        """Copies of what is kept of the live entries among these rows: COLUMNS, `row`, `key`, `touched`
        (when it was last used: the higher, the later) and `pinned`.
        """
        live = np.flatnonzero(np.frombuffer(self._flags[start:stop], np.uint8) & _GONE == 0)
        found: dict[str, npt.NDArray[Any]] = {
            name: np.frombuffer(getattr(self, name)[start:stop], code)[live] for name, code in COLUMNS.items()
        }
        found["row"] = start + live
        found["key"] = self.table.keys(start, stop)[live]
        found["touched"] = np.frombuffer(self._touched[start:stop], np.uint64)[live]
        found["pinned"] = np.frombuffer(self._pins[start:stop], np.uint32)[live] > 0
        return found

    def keys(self, start: int, stop: int) -> npt.NDArray[np.void]:
        """A copy of the keys in these rows that `has` is true of: shape (n,)."""
        flags = np.frombuffer(self._flags[start:stop], np.uint8)
        keys: npt.NDArray[np.void] = self.table.keys(start, stop)[flags & (_GONE | SUSPECT) == 0]
        return keys

    def next_live(self, row: int) -> int:
        """The first row of an entry from `row` on, or NO_ROW."""
        for start in range(row, len(self._flags), _FEW_ROWS):
            flags = np.frombuffer(self._flags[start : start + _FEW_ROWS], np.uint8)
            live = np.flatnonzero(flags & _GONE == 0)
            if live.size:
                return start + int(live[0])
        return NO_ROW

    @property
    def rows(self) -> int:
        """Row numbers ever given out: all entries have lower ones."""
        return len(self.offset)

    def load(
        self, keys: bytes, slot_bytes: npt.NDArray[np.int64], columns: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        """Fill an empty index: n distinct keys joined, all of COLUMNS in shape (n,), oldest first."""
        n = len(columns["offset"])
        offsets = columns["offset"].astype(np.int64)
        self.table.load(keys)
        self.slots.load(slot_bytes, offsets)
        sizes = slot_bytes[offsets // self.slots.extent_bytes]
        self.used_bytes = int(sizes.sum())
        self._tick = n
        for name, code in COLUMNS.items():
            getattr(self, name).frombytes(columns[name].astype(code).tobytes())
        self._pins.frombytes(bytes(self._pins.itemsize * n))
        self._flags.frombytes(np.where(columns["expires_at"] > 0, _ENDS, 0).astype(np.uint8).tobytes())
        self._touched.frombytes(np.arange(1, n + 1, dtype=np.uint64).tobytes())
        newer, older = np.full(n, NO_ROW, np.int32), np.full(n, NO_ROW, np.int32)
        names = list(self._lists)
        lists = sizes * len(names) + self._load_owners(sizes)
        order = np.argsort(lists, kind="stable").astype(np.int32)
        bounds = np.flatnonzero(np.diff(lists[order], prepend=-1, append=-1)).tolist()
        for start, end in itertools.pairwise(bounds):
            rows = order[start:end]
            newer[rows[:-1]], older[rows[1:]] = rows[1:], rows[:-1]
            size, number = divmod(int(lists[rows[0]]), len(names))
            self._lists[names[number]][size] = [int(rows[-1]), int(rows[0])]
        self.expiry.load(columns["expires_at"])
        self.lifetimes.load(columns["stored_at"])
        self._newer.frombytes(newer.tobytes())
        self._older.frombytes(older.tobytes())
        np.maximum.at(self._heat, offsets // self.slots.extent_bytes, np.arange(1, n + 1))

    def _load_owners(self, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Count what owners hold of loaded slots; per row the number of its tenant in `_lists`."""
        column = np.frombuffer(self.owner, np.uint64)
        if not column.any():
            return np.zeros(len(sizes), np.int64)
        numbers = {tenant: number for number, tenant in enumerate(self._lists)}
        owners, inverse = np.unique(column, return_inverse=True)
        held = np.bincount(inverse, sizes).astype(np.int64)
        for owner, nbytes in zip(owners.tolist(), held.tolist(), strict=True):
            self.holdings.charge(owner, nbytes)
        tenants = [numbers[self.holdings.tenant_of(owner)] for owner in owners.tolist()]
        return np.array(tenants, np.int64)[inverse]

    def leave_lists(self, owner: int) -> list[int]:
        """Take an owner's unpinned entries out of eviction; returns their rows for `join_lists`."""
        idle = [row for row in self.rows_of({owner}) if not self._pins[row]]
        for row in idle:
            self._unlink(row)
        return sorted(idle, key=self._touched.__getitem__)

    def join_lists(self, owner: int, rows: Iterable[int]) -> None:
        """Undo `leave_lists`, now that the owner's tenant is known."""
        self.holdings.join(owner)
        for row in rows:
            self._link(row)

    def rows_of(self, owners: set[int]) -> list[int]:
        """Rows in the table that belong to any of `owners`."""
        if not owners & self.holdings.by_owner.keys():
            return []
        wanted = np.fromiter(owners, np.uint64, len(owners))
        found = np.isin(np.frombuffer(self.owner, np.uint64), wanted)
        found &= np.frombuffer(self._flags, np.uint8) & _GONE == 0
        rows: list[int] = np.flatnonzero(found).tolist()
        return rows

    def sweep(self, most: int) -> list[int]:
        """Some rows in the table whose time is over, at most `most`; look again while `expiry.is_due`."""
        if not self.expiry.is_due():
            return []
        ends, flags = np.frombuffer(self.expires_at, np.uint32), np.frombuffer(self._flags, np.uint8)
        return self.expiry.step(ends, flags, _GONE, most)

    def evict_oldest(self) -> bool:
        """Evict the least recently used chunk of any size; False if all are pinned."""
        return self._evict_first(ends for lists in self._lists.values() for ends in lists.values())

    def _evict_first(self, lists: Iterable[list[int]]) -> bool:
        """Evict the least recently used chunk of some LRU lists; False if they are empty."""
        victim = self._first(lists)
        if victim != NO_ROW:
            self._evict(victim)
        return victim != NO_ROW

    def _first(self, lists: Iterable[list[int]]) -> int:
        """The least recently used chunk of some LRU lists, or NO_ROW."""
        oldest = [ends[1] for ends in lists if ends[1] != NO_ROW]
        return min(oldest, key=self._touched.__getitem__) if oldest else NO_ROW

    def _first_of_size(self, size: int) -> int:
        """The least recently used chunk in slots of this size, or NO_ROW."""
        return self._first(lists[size] for lists in self._lists.values() if size in lists)

    def _link(self, row: int) -> None:
        self._tick += 1
        self._touched[row] = self._tick
        extent = self.offset[row] // self.slots.extent_bytes
        self._heat[extent] = self._tick
        lists = self._lists[self.holdings.tenant_of(self.owner[row])] if self._limited else self._ends
        ends = lists.setdefault(self.slots.class_at(self.offset[row]), [NO_ROW, NO_ROW])
        newest = ends[0]
        self._older[row], self._newer[row] = newest, NO_ROW
        if newest == NO_ROW:
            ends[1] = row
        else:
            self._newer[newest] = row
        ends[0] = row

    def _unlink(self, row: int) -> None:
        lists = self._lists[self.holdings.tenant_of(self.owner[row])] if self._limited else self._ends
        ends = lists[self.slots.class_at(self.offset[row])]
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
        size = self.slots.size_at(self.offset[row])
        self.used_bytes -= size
        self.holdings.charge(self.owner[row], -size)
        self.slots.free(self.offset[row])
        self._spare.append(row)

    def _evict(self, row: int) -> None:
        self._on_evict(row)
        self.lifetimes.leave(row)
        self.discard(row)
        self.evicted += 1

    def _make_room(self, size: int) -> bool:
        """Evict the oldest chunk of this slot size, or empty an extent of another size if all in it
        is older still; False if there is neither.
        """
        victim = self._first_of_size(size)
        extent = self._coldest_extent(size)
        if extent is not None and (victim == NO_ROW or self._heat[extent] < self._touched[victim]):
            rows = self.table.rows().astype(np.int64)
            offsets = np.frombuffer(self.offset, np.int64)[rows]
            for row in rows[offsets // self.slots.extent_bytes == extent].tolist():
                self._evict(row)
            return True
        if victim == NO_ROW:
            sizes = {other for lists in self._lists.values() for other in lists}
            found = (self._first_of_size(other) for other in sizes if size < other <= size + size // 8)
            victim = next((row for row in found if row != NO_ROW), NO_ROW)
        if victim == NO_ROW:
            return False
        self._evict(victim)
        return True

    def _coldest_extent(self, size: int) -> int | None:
        """The longest untouched extent of another slot size that nothing pins."""
        sizes = self.slots.slot_bytes
        if all(other == size for lists in self._lists.values() for other in lists):
            return None
        movable = np.flatnonzero((sizes != UNASSIGNED) & (sizes != size) & (self._busy == 0))
        return int(movable[np.argmin(self._heat[movable])]) if movable.size else None
