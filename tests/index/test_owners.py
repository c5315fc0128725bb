"""What owners hold of an index, to the byte, and tenants that make room for themselves alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.index.cache import COLUMNS, NO_ROW, SlotCache
from kvtier.index.owners import Owners
from kvtier.index.usage import usage
from kvtier.owner import NOBODY, OwnerName

PAGE = 4096
EXTENT = 4 * PAGE
NAMES = [
    OwnerName(bytes([1]) * 32, "small"), OwnerName(bytes([2]) * 32, "small"), OwnerName(tenant="large"),
    OwnerName(tenant="free"), OwnerName(bytes([1]) * 32), OwnerName(),
]  # fmt: skip
LIMITS = {"small": 5 * PAGE, "large": 9 * PAGE, "absent": PAGE}


class Machine(RuleBasedStateMachine):
    """Slots of two sizes, so that extents change hands; owners of whom some become known late."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.known: set[str] = set()
        self.make([])
        self.chunks: dict[int, tuple[OwnerName, int, int]] = {}  # row -> name, slot bytes, pins
        self.gone: dict[int, tuple[OwnerName, int, int]] = {}
        self.reserved: dict[int, tuple[OwnerName, int]] = {}  # offset -> name, slot bytes
        self.order: list[int] = []  # unpinned rows, least recently used first
        self.number = 0

    def make(self, names: list[OwnerName]) -> None:
        self.owners = Owners(LIMITS)
        self.cache = SlotCache(
            6 * EXTENT, EXTENT, owners=self.owners, limits=LIMITS, on_evict=self.evicted.append
        )
        for name in names:
            self.owners.learn(name)

    def tenant(self, name: OwnerName) -> str:
        """Whose limit counts: of an owner whose name is not known, nobody's."""
        return name.tenant if name.tenant in LIMITS and name.id in self.owners.names else ""

    def held(self) -> list[tuple[OwnerName, int]]:
        chunks = [(name, nbytes) for name, nbytes, _ in (*self.chunks.values(), *self.gone.values())]
        return [*chunks, *self.reserved.values()]

    @rule(name=st.sampled_from(NAMES), pages=st.sampled_from([1, 2]))
    def reserve(self, name: OwnerName, pages: int) -> None:
        self.get_to_know(name)
        tenant, before = self.tenant(name), sum(b for n, b in self.held() if self.tenant(n) == name.tenant)
        own = [row for row in self.order if tenant and self.tenant(self.chunks[row][0]) == tenant]
        self.evicted.clear()
        offset = self.cache.reserve(pages * PAGE, name.id)
        over = tenant and before + pages * PAGE > LIMITS[tenant]
        if over:
            freed = 0
            while own and before - freed + pages * PAGE > LIMITS[tenant]:
                assert self.evicted[:1] == own[:1], "not its own oldest one"
                freed += self.chunks[own[0]][1]
                self.evicted.pop(0)
                self.drop(own.pop(0))
            if before - freed + pages * PAGE > LIMITS[tenant]:
                assert offset is None
                assert not self.evicted
        for row in self.evicted:
            self.drop(row)
        if offset is not None:
            self.reserved[offset] = name, self.cache.slots.size_at(offset)
            assert self.cache.reserved_for(offset) == name.id

    def drop(self, row: int) -> None:
        del self.chunks[row]
        self.order.remove(row)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), keep=st.booleans())
    def insert(self, data: Any, keep: bool) -> None:
        offset = data.draw(st.sampled_from(sorted(self.reserved)))
        name, nbytes = self.reserved.pop(offset)
        self.number += 1
        row = self.cache.insert(self.number.to_bytes(32, "big"), offset, nbytes)
        assert self.cache.owner[row] == name.id
        self.chunks[row] = name, nbytes, 1
        if not keep:
            self.unpin_row(row)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        offset = data.draw(st.sampled_from(sorted(self.reserved)))
        del self.reserved[offset]
        self.cache.release(offset)

    def unpin_row(self, row: int) -> None:
        self.cache.unpin(row)
        name, nbytes, pins = self.chunks[row]
        self.chunks[row] = name, nbytes, pins - 1
        if pins == 1:
            self.order.append(row)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def pin(self, data: Any) -> None:
        row = data.draw(st.sampled_from(sorted(self.order)))
        self.cache.pin(row)
        self.order.remove(row)
        self.chunks[row] = *self.chunks[row][:2], 1

    @precondition(lambda self: len(self.order) < len(self.chunks))
    @rule(data=st.data())
    def unpin(self, data: Any) -> None:
        self.unpin_row(data.draw(st.sampled_from(sorted(self.chunks.keys() - set(self.order)))))

    @precondition(lambda self: self.chunks)
    @rule(data=st.data())
    def discard(self, data: Any) -> None:
        row = data.draw(st.sampled_from(sorted(self.chunks)))
        self.cache.discard(row)
        chunk = self.chunks.pop(row)
        if row in self.order:
            self.order.remove(row)
        else:
            self.gone[row] = chunk

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def unpin_gone(self, data: Any) -> None:
        row = data.draw(st.sampled_from(sorted(self.gone)))
        del self.gone[row]
        self.cache.unpin(row)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def touch(self, data: Any) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.order)), unique=True))
        self.cache.touch(rows)
        self.order = [row for row in self.order if row not in rows] + rows

    @rule(known=st.sets(st.sampled_from(NAMES)))
    def reload(self, known: set[OwnerName]) -> None:
        """A recovery that found the names of some owners, and of the others learns them later."""
        if len(self.order) < len(self.chunks) or self.gone or self.reserved:
            return
        former, rows = self.cache, self.order
        self.make(sorted(known, key=lambda name: name.id))
        self.cache.load(
            b"".join(former.key(row) for row in rows),
            former.slots.slot_bytes.copy(),
            {
                name: np.array([getattr(former, name)[row] for row in rows], code)
                for name, code in COLUMNS.items()
            },
        )
        self.chunks = {i: self.chunks[row] for i, row in enumerate(rows)}
        self.order = list(range(len(rows)))

    @rule(name=st.sampled_from(NAMES))
    def learn(self, name: OwnerName) -> None:
        self.get_to_know(name)

    def get_to_know(self, name: OwnerName) -> None:
        """Its chunks count as used just now, if they did not count for its tenant before."""
        is_new = name.id not in self.owners.names and name.tenant in LIMITS
        assert self.owners.learn(name) == name.id
        own = [row for row in self.order if is_new and self.chunks[row][0] == name]
        self.order = [row for row in self.order if row not in own] + own

    @invariant()
    def counts_are_exact(self) -> None:
        holdings = self.cache.holdings
        by_owner: dict[int, int] = {}
        by_tenant = dict.fromkeys(LIMITS, 0)
        for name, nbytes in self.held():
            if name.id != NOBODY:
                by_owner[name.id] = by_owner.get(name.id, 0) + nbytes
            if tenant := self.tenant(name):
                by_tenant[tenant] += nbytes
        assert holdings.by_owner == by_owner
        assert holdings.by_tenant == by_tenant
        assert self.cache.used_bytes == sum(nbytes for _, nbytes in self.held())

    @invariant()
    def eviction_is_in_order(self) -> None:
        assert self.cache.by_age().tolist()[: len(self.order)] == self.order

    @invariant()
    def rows_are_found(self) -> None:
        for name in NAMES[:-1]:
            rows = {row for row, (owner, _, _) in self.chunks.items() if owner == name}
            assert set(self.cache.rows_of({name.id})) == rows


TestOwners = Machine.TestCase
TestOwners.settings = settings(max_examples=80, stateful_step_count=50)


def fill(cache: SlotCache, owner: int, count: int) -> None:
    for _ in range(count):
        offset = cache.reserve(PAGE, owner)
        assert offset is not None
        cache.unpin(cache.insert(len(cache).to_bytes(16, "big") + owner.to_bytes(16, "big"), offset, PAGE))


def test_a_tenant_that_has_no_limit_takes_what_there_is() -> None:
    cache = SlotCache(2 * EXTENT, EXTENT, owners=Owners(LIMITS), limits=LIMITS)
    fill(cache, cache.holdings.owners.learn(NAMES[3]), 8)
    assert cache.evicted == 0
    assert cache.holdings.by_tenant == dict.fromkeys(LIMITS, 0)


def test_what_is_above_a_lowered_limit_makes_room_at_the_next_reservation() -> None:
    cache = SlotCache(4 * EXTENT, EXTENT, owners=Owners(LIMITS), limits=LIMITS)
    large = cache.holdings.owners.learn(NAMES[2])
    fill(cache, large, 9)
    cache.holdings.limits["large"] = 2 * PAGE
    assert cache.reserve(PAGE, large) is not None
    assert (cache.evicted, cache.holdings.by_owner[large]) == (8, 2 * PAGE)


def test_names_that_no_chunk_has_are_dropped_in_time() -> None:
    owners = Owners(LIMITS)
    cache = SlotCache(EXTENT, EXTENT, owners=owners, limits=LIMITS)
    kept = owners.learn(OwnerName(bytes(31) + b"k", "small"))
    fill(cache, kept, 1)
    for i in range(1, 5000):
        owners.learn(OwnerName(i.to_bytes(32, "big"), "small"))
        assert len(owners.names) <= 1024
    assert owners.names[kept].tenant == "small"
    assert owners.tenants.keys() <= owners.names.keys()


def test_an_owner_is_found_by_either_of_its_names() -> None:
    owners = Owners()
    ids = [owners.learn(name) for name in NAMES]
    assert owners.matching(None, "small") >= {ids[0], ids[1]}
    assert ids[2] not in owners.matching(None, "small")
    assert owners.matching(bytes([1]) * 32, None) >= {ids[0], ids[4]}
    assert owners.matching(bytes([1]) * 32, "small") == {ids[0]}
    assert NOBODY not in owners.matching(b"", "")
    assert Owners().matching(bytes([1]) * 32, "small") == {ids[0]}, "the names may be lost"


def test_an_entry_is_expired_from_its_second_on() -> None:
    now = [1000.0]
    cache = SlotCache(EXTENT, EXTENT, wall=lambda: now[0])
    rows = []
    for i, end in enumerate((0, 1001, 1002)):
        offset = cache.reserve(PAGE)
        assert offset is not None
        rows.append(cache.insert(bytes([i]) * 32, offset, PAGE, expires_at=end))
        cache.unpin(rows[-1])
    assert [cache.is_expired(row) for row in rows] == [False] * 3
    now[0] = 1001.0
    assert [cache.is_expired(row) for row in rows] == [False, True, False]
    assert [cache.is_sound(bytes([i]) * 32) for i in range(3)] == [True, False, True]
    assert cache.find(bytes([1]) * 32) == rows[1], "it is there until it is swept"
    now[0] = 999.0  # the clock was set back
    assert [cache.is_expired(row) for row in rows] == [False] * 3


@pytest.mark.parametrize("most", [1, 3, 1000])
def test_a_sweep_finds_what_is_over_step_by_step(most: int) -> None:
    """Against a model, with entries that come and go between the steps, over many stretches."""
    now = [1000.0]
    rng = np.random.default_rng(most)
    cache = SlotCache(1 << 30, 1 << 26, wall=lambda: now[0])
    alive: dict[int, int] = {}
    number = 0
    for _ in range(60):
        for _ in range(int(rng.integers(0, 20))):
            offset = cache.reserve(PAGE)
            assert offset is not None
            number += 1
            end = int(now[0]) + int(rng.integers(1, 30)) if rng.random() < 0.7 else 0
            row = cache.insert(number.to_bytes(32, "big"), offset, PAGE, expires_at=end)
            cache.unpin(row)
            alive[row] = end
        for row in [row for row in alive if rng.random() < 0.05]:
            cache.discard(row)
            del alive[row]
        now[0] += float(rng.integers(-2, 6))
        for _ in range(int(rng.integers(0, 3))):
            for row in cache.sweep(most):
                assert 0 < alive.pop(row) <= now[0]
                cache.discard(row)
        assert cache.expiry.count == sum(end > 0 for end in alive.values())
    while cache.expiry.is_due():
        for row in cache.sweep(most):
            assert 0 < alive.pop(row) <= now[0]
            cache.discard(row)
    assert not [end for end in alive.values() if 0 < end <= now[0]]
    assert sum(cache.find(i.to_bytes(32, "big")) != NO_ROW for i in range(number + 1)) == len(alive)


def test_a_sweep_looks_at_a_stretch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.index.expiry._STRETCH", 4)
    cache = SlotCache(4 * EXTENT, EXTENT, wall=lambda: 1000.0)
    for i in range(14):
        offset = cache.reserve(PAGE)
        assert offset is not None
        cache.insert(bytes([i]) * 32, offset, PAGE, expires_at=999 if i in (1, 2, 6, 13) else 2000)
    found = [cache.sweep(100) for _ in range(4)]
    assert found == [[1, 2], [6], [], [13]]
    assert not cache.expiry.is_due()


def test_usage_adds_up_what_each_owner_holds() -> None:
    names = {7: OwnerName(bytes([1]) * 32, "a")}
    rows = usage(
        "disk", names, 100.0,
        owner=np.array([7, 0, 7, 9, 7], np.uint64), nbytes=np.array([1, 2, 4, 8, 16]),
        stored_at=np.array([30, 5, 10, 6, 20], np.uint32),
        expires_at=np.array([0, 0, 100, 101, 99], np.uint32),
    )  # fmt: skip
    assert [(row.id, row.tenant, row.chunks, row.nbytes) for row in rows] == [
        (7, "a", 3, 21), (9, "", 1, 8), (0, "", 1, 2),
    ]  # fmt: skip
    assert [(row.oldest, row.median, row.newest, row.expired) for row in rows] == [
        (10, 20, 30, 2), (6, 6, 6, 0), (5, 5, 5, 0),
    ]  # fmt: skip
    assert rows[0].namespace == "01" * 32
    empty = np.empty(0, np.uint64)
    assert usage("dram", names, 0.0, owner=empty, nbytes=empty, stored_at=empty, expires_at=empty) == []
