"""Lifetimes against plain dicts, and what the index tells them."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier.index.cache import COLUMNS, SlotCache
from kvtier.index.lifetimes import Lifetimes
from kvtier.metrics import HISTOGRAM_BOUNDS, Histogram

PAGE = 4096
KEYS = [hashlib.sha256(b"%d" % i).digest() for i in range(9)]


class Clock:
    now = 1_000_000

    def __call__(self) -> int:
        return self.now


def buckets(times: list[int]) -> Counter[int]:
    """How many of the times are below each bound, and not below the one before."""
    return Counter(next((i for i, bound in enumerate(HISTOGRAM_BOUNDS) if t < bound), 25) for t in times)


def counted(histogram: Histogram) -> Counter[int]:
    return Counter({i: count for i, count in enumerate(histogram.counts) if count})


@given(
    st.lists(
        st.tuples(st.integers(0, 1 << 26), st.sampled_from(["enter", "use", "leave"]), st.integers(0, 4))
    )
)
def test_times_are_those_of_a_plain_model(calls: list[tuple[int, str, int]]) -> None:
    clock = Clock()
    lifetimes = Lifetimes(clock)
    entered: dict[int, int] = {}
    used: dict[int, int] = {}
    residences: list[int] = []
    gaps: list[int] = []
    for row in range(5):
        lifetimes.enter(row)
        entered[row] = used[row] = clock.now
    for wait, call, row in calls:
        clock.now += wait % ((1 << 32) - clock.now)
        if call == "enter":
            lifetimes.enter(row)
            entered[row] = used[row] = clock.now
        elif call == "use":
            rows = range(row, 5)
            lifetimes.use(rows)
            gaps += [clock.now - used[each] for each in rows]
            used |= dict.fromkeys(rows, clock.now)
        else:
            lifetimes.leave(row)
            residences.append(clock.now - entered[row])
    for histogram, times in ((lifetimes.residence, residences), (lifetimes.reuse_gap, gaps)):
        assert counted(histogram) == buckets(times)
        assert histogram.total == sum(times)


def test_a_clock_that_is_set_back_counts_as_no_time() -> None:
    clock = Clock()
    lifetimes = Lifetimes(clock)
    lifetimes.enter(0)
    clock.now -= 100
    lifetimes.use([0])
    lifetimes.leave(0)
    assert counted(lifetimes.residence) == counted(lifetimes.reuse_gap) == {0: 1}


def fill(cache: SlotCache, key: bytes) -> None:
    offset = cache.reserve(PAGE)
    assert offset is not None
    cache.unpin(cache.insert(key, offset, PAGE))


def test_the_index_counts_evictions_and_not_deletions() -> None:
    clock = Clock()
    cache = SlotCache(2 * PAGE, 2 * PAGE, wall=clock)
    fill(cache, KEYS[0])
    fill(cache, KEYS[1])
    clock.now += 10
    cache.discard(cache.find(KEYS[1]))
    fill(cache, KEYS[2])
    assert cache.lifetimes.residence.total == 0
    clock.now += 5
    fill(cache, KEYS[3])  # in the place of the first
    assert (cache.lifetimes.residence.total, sum(cache.lifetimes.residence.counts)) == (15, 1)
    clock.now += 5
    fill(cache, KEYS[4])  # and of the third
    assert (cache.lifetimes.residence.total, sum(cache.lifetimes.residence.counts)) == (25, 2)


def test_what_is_loaded_has_been_there_since_it_was_stored() -> None:
    clock = Clock()
    cache = SlotCache(2 * PAGE, 2 * PAGE, wall=clock)
    columns = {name: np.zeros(2, code) for name, code in COLUMNS.items()}
    columns["offset"][:] = [0, PAGE]
    columns["nbytes"][:] = columns["stored_bytes"][:] = PAGE
    columns["stored_at"][:] = [clock.now - 1000, clock.now - 10]
    cache.load(b"".join(KEYS[:2]), np.array([PAGE], np.int64), columns)
    cache.lifetimes.use([0, 1])  # when they were asked for before is not known
    assert sum(cache.lifetimes.reuse_gap.counts) == 0
    clock.now += 3
    cache.lifetimes.use([0])
    assert cache.lifetimes.reuse_gap.total == 3
    fill(cache, KEYS[2])
    assert cache.lifetimes.residence.total == 1003
