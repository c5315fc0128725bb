"""SlotCache against a plain LRU model, after `load` too, and what it costs in memory."""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import threading
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.config import GIB, KIB, MIB, StoreConfig, extent_area, extent_size
from kvtier.format import RECORD, Header, StoredChunk, journal_head, put_records, records_for, seal
from kvtier.index.cache import SlotCache
from kvtier.index.rows import COLUMNS, NO_ROW
from kvtier.tiers.slab.recovery import replay
from kvtier.tiers.slab.tier import SlabTier

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PAGE = 4096
EXTENT = 4 * PAGE
KEYS = [hashlib.sha256(b"%d" % i).digest() for i in range(60)]


def columns(**given: np.ndarray) -> dict[str, np.ndarray]:
    """All columns of an index, zero where not given."""
    count = len(given["offset"])
    return {name: given.get(name, np.zeros(count, code)) for name, code in COLUMNS.items()}


class CacheMachine(RuleBasedStateMachine):
    """One slot size: then the cache is an exact LRU."""

    SLOTS = 12

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[bytes] = []
        self.start()

    def start(self) -> None:
        self.cache = SlotCache(
            self.SLOTS * PAGE, EXTENT, on_evict=lambda row: self.evicted.append(self.cache.key(row))
        )
        self.lru: list[bytes] = []  # unpinned, oldest first
        self.pins: dict[bytes, int] = {}
        self.gone: list[tuple[int, int]] = []  # row, pins
        self.reserved: list[int] = []
        self.bytes: dict[bytes, int] = {}

    @initialize(count=st.integers(0, 12), seed=st.randoms(use_true_random=False))
    def load(self, count: int, seed: Any) -> None:
        """Begin as after a recovery, with chunks at any slots."""
        self.start()
        if count:
            places = sorted(range(self.SLOTS), key=lambda _: seed.random())[:count]
            offsets = np.array(places, np.int64) * PAGE
            slot_bytes = np.zeros(3, np.int64)
            slot_bytes[offsets // EXTENT] = PAGE
            self.cache.load(
                b"".join(KEYS[:count]),
                slot_bytes,
                columns(
                    offset=offsets,
                    nbytes=np.arange(1, count + 1),
                    generation=np.arange(count),
                    stored_bytes=np.full(count, PAGE),
                ),
            )
            self.lru = KEYS[:count]
            self.bytes = {key: i + 1 for i, key in enumerate(self.lru)}

    def known(self) -> list[bytes]:
        return sorted([*self.lru, *self.pins])

    def take_slot(self) -> int | None:
        used = len(self.lru) + len(self.pins) + len(self.gone) + len(self.reserved)
        expect_victim = self.lru[0] if used == self.SLOTS and self.lru else None
        self.evicted.clear()
        offset = self.cache.reserve(PAGE)
        if expect_victim:
            assert self.evicted == [expect_victim]
            assert self.lru.pop(0) == expect_victim
        else:
            assert self.evicted == []
        assert (offset is None) == (used == self.SLOTS and not expect_victim)
        return offset

    @rule()
    def reserve(self) -> None:
        offset = self.take_slot()
        if offset is not None:
            self.reserved.append(offset)

    @precondition(lambda self: self.reserved)
    @rule()
    def release(self) -> None:
        self.cache.release(self.reserved.pop())

    @rule(count=st.integers(1, 6), keep=st.booleans())
    def insert(self, count: int, keep: bool) -> None:
        for key in [key for key in KEYS if self.cache.find(key) == NO_ROW][:count]:
            offset = self.take_slot()
            if offset is None:
                return
            row = self.cache.insert(key, offset, PAGE - 1, 7)
            assert (self.cache.offset[row], self.cache.nbytes[row]) == (offset, PAGE - 1)
            assert self.cache.generation[row] == 7
            assert not self.cache.suspect(row)
            self.bytes[key] = PAGE - 1
            if keep:
                self.pins[key] = 1
            else:
                self.cache.unpin(row)
                self.lru.append(key)

    @precondition(lambda self: self.known())
    @rule(data=st.data())
    def pin(self, data: Any) -> None:
        key = data.draw(st.sampled_from(self.known()))
        self.cache.pin(self.cache.find(key))
        if key in self.lru:
            self.lru.remove(key)
        self.pins[key] = self.pins.get(key, 0) + 1

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: Any) -> None:
        key = data.draw(st.sampled_from(sorted(self.pins)))
        self.cache.unpin(self.cache.find(key))
        self.pins[key] -= 1
        if not self.pins[key]:
            del self.pins[key]
            self.lru.append(key)

    @precondition(lambda self: self.gone)
    @rule()
    def unpin_gone(self) -> None:
        row, pins = self.gone.pop()
        assert self.cache.is_gone(row)
        for _ in range(pins):
            self.cache.unpin(row)

    @precondition(lambda self: self.known())
    @rule(data=st.data())
    def discard(self, data: Any) -> None:
        key = data.draw(st.sampled_from(self.known()))
        row = self.cache.find(key)
        self.cache.suspect(row, True)
        self.cache.discard(row)
        if key in self.lru:
            self.lru.remove(key)
        else:
            self.gone.append((row, self.pins.pop(key)))

    @precondition(lambda self: self.known())
    @rule(data=st.data())
    def touch(self, data: Any) -> None:
        names = data.draw(st.lists(st.sampled_from(self.known()), unique=True))
        self.cache.touch(self.cache.find(key) for key in names)
        for key in names:
            if key in self.lru:
                self.lru.remove(key)
                self.lru.append(key)

    @rule()
    def evict_oldest(self) -> None:
        self.evicted.clear()
        assert self.cache.evict_oldest() == bool(self.lru)
        assert self.evicted == self.lru[:1]
        del self.lru[:1]

    @invariant()
    def agrees(self) -> None:
        cache = self.cache
        assert len(cache) == len(self.known())
        for key in KEYS:
            row = cache.find(key)
            assert (row != NO_ROW) == (key in self.lru or key in self.pins)
            if row != NO_ROW:
                assert cache.key(row) == key
                assert cache.nbytes[row] == self.bytes[key]
        held = len(self.lru) + len(self.pins) + len(self.gone) + len(self.reserved)
        assert cache.used_bytes == held * PAGE
        assert cache.pinned() == len(self.pins) + len(self.gone) + len(self.reserved)
        ages = [cache.key(row) for row in cache.by_age().tolist()]
        assert ages[: len(self.lru)] == self.lru
        assert set(ages[len(self.lru) :]) == set(self.pins)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=40)


class MixedMachine(RuleBasedStateMachine):
    """Several slot sizes: what is pinned stays, what is stored is within the area, nothing leaks."""

    EXTENTS = 4
    SIZES = (PAGE, 2 * PAGE, EXTENT)

    def __init__(self) -> None:
        super().__init__()
        self.cache = SlotCache(self.EXTENTS * EXTENT, EXTENT)
        self.pinned: dict[bytes, tuple[int, int]] = {}
        self.number = 0

    @rule(nbytes=st.sampled_from(SIZES), count=st.integers(1, 9), keep=st.booleans())
    def insert(self, nbytes: int, count: int, keep: bool) -> None:
        for _ in range(count):
            offset = self.cache.reserve(nbytes)
            if offset is None:
                blocked = {self.cache.offset[row] // EXTENT for row, _ in self.pinned.values()}
                assert len(blocked) == self.EXTENTS, "an extent that nothing pins must give way"
                return
            key = self.number.to_bytes(32, "big")
            self.number += 1
            row = self.cache.insert(key, offset, nbytes)
            if keep:
                self.pinned[key] = (row, nbytes)
            else:
                self.cache.unpin(row)
            keep = False  # few pins, or all is blocked soon

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: Any) -> None:
        key = data.draw(st.sampled_from(sorted(self.pinned)))
        self.cache.unpin(self.pinned.pop(key)[0])

    @precondition(lambda self: len(self.cache))
    @rule(data=st.data())
    def discard(self, data: Any) -> None:
        row = data.draw(st.sampled_from(sorted(self.cache.table.rows().tolist())))
        if self.cache.key(row) not in self.pinned:
            self.cache.discard(row)

    @rule()
    def evict_all(self) -> None:
        while self.cache.evict_oldest():
            pass
        assert len(self.cache) == len(self.pinned)
        used = {self.cache.offset[row] // EXTENT for row, _ in self.pinned.values()}
        assert set(np.flatnonzero(self.cache.slots.slot_bytes).tolist()) == used

    @rule()
    def reload(self) -> None:
        """Load what a recovery would find into a new cache: the same order of eviction."""
        if self.pinned:
            return
        rows = self.cache.by_age().tolist()
        former = self.cache
        self.cache = SlotCache(self.EXTENTS * EXTENT, EXTENT)
        self.cache.load(
            b"".join(former.key(row) for row in rows),
            former.slots.slot_bytes.copy(),
            {
                name: np.array([getattr(former, name)[row] for row in rows], code)
                for name, code in COLUMNS.items()
            },
        )
        assert [self.cache.key(row) for row in self.cache.by_age().tolist()] == [
            former.key(row) for row in rows
        ]

    @invariant()
    def nothing_overlaps_and_pins_hold(self) -> None:
        spans = []
        for row in self.cache.table.rows().tolist():
            offset = self.cache.offset[row]
            size = self.cache.slots.size_at(offset)
            assert self.cache.nbytes[row] <= size
            spans.append((offset, offset + size))
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert self.cache.used_bytes == sum(end - start for start, end in spans)
        assert self.cache.pinned() == len(self.pinned)
        for key, (row, _) in self.pinned.items():
            assert self.cache.find(key) == row


TestMixed = MixedMachine.TestCase
TestMixed.settings = settings(max_examples=60, stateful_step_count=30)


def test_an_extent_of_another_size_gives_way_if_all_in_it_is_older() -> None:
    cache = SlotCache(2 * EXTENT, EXTENT)

    def add(number: int, nbytes: int) -> None:
        offset = cache.reserve(nbytes)
        assert offset is not None
        cache.unpin(cache.insert(number.to_bytes(32, "big"), offset, nbytes))

    for i in range(4):
        add(i, PAGE)
    for i in range(4, 6):
        add(i, 2 * PAGE)
    add(6, 2 * PAGE)
    assert [cache.find(i.to_bytes(32, "big")) != NO_ROW for i in range(7)] == [False] * 4 + [True] * 3
    cache.touch([cache.find((6).to_bytes(32, "big"))])
    add(7, PAGE)
    assert [cache.find(i.to_bytes(32, "big")) != NO_ROW for i in range(4, 8)] == [False, False, True, True]


def test_a_slot_that_is_near_enough_is_made_free_when_nothing_else_can_be() -> None:
    extent = 64 * PAGE
    cache = SlotCache(extent, extent)
    rows = []
    while (offset := cache.reserve(9 * PAGE)) is not None:
        rows.append(cache.insert(bytes([len(rows)]) * 32, offset, 9 * PAGE))
        if len(rows) == 7:
            break
    for row in rows[1:]:
        cache.unpin(row)  # the first one stays pinned
    assert cache.reserve(8 * PAGE) is not None


def make_store(path: Path, chunks: int, parts: int) -> StoreConfig:
    """A directory as a store with `chunks` chunks of `parts` parts leaves it, but for the payloads."""
    part = 64 * KIB
    slot = parts * part
    capacity = chunks * slot * 5 // 4 + GIB
    config = StoreConfig(
        paths=(path,),
        capacity=capacity,
        dram=slot,
        landing=slot,
        io_window=slot,
        chunk_bytes=slot,
        part_bytes=part,
    )
    extent = extent_size(extent_area(capacity, slot), slot)
    header = Header.new(part_bytes=part, capacity=capacity, extent_bytes=extent, chunk_bytes=slot)
    per_extent = extent // slot
    numbers = np.arange(chunks)
    chunk = StoredChunk(
        key=bytes(32), generation=1, offset=0, slot_bytes=slot, payload_bytes=slot, stored_bytes=slot,
        sums=np.arange(parts, dtype=np.uint64),
    )  # fmt: skip
    pattern = put_records([chunk])
    records = np.tile(pattern, chunks)
    each = records_for(parts)
    records["generation"] = np.repeat(numbers + 1, each)
    records["offset"][::each] = numbers // per_extent * extent + numbers % per_extent * slot
    keys = np.random.default_rng(5).bytes(32 * chunks)
    records["key"][::each] = np.frombuffer(keys, "V32")
    journal = header.for_journal(1)
    path.mkdir()
    (path / "journal").write_bytes(journal_head(journal) + seal(records, journal.journal_id, 0))
    (path / "slab").write_bytes(header.encode())
    os.truncate(path / "slab", 4096)
    return config


@pytest.fixture
def sparse_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs of many GiB that take up no disk."""
    monkeypatch.setattr("kvtier.tiers.slab.directory._reserve", lambda fd, nbytes: False)
    monkeypatch.setattr("kvtier.tiers.slab.opening.check_free_space", lambda path, wanted, floor: None)


@pytest.mark.usefixtures("sparse_slab")
@pytest.mark.parametrize(
    ("chunks", "seconds"), [(100_000, 1.0), pytest.param(1_000_000, 3.0, marks=pytest.mark.slow)]
)
def test_opening_is_quick(tmp_path: Path, chunks: int, seconds: float) -> None:
    config = make_store(tmp_path / "store", chunks, 1)
    best = 1e9
    for _ in range(3):
        start = time.process_time()  # one thread does it all: this is what it takes on an idle machine
        tier = SlabTier(config, threading.Lock())
        best = min(best, time.process_time() - start)
        assert len(tier.index) == chunks
        tier.close()
        if best < seconds:
            break
    assert best < seconds


@pytest.mark.usefixtures("sparse_slab")
@pytest.mark.parametrize("parts", [1, 2, 3, 10])
def test_an_open_store_takes_at_most_200_bytes_per_chunk_and_8_per_further_part(
    tmp_path: Path, parts: int
) -> None:
    chunks = 100_000
    config = make_store(tmp_path / "store", chunks, parts)
    gc.collect()
    tracemalloc.start()
    try:
        tier = SlabTier(config, threading.Lock())
        gc.collect()
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(tier.index) == chunks
    tier.close()
    assert used <= chunks * (200 + 8 * max(0, parts - 2))


def test_the_columns_of_a_growing_index_are_counted_too(keys: Callable[..., list[bytes]]) -> None:
    chunks = 30_000
    names = keys(chunks)
    tracemalloc.start()
    try:
        cache = SlotCache(GIB, 16 * MIB)
        for key in names:
            offset = cache.reserve(PAGE)
            assert offset is not None
            cache.unpin(cache.insert(key, offset, PAGE))
        gc.collect()
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used <= chunks * 200


def test_the_synthetic_journal_is_what_a_store_writes(tmp_path: Path) -> None:
    config = make_store(tmp_path / "store", 50, 9)
    data = (tmp_path / "store" / "journal").read_bytes()
    assert config.path is not None
    tier = SlabTier(config, threading.Lock())
    recovered = replay(data, tier.journal.header, tier.index.slots.extents)
    tier.close()
    assert (len(recovered.chunks), recovered.damaged, recovered.dropped) == (50, 0, 0)
    assert recovered.chunks.dtype == RECORD
