"""Load or recompute: the estimates, the decision, and what it costs to be wrong."""

from __future__ import annotations

import math
import threading
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from engine_sim import blocks, compute, prompt
from kvtier.connector import Economy
from kvtier.errors import InvalidRequest

TOKENS = prompt(300)


def measured(
    *, prefill: float, per_token: float, latency: float = 0.0, sizes: Any = (500, 1000, 4000)
) -> Economy:
    """An economy that has seen prefill and loads of these speeds, in seconds per token."""
    economy = Economy()
    for _ in range(10):
        for tokens in sizes:
            economy.observe_prefill(tokens, tokens * prefill)
            economy.observe_load(tokens, latency + tokens * per_token)
    return economy


def decisions(economy: Economy, tokens: int, count: int) -> list[int]:
    return [economy.worth(tokens) for _ in range(count)]


def test_it_loads_until_both_are_measured() -> None:
    economy = Economy()
    assert economy.worth(100) == 100
    economy.observe_prefill(1000, 1e-6)
    assert economy.worth(100) == 100, "that is how it learns what a load takes"
    economy.observe_load(1000, 5.0)
    assert economy.worth(100) == 0
    other = Economy()
    other.observe_load(1000, 5.0)
    assert other.worth(100) == 100
    assert other.prefill_time(10) is None


@pytest.mark.parametrize(("tokens", "worth"), [(0, 0), (50, 0), (150, 150), (4000, 4000)])
def test_a_latency_makes_short_prefixes_not_worth_it(tokens: int, worth: int) -> None:
    """0.1 s, and 1 ms per token against 2: from 100 tokens on."""
    economy = measured(prefill=2e-3, per_token=1e-3, latency=0.1)
    assert economy.worth(tokens) == worth


def test_a_device_slower_than_the_model_is_not_worth_it_at_any_length() -> None:
    economy = measured(prefill=1e-3, per_token=2e-3)
    assert [economy.worth(tokens) for tokens in (1, 100, 100_000)] == [0, 0, 0]


@given(
    latency=st.floats(0, 0.5),
    per_token=st.floats(1e-6, 1e-2),
    sizes=st.lists(st.integers(16, 1 << 17), min_size=1, max_size=6),
)
def test_estimates_fit_what_was_measured(latency: float, per_token: float, sizes: list[int]) -> None:
    economy = measured(prefill=1e-3, per_token=per_token, latency=latency, sizes=sizes)
    numbers = economy.stats()
    assert numbers["load_latency_seconds"] >= 0
    assert numbers["load_seconds_per_token"] >= 0
    assert numbers["prefill_seconds_per_token"] == pytest.approx(1e-3)
    mean = sum(sizes) / len(sizes)
    if max(sizes) <= 2 * min(sizes):
        estimate = economy.load_time(int(mean))
        assert estimate == pytest.approx(latency + per_token * mean, rel=0.2, abs=per_token * 2)


@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.floats(0, 1e4)), max_size=30))
def test_estimates_are_sane_whatever_is_measured(seen: list[tuple[int, float]]) -> None:
    economy = Economy()
    for tokens, seconds in seen:
        economy.observe_load(tokens, seconds)
        economy.observe_prefill(tokens, seconds)
        assert all(math.isfinite(value) and value >= 0 for value in economy.stats().values())
        assert economy.worth(1000) in (0, 1000)


def test_a_slow_spell_ends_and_loading_comes_back() -> None:
    economy = measured(prefill=1e-3, per_token=1e-4)
    for _ in range(10):
        economy.observe_load(1000, 10.0)
    took = 0
    for _ in range(300):
        if economy.worth(1000):
            took += 1
            economy.observe_load(1000, 0.1)
    assert decisions(economy, 1000, 20) == [1000] * 20
    assert economy.probes > 0
    assert economy.probes + economy.recomputed < 300
    assert took + economy.recomputed == 300


def test_a_device_that_stays_slow_is_tried_seldom() -> None:
    economy = measured(prefill=1e-3, per_token=1e-4)
    for _ in range(10):
        economy.observe_load(1000, 10.0)
    for _ in range(320):
        if economy.worth(1000):
            economy.observe_load(1000, 10.0)
    assert economy.probes == economy.loaded == 20
    assert economy.recomputed == 300


def test_loads_that_end_at_their_deadline_count_against_it() -> None:
    economy = measured(prefill=1e-3, per_token=1e-4)
    for _ in range(5):
        economy.observe_load(0, 30.0)
    assert economy.worth(4000) == 0


def test_tiny_steps_do_not_drown_a_measured_prefill() -> None:
    economy = measured(prefill=1e-3, per_token=1e-4)
    for _ in range(200):
        economy.observe_prefill(1, 0.02)  # a step takes 20 ms, whatever is in it
    assert economy.stats()["prefill_seconds_per_token"] < 1.5e-3


def test_what_is_asked_is_counted() -> None:
    economy = measured(prefill=1e-3, per_token=2e-3)
    assert economy.worth(0) == 0
    assert sum(map(bool, decisions(economy, 10, 16))) == 1
    numbers = economy.stats()
    assert (numbers["loaded"], numbers["recomputed"], numbers["probes"]) == (1, 15, 1)


@pytest.mark.parametrize(("tokens", "seconds"), [(-1, 1.0), (1, -1.0), (1, math.nan), (1, math.inf)])
def test_what_cannot_be_is_refused(tokens: int, seconds: float) -> None:
    economy = Economy()
    for observe in (economy.observe_load, economy.observe_prefill):
        with pytest.raises(InvalidRequest, match="needs at least 0 of both"):
            observe(tokens, seconds)
    assert set(economy.stats().values()) == {0}


def test_threads_lose_no_decision() -> None:
    economy = measured(prefill=1e-3, per_token=2e-3)
    threads = [threading.Thread(target=decisions, args=(economy, 10, 500)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert economy.loaded + economy.recomputed == 2000


def stored(connector: Any, tensors: Any) -> None:
    table = blocks(19, seed=7)
    compute(tensors, TOKENS, table)
    with connector.request(TOKENS) as request:
        assert connector.save(request, table).result(20).ok


def test_a_connector_offers_what_is_worth_it_and_learns(
    open_store: Any, connect: Any, eventually: Any
) -> None:
    economy = Economy()
    store = open_store()
    connector, tensors = connect(store, economy=economy)
    stored(connector, tensors)
    with connector.request(TOKENS) as request:
        found = connector.match(request)
        assert found == 256, "nothing is measured yet"
        assert connector.load(request, blocks(19, seed=1), 0, found).result(20).tokens == 256
        assert economy.load_time(256)
        economy.observe_prefill(10_000, 1e-9)  # no load is as fast
        assert connector.match(request) == 0
        eventually(lambda: store.stats()["dram.pinned_slots"] == 0)  # what is not offered is not kept
        assert connector.stats()["match.tokens"] == 256
        economy.observe_prefill(10_000_000, 1e9)
        assert connector.match(request) == 256
        assert connector.match(request, computed=256) == 0
    assert (economy.loaded, economy.recomputed) == (2, 1)


def test_a_load_that_says_nothing_of_the_time_is_not_learned_from(open_store: Any, connect: Any) -> None:
    economy = Economy()
    store = open_store()
    connector, tensors = connect(store, economy=economy)
    stored(connector, tensors)
    with connector.request(TOKENS) as request:
        store.delete(request.keys[1:2]).result(20)
        assert connector.load(request, blocks(19, seed=1), 0, 256).result(20).tokens == 64
        assert connector.load(request, blocks(19, seed=1), 0, 0).result(20).tokens == 0
    assert economy.load_time(64) is None
