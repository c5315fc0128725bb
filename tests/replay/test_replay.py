"""Replay against plain models: the tiers, the bounds, the distances; and the figures of the given traces."""

from __future__ import annotations

import os
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.config import AdmissionName, PolicyName
from kvtier.replay import bounds, formats
from kvtier.replay.run import bound, replay
from kvtier.replay.tiers import Tiers
from kvtier.replay.trace import Trace, make_trace


@st.composite
def traces(draw: Any) -> Trace:
    """Requests that walk down a tree of prefixes: a block's parent is always the same one."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    children: dict[int, list[int]] = {0: []}
    requests = []
    for number in range(draw(st.integers(1, 40))):
        node, path = 0, []
        for _ in range(rng.randint(1, 9)):
            if not children[node] or rng.random() < 0.3:
                new = len(children)
                children[node].append(new)
                children[new] = []
            node = rng.choice(children[node])
            path.append(node)
        requests.append((float(number), path))
    return make_trace("tree", requests)


class PlainLru:
    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self.held: OrderedDict[int, None] = OrderedDict()

    def serve(self, request: list[int]) -> None:
        head = request[: self.chunks]
        for chunk in head:
            if chunk in self.held:
                self.held.move_to_end(chunk)
        for chunk in head:
            if chunk not in self.held:
                if len(self.held) == self.chunks:
                    self.held.popitem(last=False)
                self.held[chunk] = None
        for chunk in reversed(head):
            self.held.move_to_end(chunk)


def hits_of(request: list[int], *tiers: Any) -> int:
    return next(
        (i for i, chunk in enumerate(request) if not any(chunk in tier for tier in tiers)), len(request)
    )


@settings(max_examples=100, deadline=None)
@given(trace=traces(), chunks=st.integers(1, 30), warm=st.sampled_from([0.0, 0.5]))
def test_lru_hits_what_a_plain_lru_hits(trace: Trace, chunks: int, warm: float) -> None:
    model, hits, references = PlainLru(chunks), 0, 0
    for number, request in enumerate(trace.requests):
        if number >= trace.first_counted(warm):
            hits += hits_of(request, model.held)
            references += len(request)
        model.serve(request)
    row = replay(trace, trace.keys(), "lru", chunks, warm=warm)
    assert (row["hits"], row["references"]) == (hits, references)


@settings(max_examples=100, deadline=None)
@given(trace=traces(), chunks=st.integers(2, 30), dram=st.integers(1, 12))
def test_two_tiers_hit_what_two_plain_lrus_hit(trace: Trace, chunks: int, dram: int) -> None:
    disk, upper = PlainLru(chunks), PlainLru(dram)
    hits, in_dram = 0, 0
    for request in trace.requests:
        found = hits_of(request, disk.held, upper.held)
        hits += found
        in_dram += sum(chunk in upper.held for chunk in request[:found])
        disk.serve(request)
        upper.serve(request)
    row = replay(trace, trace.keys(), "lru", max(chunks, dram), dram_chunks=dram)
    if chunks >= dram:
        assert (row["hits"], row["hits"] - round(row["hit_rate_disk"] * row["references"])) == (hits, in_dram)


@settings(max_examples=100, deadline=None)
@given(
    trace=traces(), chunks=st.integers(1, 30), dram=st.integers(0, 8),
    policy=st.sampled_from(get_args(PolicyName)), admission=st.sampled_from(get_args(AdmissionName)),
)  # fmt: skip
def test_figures_add_up_under_every_policy(
    trace: Trace, chunks: int, dram: int, policy: PolicyName, admission: AdmissionName
) -> None:
    row = replay(
        trace, trace.keys(), policy, chunks, dram_chunks=dram, dram_policy=policy, admission=admission
    )
    assert row["references"] == trace.references
    assert row["hit_rate"] == pytest.approx(row["hit_rate_dram"] + row["hit_rate_disk"])
    assert row["hit_rate"] <= bounds.infinite(trace) + 1e-9
    assert row["evictions_disk"] <= row["bytes_written_disk"] <= row["evictions_disk"] + chunks
    assert row["hits"] + row["orphans"] <= row["references"]
    if not dram:
        assert row["hit_rate_dram"] == row["bytes_written_dram"] == 0
        assert row["hit_rate"] <= bound(trace, "belady", chunks)["hit_rate"] + 1e-9


@settings(max_examples=100, deadline=None)
@given(trace=traces(), chunks=st.integers(1, 40))
def test_reuse_distances_are_what_an_lru_needs(trace: Trace, chunks: int) -> None:
    """In prefix-closed requests all of which fit, a reference hits if its distance is within the tier."""
    longest = max(map(len, trace.requests))
    distances = bounds.reuse_distances(trace)
    seen: list[int] = []
    expected = []
    for request in trace.requests:
        for chunk in reversed(request):
            if chunk in seen:
                expected.append(len(seen) - seen.index(chunk))
                seen.remove(chunk)
            seen.append(chunk)
    assert distances.tolist() == expected
    if chunks >= 2 * longest:
        row = replay(trace, trace.keys(), "lru", chunks)
        assert row["hits"] <= np.count_nonzero(distances <= chunks + longest)
    shares = [bucket["share"] for bucket in bounds.histogram(distances, trace.references)]
    assert sum(shares) == pytest.approx(len(expected) / trace.references)


def test_belady_knows_better_than_lru() -> None:
    """0 comes again at once, 1 and 2 much later: one place is best kept for 0."""
    trace = make_trace("small", [(float(i), [chunk]) for i, chunk in enumerate([0, 1, 0, 2, 0, 1, 0, 2])])
    assert bounds.belady(trace, 1) == 3 / 8
    assert bounds.belady(trace, 2) == 4 / 8
    assert bounds.infinite(trace) == 5 / 8
    assert replay(trace, trace.keys(), "lru", 1)["hits"] == 0


def test_a_request_larger_than_a_tier_keeps_its_head() -> None:
    trace = make_trace("long", [(0.0, list(range(50))), (1.0, list(range(50)))])
    row = replay(trace, trace.keys(), "lru", 10, dram_chunks=4)
    assert (row["hits"], row["hit_rate_dram"] * 100, row["evictions_disk"]) == (10, 4.0, 0)


def test_a_second_put_is_asked_for_where_somebody_would_have_to_leave() -> None:
    trace = make_trace("twice", [(float(i), [chunk]) for i, chunk in enumerate([0, 1, 2, 2, 2, 3])])
    keys = trace.keys()
    ghost = replay(trace, keys, "lru", 2, admission="ghost")
    second = replay(trace, keys, "lru", 2, admission="second-touch")
    assert (ghost["bytes_written_disk"], ghost["not_admitted"], ghost["hits"]) == (3, 2, 1)
    assert (second["bytes_written_disk"], second["not_admitted"], second["hits"]) == (1, 4, 1)


def test_the_clock_of_a_policy_is_that_of_the_trace() -> None:
    tiers = Tiers(4, "reuse")
    tiers.serve(1000.0, [bytes(32)])
    assert tiers.disk.index.policy._now() == 16000  # type: ignore[attr-defined]


GIVEN = Path(os.environ.get("KVTIER_TRACES", "/nowhere"))
needs_traces = pytest.mark.skipif(
    not (GIVEN / "mooncake").is_dir(),
    reason="KVTIER_TRACES is no folder with mooncake/ and claude_code/ in it",
)
EXPECTED = {
    ("conversation_trace", "lru"): ({0.5: 4.4, 2.5: 9.94, 5: 19.58, 10: 27.89, 25: 35.35}, 0.1),
    ("conversation_trace", "s3fifo"): ({0.5: 5.6, 2.5: 13.8, 5: 19.2, 10: 24.4, 25: 33.4}, 1.5),
    ("conversation_trace", "belady"): ({0.5: 18.29, 2.5: 33.42, 5: 36.64}, 0.01),
    ("synthetic_trace", "lru"): ({2.5: 8.99, 10: 26.23, 25: 44.41}, 0.1),
}


@pytest.mark.slow
@needs_traces
@pytest.mark.parametrize(("name", "policy"), EXPECTED)
def test_published_hit_rates_are_met(name: str, policy: Any) -> None:
    [trace] = formats.read([GIVEN / "mooncake" / f"{name}.jsonl.gz"])
    keys = trace.keys()
    rates, margin = EXPECTED[name, policy]
    for percent, expected in rates.items():
        chunks = int(trace.unique * percent / 100)
        row = bound(trace, policy, chunks) if policy == "belady" else replay(trace, keys, policy, chunks)
        assert 100 * row["hit_rate"] == pytest.approx(expected, abs=margin), percent


@pytest.mark.slow
@needs_traces
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", ["mooncake/conversation_trace.jsonl.gz", "mooncake/synthetic_trace.jsonl.gz", "claude_code"]
)
@pytest.mark.parametrize("warm", [0.0, 0.5])
def test_reuse_is_as_good_as_the_better_of_lru_and_s3fifo(name: str, warm: float) -> None:
    [trace] = formats.read([GIVEN / name])
    keys = trace.keys()
    for percent in (0.5, 2.5, 5, 10, 25):
        chunks = int(trace.unique * percent / 100)
        rates = {
            policy: 100 * replay(trace, keys, policy, chunks, warm=warm)["hit_rate"]
            for policy in ("lru", "s3fifo", "reuse")
        }
        assert rates["reuse"] >= max(rates["lru"], rates["s3fifo"]) - 0.3, (percent, rates)
