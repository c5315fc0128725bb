"""SlotCache: the index of one tier. What is in which slot and who leaves; no I/O, no lock."""

from __future__ import annotations

import itertools
import time
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.config import page_up
from kvtier.index.lifetimes import Lifetimes
from kvtier.index.owners import Holdings, Owners
from kvtier.index.policies import make
from kvtier.index.rows import COLUMNS, ENDS, GONE, NO_ROW, SUSPECT, Rows
from kvtier.index.slots import UNASSIGNED, SlotAllocator
from kvtier.owner import NOBODY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import numpy.typing as npt

    from kvtier.config import PolicyName


class SlotCache(Rows):
    """Maps keys to slots of an area and evicts the unpinned chunk that its policy names.

    A row number names an entry until it is discarded and its last pin is gone. `on_evict` is called
    with each row that is dropped to make room, while its key and columns can still be read.

    Tenants that have a limit evict their own chunks above it: those are groups of their own. Of several
    groups that could make room, the one whose victim was used longest ago does.
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
        policy: PolicyName = "lru",
    ) -> None:
        """`limits` are bytes of slots by tenant, `wall` tells the seconds since 1970; `policy` as in the
        settings.
        """
        self.slots = slots or SlotAllocator(area, extent_bytes)
        super().__init__(expected, wall)
        self.used_bytes = 0
        self.evicted = 0
        self.expired = 0
        owners = owners or Owners()
        owners.join(self)
        self.holdings = Holdings(owners, limits or {})
        self.lifetimes = Lifetimes(wall)
        self._reserved: dict[int, int] = {}  # offset -> owner
        self._on_evict = on_evict
        self.on_change: Callable[[bytes, bool], None] | None = None
        """Told each key that `has` begins or ceases to be true of, and which of the two it is."""
        self._tick = 0
        self._spare: list[int] = []  # rows to use again
        self._busy = array("q", bytes(8 * self.slots.extents))  # reserved or pinned slots per extent
        self._heat = array("q", bytes(8 * self.slots.extents))  # latest touch of any chunk per extent
        # Groups of the policy by class of slots, by tenant that has a limit; "": all others.
        self._groups: dict[str, dict[int, Any]] = {"": {}, **{name: {} for name in limits or ()}}
        self._only: Any = None  # the group, as long as there is but one; heat is not kept then
        self._only_class = -1
        self._classes: set[int] = set()  # of all slots that were ever given out
        self.policy = make(policy, self._pins, self.table.key, wall)

    def reserve(self, nbytes: int, owner: int = NOBODY) -> int | None:
        """Offset of a slot for `nbytes`, evicting as needed; None if all else is pinned or reserved, or
        if all that the owner's tenant may have is.

        The slot belongs to the caller until `insert` or `release`.
        """
        while True:
            if owner != NOBODY and self.over_limit(nbytes, owner):
                if not self._evict_first(self._groups[self.holdings.tenant_of(owner)].values()):
                    return None
            elif (offset := self.slots.allocate(nbytes)) is not None:
                break
            elif not self._make_room(self.slots.size_for(nbytes)):
                return None
        extent = offset // self.slots.extent_bytes
        self._busy[extent] += 1
        size = self.slots.size_at(offset)
        self.used_bytes += size
        if (size_class := self.slots.class_at(offset)) not in self._classes:
            self._classes.add(size_class)
            if self._only is not None:
                self._only, self._only_class = None, -1
                self._warm_up()
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
            self._flags[row] = ENDS if expires_at else 0
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
            self._flags.append(ENDS if expires_at else 0)
            self._touched.append(0)
            self.policy.grow()
        self.lifetimes.enter(row)
        self.table.insert(key, row)
        self.policy.enter(row)
        if self.on_change is not None:
            self.on_change(key, True)
        return row

    def fill(self, keys: list[bytes], nbytes: int) -> list[int]:
        """Enter many chunks of one size and of nobody, whose keys are not in the tier: as `reserve` and
        `insert` of all, head first, and then `unpin`, tail first. Returns the rows of those that got a slot.
        """
        rows: list[int] = []
        may_replace = self._only_class == self.slots.size_for(nbytes) and self.on_change is None
        while len(rows) < len(keys) and not (may_replace and not self.slots.has_free(nbytes)):
            if (offset := self.reserve(nbytes)) is None:
                break
            rows.append(self.insert(keys[len(rows)], offset, nbytes))
        replaced = self._replace(keys[len(rows) :], nbytes) if may_replace else []
        for row in reversed(rows):
            self.unpin(row)
        return rows + replaced

    def _replace(self, keys: list[bytes], nbytes: int) -> list[int]:
        """Put chunks in the slots of victims, which are all of one size. Returns their rows, head first."""
        group = self._only
        rows = self.policy.take(group, len(keys))
        for row in rows:
            self._on_evict(row)
        self.table.replace_all(rows, keys[: len(rows)])
        columns, flags, touched = [self.generation, self.codec, self.stored_at], self._flags, self._touched
        nbytes_of, stored_of, stored_bytes = self.nbytes, self.stored_bytes, page_up(nbytes)
        for row in rows:
            if self.expires_at[row]:
                self.expiry.count -= 1
                self.expires_at[row] = 0
            if self.owner[row]:
                self.holdings.charge(self.owner[row], -self.slots.size_at(self.offset[row]))
                self.owner[row] = NOBODY
            nbytes_of[row], stored_of[row], flags[row] = nbytes, stored_bytes, 0
            for column in columns:
                column[row] = 0
        self.evicted += len(rows)
        rows.reverse()
        for tick, row in enumerate(rows, self._tick + 1):
            touched[row] = tick
        self._tick += len(rows)
        self.policy.start(group, rows)
        rows.reverse()
        return rows

    def pin(self, row: int) -> None:
        """Keep an entry, and its slot if it is discarded, until `unpin`."""
        if self._pins[row] == 0:
            self._hold(row)
            self._busy[self.offset[row] // self.slots.extent_bytes] += 1
        self._pins[row] += 1

    def unpin(self, row: int) -> None:
        """Undo one `pin`. The last one counts as a use of the entry, or frees it if gone."""
        self._pins[row] -= 1
        if self._pins[row]:
            return
        self._busy[self.offset[row] // self.slots.extent_bytes] -= 1
        if self._flags[row] & GONE:
            self._free(row)
        else:
            self._link(row)

    def touch(self, rows: Iterable[int]) -> None:
        """Note that a request used entries, those that are not pinned: tail first, head last."""
        self._touch(rows, self.policy.use)

    def order(self, rows: Iterable[int]) -> None:
        """Have the head of a prefix outlive its tail, which the same request has touched or entered."""
        self._touch(rows, self.policy.order)

    def _touch(self, rows: Iterable[int], tell: Callable[[Any, Iterable[int]], None]) -> None:
        pins, touched, tick = self._pins, self._touched, self._tick
        rows = [row for row in rows if not pins[row]]
        for row in rows:
            tick += 1
            touched[row] = tick
        self._tick = tick
        if self._only is not None:
            tell(self._only, rows)
            return
        for row in rows:
            self._heat[self.offset[row] // self.slots.extent_bytes] = touched[row]
            tell(self._group(row), (row,))

    def discard(self, row: int) -> None:
        """Forget an entry now; its slot is free once nothing pins it."""
        key = self.table.key(row)
        self.table.remove(key)
        if self.on_change is not None and not self._flags[row] & SUSPECT:
            self.on_change(key, False)
        self._flags[row] |= GONE
        if self.expires_at[row]:
            self.expiry.count -= 1
        if self._pins[row] == 0:
            self._unlink(row)
            self._free(row)
        else:
            self.policy.forget(self._group(row), row, True)

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
        return sum(self._busy)

    def load(
        self, keys: bytes, slot_bytes: npt.NDArray[np.int64], columns: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        """Fill an empty index: n distinct keys joined, all of COLUMNS in shape (n,), oldest first."""
        n = len(columns["offset"])
        offsets = columns["offset"].astype(np.int64)
        self.table.load(keys)
        self.slots.load(slot_bytes, offsets)
        sizes = slot_bytes[offsets // self.slots.extent_bytes]
        self._classes.update(np.unique(sizes).tolist())
        self.used_bytes = int(sizes.sum())
        self._tick = n
        for name, code in COLUMNS.items():
            getattr(self, name).frombytes(columns[name].astype(code).tobytes())
        self._pins.frombytes(bytes(self._pins.itemsize * n))
        self._flags.frombytes(np.where(columns["expires_at"] > 0, ENDS, 0).astype(np.uint8).tobytes())
        self._touched.frombytes(np.arange(1, n + 1, dtype=np.uint64).tobytes())
        self.policy.resize(n)
        names = list(self._groups)
        lists = sizes * len(names) + self._load_owners(sizes)
        order = np.argsort(lists, kind="stable").astype(np.int32)
        bounds = np.flatnonzero(np.diff(lists[order], prepend=-1, append=-1)).tolist()
        for start, end in itertools.pairwise(bounds):
            rows = order[start:end]
            size, number = divmod(int(lists[rows[0]]), len(names))
            self.policy.load(self._open_group(names[number], size), rows)
        self.expiry.load(columns["expires_at"])
        self.lifetimes.load(columns["stored_at"])
        self._warm_up()

    def _load_owners(self, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Count what owners hold of loaded slots; per row the number of its tenant in `_lists`."""
        column = np.frombuffer(self.owner, np.uint64)
        if not column.any():
            return np.zeros(len(sizes), np.int64)
        numbers = {tenant: number for number, tenant in enumerate(self._groups)}
        owners, inverse = np.unique(column, return_inverse=True)
        held = np.bincount(inverse, sizes).astype(np.int64)
        for owner, nbytes in zip(owners.tolist(), held.tolist(), strict=True):
            self.holdings.charge(owner, nbytes)
        tenants = [numbers[self.holdings.tenant_of(owner)] for owner in owners.tolist()]
        return np.array(tenants, np.int64)[inverse]

    def leave_lists(self, owner: int) -> list[int]:
        """Take an owner's entries out of their groups; returns the rows of unpinned ones for `join_lists`."""
        idle = []
        for row in self.rows_of({owner}):
            if self._pins[row]:
                self.policy.forget(self._group(row), row, True)
            else:
                self._unlink(row)
                idle.append(row)
        return sorted(idle, key=self._touched.__getitem__)

    def join_lists(self, owner: int, rows: Iterable[int]) -> None:
        """Undo `leave_lists`, now that the owner's tenant is known."""
        self.holdings.join(owner)
        for row in rows:
            self._link(row)

    def evict_oldest(self) -> bool:
        """Evict the next chunk of any size; False if all are pinned."""
        return self._evict_first(group for groups in self._groups.values() for group in groups.values())

    def _evict_first(self, groups: Iterable[Any]) -> bool:
        """Evict the next chunk of some groups; False if all in them are pinned."""
        victim = self._first(groups)
        if victim != NO_ROW:
            self._evict(victim)
        return victim != NO_ROW

    def _first(self, groups: Iterable[Any]) -> int:
        """Of the next victims of some groups the one used longest ago, or NO_ROW."""
        victims = [row for group in groups if (row := self.policy.victim(group)) != NO_ROW]
        return min(victims, key=self._touched.__getitem__) if victims else NO_ROW

    def _first_of_size(self, size: int) -> int:
        """The next victim in slots of this size, or NO_ROW."""
        return self._first(groups[size] for groups in self._groups.values() if size in groups)

    def _group(self, row: int) -> Any:
        """The policy's group that an entry belongs to."""
        if self._only is not None:
            return self._only
        tenant = self.holdings.tenant_of(self.owner[row]) if len(self._groups) > 1 else ""
        size = self.slots.class_at(self.offset[row])
        return self._groups[tenant].get(size) or self._open_group(tenant, size)

    def _open_group(self, tenant: str, size: int) -> Any:
        is_first = len(self._groups) == 1 and not self._groups[tenant] and self._classes == {size}
        group = self._groups[tenant][size] = self.policy.group()
        self._only, self._only_class = (group, size) if is_first else (None, -1)
        return group

    def _warm_up(self) -> None:
        """Note the latest touch of every extent."""
        rows = self.table.rows().astype(np.int64)
        if rows.size:
            heat, touched = np.frombuffer(self._heat, np.int64), np.frombuffer(self._touched, np.uint64)
            extents = np.frombuffer(self.offset, np.int64)[rows] // self.slots.extent_bytes
            np.maximum.at(heat, extents, touched[rows].astype(np.int64))

    def _link(self, row: int) -> None:
        """An entry may be evicted from now on."""
        self._tick += 1
        self._touched[row] = self._tick
        if self._only is None:
            self._heat[self.offset[row] // self.slots.extent_bytes] = self._tick
        self.policy.link(self._only or self._group(row), row)

    def _hold(self, row: int) -> None:
        """An entry may not be evicted any more, as it is pinned."""
        self.policy.hold(self._only or self._group(row), row)

    def _unlink(self, row: int) -> None:
        """An entry that nothing pins is gone, or changes its group."""
        self.policy.forget(self._only or self._group(row), row, False)

    def _free(self, row: int) -> None:
        size = self.slots.size_at(self.offset[row])
        self.used_bytes -= size
        self.holdings.charge(self.owner[row], -size)
        self.slots.free(self.offset[row])
        self._spare.append(row)

    def _evict(self, row: int) -> None:
        self._on_evict(row)
        self.lifetimes.leave(row)
        self.policy.evicted(row)
        self.discard(row)
        self.evicted += 1

    def _make_room(self, size: int) -> bool:
        """Evict the oldest chunk of this slot size, or empty an extent of another size if all in it
        is older still; False if there is neither.
        """
        if self._only_class == size and (victim := self.policy.victim(self._only)) != NO_ROW:
            self._evict(victim)
            return True
        victim = self._first_of_size(size)
        extent = self._coldest_extent(size)
        if extent is not None and (victim == NO_ROW or self._heat[extent] < self._touched[victim]):
            rows = self.table.rows().astype(np.int64)
            offsets = np.frombuffer(self.offset, np.int64)[rows]
            for row in rows[offsets // self.slots.extent_bytes == extent].tolist():
                self._evict(row)
            return True
        if victim == NO_ROW:
            sizes = {other for groups in self._groups.values() for other in groups}
            found = (self._first_of_size(other) for other in sizes if size < other <= size + size // 8)
            victim = next((row for row in found if row != NO_ROW), NO_ROW)
        if victim == NO_ROW:
            return False
        self._evict(victim)
        return True

    def _coldest_extent(self, size: int) -> int | None:
        """The longest untouched extent of another slot size that nothing pins."""
        sizes = self.slots.slot_bytes
        if all(other == size for groups in self._groups.values() for other in groups):
            return None
        busy, heat = np.frombuffer(self._busy, np.int64), np.frombuffer(self._heat, np.int64)
        movable = np.flatnonzero((sizes != UNASSIGNED) & (sizes != size) & (busy == 0))
        return int(movable[np.argmin(heat[movable])]) if movable.size else None
