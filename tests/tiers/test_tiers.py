"""One contract over every tier: reserve, insert, find, pin, touch, discard, evict."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvtier.config import KIB, MIB, PAGE, StoreConfig, ledger_bytes, page_up
from kvtier.index.policies import POLICIES
from kvtier.tiers.base import NO_ROW, Tier
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.dram import DramTier
from kvtier.tiers.files.tier import FilesTier
from kvtier.tiers.slab.tier import SlabTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvtier.store.store import Store

CHUNK = 64 * KIB


class Handle:
    """A tier with the few steps that its kinds take differently."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier

    def store(self, key: bytes, nbytes: int = CHUNK) -> int | None:
        """A chunk in the tier, pinned once; None if there is no room."""
        offset = self.tier.reserve(nbytes)
        if offset is None:
            return None
        if isinstance(self.tier, DiskTier):
            write = self.tier.start_write(key, offset, nbytes)
            write.sums = np.ones(-(-page_up(nbytes) // CHUNK), np.uint64)
            plan = self.tier.plan()
            self.tier.plan_write(plan, write, PAGE)
            self.tier.prepare(plan)
            with self.tier.commit_lock:
                self.tier.commit([write], [])
                return self.tier.insert(write)
        return self.tier.index.insert(key, offset, nbytes)

    def add(self, key: bytes, nbytes: int = CHUNK) -> int:
        """A chunk in the tier, not pinned."""
        row = self.store(key, nbytes)
        assert row is not None
        self.tier.index.unpin(row)
        return row

    def fill(self, keys: list[bytes], nbytes: int = CHUNK) -> list[int]:
        return [self.add(key, nbytes) for key in keys]

    def held(self, keys: list[bytes]) -> list[bool]:
        return [self.tier.find(key) != NO_ROW for key in keys]


@pytest.fixture(
    params=[
        *(f"dram {name}" for name in POLICIES), "slab lru", "slab reuse", "slab sieve", "files lru",
        "files s3fifo",
    ]
)  # fmt: skip
def handle(request: pytest.FixtureRequest, small_config: Callable[..., StoreConfig]) -> Iterator[Handle]:
    kind, policy = request.param.split()
    if kind == "dram":
        yield Handle(DramTier(2 * MIB, CHUNK, policy=policy))
        return
    tier: DiskTier
    if kind == "slab":
        capacity = 2 * MIB + 64 * KIB + 4096
        tier = SlabTier(small_config(capacity=capacity, policy=policy), threading.Lock())
    else:
        capacity = 2 * MIB + ledger_bytes(2 * MIB)
        tier = FilesTier(small_config(kind="files", capacity=capacity, policy=policy), threading.Lock())
    yield Handle(tier)
    tier.close()


@pytest.fixture
def needs_lru(handle: Handle) -> None:
    if handle.tier.index.policy.name != "lru":
        pytest.skip("who leaves under other policies is what tests/index/test_policies.py tests")


@pytest.fixture
def tier(handle: Handle) -> Tier:
    return handle.tier


def slots_of(tier: Tier) -> int:
    return int(1 / tier.share(CHUNK))


class TestContract:
    def test_starts_empty(self, tier: Tier, keys: Callable[..., list[Any]]) -> None:
        stats = tier.stats()
        assert [stats[name] for name in ("chunks", "bytes", "evictions", "pinned_slots")] == [0, 0, 0, 0]
        assert tier.find(keys(1)[0]) == NO_ROW

    def test_finds_what_was_inserted(self, handle: Handle, keys: Callable[..., list[Any]]) -> None:
        names = keys(8)
        rows = handle.fill(names)
        index = handle.tier.index
        assert [handle.tier.find(key) for key in names] == rows
        assert [index.key(row) for row in rows] == names
        assert [index.nbytes[row] for row in rows] == [CHUNK] * 8
        if handle.tier.index.slots.extents > 1:  # slots have places
            assert len({index.offset[row] for row in rows}) == 8
        assert handle.tier.stats()["bytes"] == 8 * CHUNK

    def test_release_gives_the_slot_back(self, tier: Tier) -> None:
        offset = tier.reserve(CHUNK)
        assert offset is not None
        assert tier.stats()["pinned_slots"] == 1
        tier.release(offset)
        assert tier.stats()["pinned_slots"] == 0
        assert tier.stats()["bytes"] == 0
        again = tier.reserve(CHUNK)
        assert again == offset or (again is not None and tier.index.slots.extents == 1)  # or without places

    def test_refuses_when_all_is_pinned_and_not_after(
        self, handle: Handle, keys: Callable[..., list[Any]]
    ) -> None:
        count = slots_of(handle.tier)
        names = keys(count + 1)
        rows = [handle.store(key) for key in names[:count]]
        assert None not in rows
        assert handle.tier.reserve(CHUNK) is None
        assert handle.tier.stats()["pinned_slots"] == count
        handle.tier.index.unpin(rows[0])
        handle.add(names[count])
        assert handle.held(names) == [False] + [True] * count
        assert handle.tier.stats()["evictions"] == 1

    @pytest.mark.usefixtures("needs_lru")
    def test_evicts_the_least_recently_used(self, handle: Handle, keys: Callable[..., list[Any]]) -> None:
        count = slots_of(handle.tier)
        names = keys(count)
        rows = handle.fill(names)
        handle.tier.index.touch([rows[0]])
        more = keys(2, start=count)
        handle.fill(more)
        assert handle.held([*names[:4], *more]) == [True, False, False, True, True, True]

    @pytest.mark.usefixtures("needs_lru")
    def test_the_head_of_a_touched_prefix_outlives_its_tail(
        self, handle: Handle, keys: Callable[..., list[Any]]
    ) -> None:
        count = slots_of(handle.tier)
        prefix = keys(4)
        handle.fill(prefix)
        others = keys(count - 4, start=100)
        handle.fill(others)
        handle.tier.touch_prefix([*prefix, *keys(1, start=999)])
        for evicted in range(count - 4, count):
            handle.fill(keys(1, start=1000 + evicted))
        assert handle.held(prefix) == [True] * 4
        assert not any(handle.held(others[:4]))
        rest = keys(count - 8, start=2000)
        handle.fill(rest)
        for left in (3, 2, 1, 0):
            handle.fill(keys(1, start=3000 + left))
            assert handle.held(prefix) == [True] * left + [False] * (4 - left)

    def test_a_pinned_chunk_is_never_evicted(self, handle: Handle, keys: Callable[..., list[Any]]) -> None:
        count = slots_of(handle.tier)
        names = keys(count)
        rows = handle.fill(names)
        handle.tier.index.pin(rows[0])
        handle.fill(keys(2 * count - 1, start=count))
        assert handle.held(names[:2]) == [True, False]
        handle.tier.index.unpin(rows[0])
        assert handle.tier.stats()["pinned_slots"] == 0

    def test_discard_while_pinned_keeps_the_slot(
        self, handle: Handle, keys: Callable[..., list[Any]]
    ) -> None:
        count = slots_of(handle.tier)
        names = keys(count)
        rows = [handle.store(key) for key in names]
        row = rows[0]
        assert row is not None
        handle.tier.discard(row)
        assert handle.tier.find(names[0]) == NO_ROW
        assert handle.tier.index.is_gone(row)
        assert handle.tier.reserve(CHUNK) is None
        handle.tier.index.unpin(row)
        again = handle.store(names[0])
        assert again is not None
        assert handle.tier.find(names[0]) == again

    def test_capacity_bounds_what_is_stored(self, handle: Handle, keys: Callable[..., list[Any]]) -> None:
        for i, key in enumerate(keys(3 * slots_of(handle.tier))):
            handle.add(key, (1 + i % 3) * 20 * KIB)
            assert handle.tier.index.used_bytes <= handle.tier.capacity

    def test_a_payload_above_the_largest_is_refused(self, tier: Tier) -> None:
        assert tier.reserve(tier.largest_payload + 1) is None
        offset = tier.reserve(tier.largest_payload)
        assert offset is not None
        tier.release(offset)

    def test_shares_add_up_to_what_fits(self, handle: Handle, keys: Callable[..., list[Any]]) -> None:
        share = handle.tier.share(CHUNK)
        count = slots_of(handle.tier)
        assert share * count <= 1 < share * (count + 1)
        assert handle.tier.share(handle.tier.largest_payload + 1) > 1
        assert [handle.store(key) is not None for key in keys(count + 1)] == [True] * count + [False]

    def test_stats_name_what_is_there(self, handle: Handle, keys: Callable[..., list[Any]]) -> None:
        handle.fill(keys(3))
        stats = handle.tier.stats()
        assert stats["chunks"] == 3
        assert stats["capacity"] == handle.tier.capacity
        assert stats["capacity"] >= slots_of(handle.tier) * CHUNK


def test_a_dram_tier_without_bytes_has_no_room() -> None:
    tier = DramTier(0, CHUNK)
    assert tier.capacity == tier.largest_payload == 0
    assert tier.reserve(1) is None
    assert tier.share(1) > 1


def test_dram_slots_are_pages_of_the_arena_and_do_not_overlap(keys: Callable[..., list[Any]]) -> None:
    tier = DramTier(MIB, CHUNK)
    offsets = [offset for _ in range(16) if (offset := tier.reserve(CHUNK)) is not None]
    assert len(offsets) == 16
    for number, offset in enumerate(offsets):
        assert tier.address(offset) % 4096 == 0
        assert tier.view(offset, CHUNK).ctypes.data == tier.address(offset)
        tier.view(offset, CHUNK)[:] = number
    for number, offset in enumerate(offsets):
        assert (tier.view(offset, CHUNK) == number).all()


def test_slab_generations_never_repeat(small_config: Callable[..., StoreConfig]) -> None:
    config = small_config()
    seen: set[int] = set()
    for opening in range(3):
        tier = SlabTier(config, threading.Lock())
        handle = Handle(tier)
        for i in range(5):
            row = handle.add(bytes([opening, i]) * 16)
            generation = tier.index.generation[row]
            assert generation not in seen
            seen.add(generation)
            if i % 2:
                tier.discard(row)
        tier.write_tombstones()
        tier.close()


def test_an_extent_of_one_slot_takes_a_larger_size_later(
    open_store: Callable[..., Store],
    keys: Callable[..., list[Any]],
    payload: Callable[[bytes, int], np.ndarray],
) -> None:
    store = open_store(capacity=4 * MIB, chunk_bytes=MIB, landing=2 * MIB, dram=4 * MIB)
    small, large = keys(3), keys(3, start=3)
    assert store.put(small, [payload(key, 600 * KIB) for key in small], until="disk").result().ok
    store.delete(small).result()
    result = store.put(large, [payload(key, MIB) for key in large], until="disk").result()
    assert result.ok


FULL_DISK = textwrap.dedent("""
    import resource, sys, threading
    from pathlib import Path
    import kvtier
    from kvtier.config import StoreConfig
    from kvtier.tiers.slab.tier import SlabTier

    config = StoreConfig(paths=(Path(sys.argv[1]),), capacity=8 << 20, chunk_bytes=65536)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
    try:
        SlabTier(config, threading.Lock())
    except kvtier.TierUnavailable as error:
        print("refused:", error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    SlabTier(config, threading.Lock()).close()
    print("open again")
""")


@pytest.mark.parametrize(
    "room",
    [
        0,
        64,
        2048,
        65536,
    ],
)
def test_invariant_8_an_opening_that_fails_for_space_can_be_tried_again(tmp_path: Path, room: int) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", FULL_DISK, str(tmp_path / "store"), str(room)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused: cannot")
    assert done.stdout.endswith("open again\n")


def test_an_extent_of_one_slot_takes_a_smaller_size_later(
    open_store: Callable[..., Store],
    keys: Callable[..., list[Any]],
    payload: Callable[[bytes, int], np.ndarray],
) -> None:
    store = open_store(capacity=4 * MIB, chunk_bytes=MIB, landing=2 * MIB, dram=0)
    large, small = keys(3), keys(3, start=3)
    assert store.put(large, [payload(key, MIB) for key in large], until="disk").result().ok
    store.delete(large).result()
    assert store.put(small, [payload(key, 600 * KIB) for key in small], until="disk").result().ok
    into = np.zeros((3, 600 * KIB), np.uint8)
    assert store.get(small, into=into).result().ok
    assert all((into[i] == payload(key, 600 * KIB)).all() for i, key in enumerate(small))
