"""Hit rates by size: of curves, and of traces against a plain simulation."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import InvalidRequest
from kvtier.plan.hits import Curve, Trace, read_curve, read_trace

# Looked for before the tests' surroundings are cleared of KVTIER_*.
TRACES = os.environ.get("KVTIER_TRACES")
ROWS = [
    {"policy": "lru", "capacity_chunks": 200, "hit_rate": 0.4},
    {"policy": "lru", "capacity_chunks": 100, "hit_rate": 0.2},
    {"policy": "s3fifo", "capacity_chunks": 100, "hit_rate": 0.3},
]


def written(path: Path, report: Any) -> Path:
    file = path / "curve.json"
    file.write_text(json.dumps(report))
    return file


def test_a_curve_of_the_policy_that_is_meant(tmp_path: Path) -> None:
    file = written(tmp_path, {"chunk_tokens": 512, "rows": ROWS})
    curve = read_curve(file, "lru", None)
    assert curve.points == ((100, 0.2), (200, 0.4))
    assert curve.chunk_tokens == 512
    assert [curve.at(chunks) for chunks in (0, 50, 150, 1e9)] == pytest.approx([0, 0.1, 0.3, 0.4])
    assert read_curve(file, "lru", 256).chunk_tokens == 256


@pytest.mark.parametrize(
    ("report", "policy", "says"),
    [
        ({"chunk_tokens": 1, "rows": ROWS}, None, "policy is None; .* has lru, s3fifo"),
        ({"chunk_tokens": 1, "rows": ROWS}, "fifo", "has lru, s3fifo"),
        ({"rows": ROWS}, "lru", "give .* chunk_tokens"),
        ({"rows": [{"capacity_chunks": 0, "hit_rate": 0.1}]}, None, "above 0"),
        ({"rows": [{"capacity_chunks": 1, "hit_rate": 36.6}]}, None, "from 0 to 1"),
        ({"rows": [{"capacity_chunks": 1}]}, None, "hit_rate None"),
        ({"rows": []}, None, "has none"),
        ({"rows": [ROWS[1], {**ROWS[1], "hit_rate": 0.1}]}, None, "several rows of lru at 100 chunks"),
        ([], None, "no list `rows`"),
    ],
)
def test_a_curve_that_is_none_is_refused(report: Any, policy: str | None, says: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=says):
        read_curve(written(tmp_path, report), policy, None)


@given(st.dictionaries(st.integers(1, 1000), st.floats(0, 1), min_size=1), st.integers(0, 2000))
def test_a_rising_curve_rises_everywhere(rates: dict[int, float], chunks: int) -> None:
    rising = sorted(rates.values())
    curve = Curve(tuple(zip(map(float, sorted(rates)), rising, strict=True)), 1, "")
    assert 0 <= curve.at(chunks) <= curve.at(chunks + 1) <= rising[-1]


def plainly(requests: list[list[int]], blocks: int) -> float:
    """The same by a list in order of use, oldest first."""
    cache: list[int] = []
    hits = 0
    for request in requests:
        hits += next((i for i, block in enumerate(request) if block not in cache), len(request))
        kept = request[:blocks]
        cache = [block for block in cache if block not in kept] + kept[::-1]
        cache = cache[max(0, len(cache) - blocks) :]
    return hits / sum(map(len, requests))


@given(
    st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True), min_size=1, max_size=20),
    st.integers(1, 15),
)
def test_a_trace_hits_as_a_plain_lru(requests: list[list[int]], blocks: int) -> None:
    trace = Trace(tuple(map(tuple, requests)), 1, 1, "")
    assert trace.hit_rate(blocks) == plainly(requests, blocks)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_traces_are_read_plain_and_gzipped(pack: Any, tmp_path: Path) -> None:
    lines = [{"timestamp": 0, "input_length": n, "output_length": 10, "hash_ids": [1, n]} for n in (100, 300)]
    file = tmp_path / "trace.jsonl.gz"
    file.write_bytes(pack("\n".join(map(json.dumps, lines)).encode()))
    trace = read_trace(file)
    assert (trace.prompt_tokens, trace.output_tokens, trace.requests) == (200, 10, ((1, 100), (1, 300)))


@pytest.mark.parametrize(
    ("text", "says"), [("", "no requests"), ("{}\n", "line 1"), ("nothing", "line 1"), ("[1]", "line 1")]
)
def test_another_trace_is_refused(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=says):
        read_trace(file)


def test_the_conversation_trace_hits_as_published() -> None:
    if not TRACES:
        pytest.skip("KVTIER_TRACES does not name the directory of traces")
    trace = read_trace(Path(TRACES) / "mooncake" / "conversation_trace.jsonl.gz")
    assert trace.hit_rate(18279) == pytest.approx(0.2789, abs=0.001)
    assert trace.hit_rate(182790) == pytest.approx(0.3664, abs=0.001)
