"""Every policy against a plain model of it, in the index that uses it; and what they have in common."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.config import PolicyName
from kvtier.index.cache import SlotCache
from kvtier.index.owners import Owners
from kvtier.index.policies import POLICIES
from kvtier.index.policies.ghost import Ghost
from kvtier.index.policies.reuse import CLASSES, Reuse, Seen, age_class
from kvtier.index.rows import COLUMNS, NO_ROW
from kvtier.owner import OwnerName

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = 4096
SLOTS = 10
KEYS = [hashlib.sha256(b"%d" % i).digest() for i in range(40)]
NAMES = sorted(POLICIES)


class LruModel:
    def __init__(self) -> None:
        self.order: list[int] = []

    def use(self, key: int) -> None:
        self.order.remove(key)
        self.order.append(key)

    def add(self, key: int) -> None:
        self.order.append(key)

    def evict(self) -> int:
        return self.order.pop(0)


class FifoModel(LruModel):
    def use(self, key: int) -> None:
        pass


class SieveModel(FifoModel):
    def __init__(self) -> None:
        super().__init__()
        self.visited: set[int] = set()
        self.hand: int | None = None

    def use(self, key: int) -> None:
        self.visited.add(key)

    def evict(self) -> int:
        at = self.order.index(self.hand) if self.hand is not None else 0
        while self.order[at] in self.visited:
            self.visited.remove(self.order[at])
            at = (at + 1) % len(self.order)
        victim = self.order.pop(at)
        self.hand = self.order[at] if at < len(self.order) else None
        return victim


class S3FifoModel:
    def __init__(self) -> None:
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: list[int] = []
        self.uses: dict[int, int] = {}

    def use(self, key: int) -> None:
        self.uses[key] = min(3, self.uses[key] + 1)

    def add(self, key: int) -> None:
        self.uses[key] = 0
        (self.main if key in self.ghosts[-SLOTS:] else self.small).append(key)
        self.ghosts = [ghost for ghost in self.ghosts if ghost != key]

    def evict(self) -> int:
        while True:
            if self.small and 10 * len(self.main) <= 9 * SLOTS:
                key = self.small.pop(0)
                if not self.uses[key]:
                    self.ghosts.append(key)
                    return key
                self.uses[key] = 0
            else:
                key = self.main.pop(0)
                if not self.uses[key]:
                    return key
                self.uses[key] -= 1
            self.main.append(key)


class ReuseModel:
    """The lists and the choice; what was learned is the policy's own, and tested by itself below."""

    def __init__(self, cache: SlotCache) -> None:
        self.worth = cache.policy.seen.worth  # type: ignore[attr-defined]
        self.lists: list[list[int]] = [[] for _ in range(CLASSES)]
        self.ghosts: dict[int, int] = {}

    def use(self, key: int) -> None:
        before = next(number for number, keys in enumerate(self.lists) if key in keys)
        self.lists[before].remove(key)
        self.lists[min(before + 1, CLASSES - 1)].append(key)

    def add(self, key: int) -> None:
        number = min(self.ghosts.pop(key) + 1, CLASSES - 1) if key in self.ghosts else 0
        self.lists[number].append(key)

    def evict(self) -> int:
        # The clock stands still: all are of one age.
        number = min((n for n in range(CLASSES) if self.lists[n]), key=lambda n: self.worth[n][0])
        key = self.lists[number].pop(0)
        self.ghosts[key] = number
        return key


MODELS: dict[str, Callable[[SlotCache], Any]] = {
    "lru": lambda _: LruModel(), "fifo": lambda _: FifoModel(), "sieve": lambda _: SieveModel(),
    "s3fifo": lambda _: S3FifoModel(), "reuse": ReuseModel,
}  # fmt: skip


def test_the_setting_and_the_policies_have_the_same_names() -> None:
    assert set(get_args(PolicyName)) == set(POLICIES) == set(MODELS)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(accesses=st.lists(st.integers(0, 24), max_size=150), batched=st.booleans())
def test_it_evicts_whom_its_model_evicts(name: PolicyName, accesses: list[int], batched: bool) -> None:
    cache = SlotCache(SLOTS * PAGE, SLOTS * PAGE, policy=name, wall=lambda: 5.0)
    model, resident = MODELS[name](cache), set()
    for key in accesses:
        row = cache.find(KEYS[key])
        assert (row != NO_ROW) == (key in resident)
        if row != NO_ROW:
            cache.touch([row])
            cache.order([row])
            model.use(key)
            if name == "lru":
                continue
        else:
            if len(resident) == SLOTS:
                resident.remove(model.evict())
            model.add(key)
            resident.add(key)
            if batched:
                assert len(cache.fill([KEYS[key]], PAGE)) == 1
            else:
                offset = cache.reserve(PAGE)
                assert offset is not None
                cache.unpin(cache.insert(KEYS[key], offset, PAGE))
    assert {key for key in range(25) if cache.find(KEYS[key]) != NO_ROW} == resident


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_happens_pins_hold_and_nothing_is_lost(name: PolicyName, data: Any) -> None:
    """Any mix of calls: a pinned entry stays, and all room can be had again in the end."""
    limits = data.draw(st.sampled_from([{}, {"acme": 3 * PAGE}]))
    owners = Owners(limits)
    acme = OwnerName(b"n" * 32, "acme")
    evicted: list[bytes] = []
    now = [0.0]
    cache = SlotCache(
        SLOTS * PAGE, SLOTS * PAGE // 2, policy=name, owners=owners, limits=limits,
        on_evict=lambda row: evicted.append(cache.key(row)), wall=lambda: now[0],
    )  # fmt: skip
    pins: dict[int, int] = {}  # row -> pins
    for _ in range(data.draw(st.integers(0, 60))):
        now[0] += data.draw(st.sampled_from([0.0, 0.5, 40.0]))
        key = KEYS[data.draw(st.integers(0, 24))]
        row = cache.find(key)
        kind = data.draw(st.sampled_from(["put", "put", "pin", "unpin", "touch", "discard", "order", "fill"]))
        if kind == "put" and row == NO_ROW:
            owner = owners.learn(acme) if data.draw(st.booleans()) else 0
            size = data.draw(st.sampled_from([PAGE, PAGE, PAGE, 2 * PAGE]))
            offset = cache.reserve(size, owner)
            if offset is not None:
                row = cache.insert(key, offset, size)
                if data.draw(st.booleans()):
                    cache.unpin(row)
                else:
                    pins[row] = 1
        elif kind == "fill" and row == NO_ROW:
            cache.fill([key], PAGE)
        elif kind == "unpin" and pins:
            row = data.draw(st.sampled_from(sorted(pins)))
            cache.unpin(row)
            pins[row] -= 1
            if not pins[row]:
                del pins[row]
        elif row != NO_ROW and kind in ("pin", "touch", "order", "discard"):
            if kind == "pin":
                cache.pin(row)
                pins[row] = pins.get(row, 0) + 1
            elif kind == "discard":
                cache.discard(row)
            else:
                getattr(cache, kind)([row])
        assert all(cache.find(cache.key(row)) == row or cache.is_gone(row) for row in pins)
    for row, count in list(pins.items()):
        for _ in range(count):
            cache.unpin(row)
    assert cache.pinned() == 0
    while cache.evict_oldest():
        pass
    assert len(cache) == 0
    assert cache.used_bytes == 0
    offsets = [cache.reserve(PAGE) for _ in range(SLOTS)]
    assert None not in offsets


@pytest.mark.parametrize("name", NAMES)
def test_a_second_size_makes_room_for_the_first_again(name: PolicyName) -> None:
    """While all slots are of one size there is one group; the second size ends that."""
    cache = SlotCache(SLOTS * PAGE, SLOTS * PAGE // 2, policy=name)
    cache.fill(KEYS[:SLOTS], PAGE)
    for key, size in zip(KEYS[SLOTS:], (2 * PAGE, PAGE, 2 * PAGE, PAGE, PAGE), strict=False):
        offset = cache.reserve(size)
        assert offset is not None
        cache.release(offset) if size == 2 * PAGE else cache.unpin(cache.insert(key, offset, size))
    assert cache.fill(KEYS[30:33], PAGE)
    assert cache.find(KEYS[30]) != NO_ROW


@pytest.mark.parametrize("name", NAMES)
def test_two_sizes_that_were_pinned_from_the_first_are_kept_apart(name: PolicyName) -> None:
    """Neither size may be evicted yet when the other appears."""
    cache = SlotCache(SLOTS * PAGE, SLOTS * PAGE // 2, policy=name)

    def insert(key: bytes, size: int) -> int:
        offset = cache.reserve(size)
        assert offset is not None
        return cache.insert(key, offset, size)

    for row in [insert(KEYS[0], 2 * PAGE), insert(KEYS[1], PAGE)]:
        cache.unpin(row)
    cache.unpin(insert(KEYS[2], PAGE))
    assert [cache.evict_oldest() for _ in range(4)] == [True, True, True, False]
    assert (len(cache), cache.used_bytes) == (0, 0)


@pytest.mark.parametrize("name", NAMES)
def test_loaded_entries_leave_in_their_order(name: PolicyName) -> None:
    cache = SlotCache(SLOTS * PAGE, SLOTS * PAGE, policy=name)
    columns = {column: np.zeros(SLOTS, code) for column, code in COLUMNS.items()}
    columns["offset"] = np.arange(SLOTS) * PAGE
    columns["nbytes"] = columns["stored_bytes"] = np.full(SLOTS, PAGE)
    cache.load(b"".join(KEYS[:SLOTS]), np.array([PAGE]), columns)
    left = [key for key in KEYS[:SLOTS] if cache.find(key) != NO_ROW]
    assert left == KEYS[:SLOTS]
    for number in range(SLOTS):
        assert cache.evict_oldest()
        assert [key for key in KEYS[:SLOTS] if cache.find(key) != NO_ROW] == KEYS[number + 1 : SLOTS]


@pytest.mark.parametrize("name", NAMES)
def test_the_head_of_a_prefix_outlives_its_tail(name: PolicyName) -> None:
    cache = SlotCache(SLOTS * PAGE, SLOTS * PAGE, policy=name)
    cache.fill(KEYS[:6], PAGE)
    for key in KEYS[20:26]:
        cache.fill([key], PAGE)
    left = [key for key in KEYS[:6] if cache.find(key) != NO_ROW]
    assert left == KEYS[: len(left)]
    assert len(left) == 4


def test_a_second_use_within_a_request_counts_for_nothing() -> None:
    cache = SlotCache(SLOTS * PAGE, SLOTS * PAGE, policy="sieve")
    rows = cache.fill(KEYS[:SLOTS], PAGE)
    cache.order(rows)
    cache.fill([KEYS[20]], PAGE)
    assert cache.find(KEYS[SLOTS - 1]) == NO_ROW


@settings(max_examples=50, deadline=None)
@given(keys=st.lists(st.integers(0, 200), max_size=300))
def test_a_ghost_remembers_the_latest_and_forgets_what_is_recalled(keys: list[int]) -> None:
    ghost, model = Ghost(), {}
    for stamp, number in enumerate(keys):
        key = hashlib.sha256(b"ghost %d" % number).digest()
        assert ghost.recall(key) == model.pop(number, None)
        ghost.remember(key, number % 3, stamp)
        model[number] = (number % 3, stamp)
        if stamp % 100 == 50:
            ghost.grow()
    for number, value in model.items():
        assert ghost.recall(hashlib.sha256(b"ghost %d" % number).digest()) == value


def test_reuse_learns_that_one_class_comes_again_and_after_which_pause() -> None:
    """Half of all entries come again after 100 seconds, and of those all once more after 10."""
    seen = Seen()
    events = []
    for number in range(6000):
        start = number * 16
        events.append((start, 0, 0))
        if number % 2:
            events += [(start + 1600, 1, 1600), (start + 1760, 2, 160)]
    for now, uses, pause in sorted(events):
        if uses:
            assert seen.again(uses - 1, pause, now) == uses
        else:
            seen.first(now)
    once, twice, more = seen.worth
    assert age_class(160) == 3
    assert age_class(1600) == 6
    assert once[0] == pytest.approx(0.5 / 100, rel=0.4)
    assert once[6] > once[0] > once[8]
    assert twice[0] == pytest.approx(1 / 11, rel=0.4)
    assert max(more) < 1e-9


def test_reuse_keeps_what_its_traffic_uses_again() -> None:
    """Singles pass between the two uses of every pair: an LRU of that size would have none of them."""
    now = [0.0]
    caches = [
        SlotCache(SLOTS * PAGE, SLOTS * PAGE, policy=name, wall=lambda: now[0]) for name in ("reuse", "lru")
    ]
    hits = [0, 0]
    for number in range(4000):
        now[0] += 1.0
        # A key comes three times, 12 steps apart; between them come 24 keys that never come again.
        again = [
            hashlib.sha256(b"a %d" % (number - back)).digest()
            for back in (0, 12, 24)
            if (number - back) % 4 == 0
        ]
        singles = [hashlib.sha256(b"s %d %d" % (number, i)).digest() for i in range(2)]
        for key in (*again, *singles):
            for i, cache in enumerate(caches):
                row = cache.find(key)
                if row == NO_ROW:
                    cache.fill([key], PAGE)
                else:
                    cache.touch([row])
                    hits[i] += 1
    assert hits[1] == 0
    assert hits[0] > 400
    assert isinstance(caches[0].policy, Reuse)
