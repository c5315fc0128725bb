"""Trace files: what is read, and what is refused."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import InvalidRequest
from kvtier.replay import formats

if TYPE_CHECKING:
    from pathlib import Path

MOONCAKE = [
    {"timestamp": 2000, "input_length": 1, "output_length": 1, "hash_ids": [7, 8]},
    {"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [7, 9]},
    {"timestamp": 3000, "hash_ids": []},
]
SESSION = {
    "id": "a", "block_size": 64, "hash_id_scope": "local",
    "requests": [
        {"t": 0, "type": "s", "in": 200, "hash_ids": [0, 1, 2]},
        {"t": 5.5, "type": "s", "hash_ids": [0, 1, 2, 3, 4]},
        {"t": 9, "type": "subagent", "requests": [{"t": 2, "hash_ids": [0, 1, 9, 10]}]},
    ],
}  # fmt: skip


def lines(values: list[Any]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_mooncake_is_read_plain_and_gzipped(tmp_path: Path, name: str) -> None:
    data = lines(MOONCAKE).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    [trace] = formats.read([tmp_path / name])
    assert (trace.name, trace.times, trace.requests, trace.unique) == ("a", [0.0, 2.0], [[0, 1], [0, 2]], 3)
    assert len(set(trace.keys())) == 3


@pytest.mark.parametrize("indent", [None, 2])
def test_sessions_of_a_folder_are_one_trace_with_ids_of_their_own(tmp_path: Path, indent: int | None) -> None:
    for name in ("trace_1.json", "trace_2.json"):
        (tmp_path / name).write_text(json.dumps(SESSION, indent=indent))
    (tmp_path / "trace_3.json.gz").write_bytes(gzip.compress(json.dumps(SESSION, indent=indent).encode()))
    (tmp_path / "README.md").write_text("not a trace")
    [trace] = formats.read([tmp_path], group=2)
    assert (len(trace.requests), trace.unique, trace.references) == (9, 9, 15)
    assert trace.times == sorted(trace.times)
    assert 0 <= trace.times[0] < trace.times[-1] < 86_400 + 11
    [again] = formats.read([tmp_path], group=2)
    [other] = formats.read([tmp_path], group=2, seed=1)
    assert again == trace
    assert other.times != trace.times
    by_session = sorted(len(request) for request in trace.requests)
    assert by_session == [1] * 3 + [2] * 6


WRONG = {
    "nothing": ("", "is empty, needs a trace"),
    "text": ("hello\n", "is not JSON, nor lines of it"),
    "another object": ('{"a": 1}\n', "is no trace; known are Mooncake's"),
    "a number": ("17\n", "is no trace"),
    "no time": (lines([MOONCAKE[0], {"hash_ids": [1]}]), "request 2: timestamp is None, needs a number"),
    "time of text": (lines([{"timestamp": "0", "hash_ids": [1]}]), "timestamp is '0', needs a number"),
    "no list": (lines([{"timestamp": 0, "hash_ids": 3}]), "hash_ids needs a list"),
    "twice": (lines([{"timestamp": 0, "hash_ids": [3, 3]}]), "names a block twice"),
    "no object": (lines([MOONCAKE[0], 5]), "request 2 is"),
    "torn": (lines(MOONCAKE)[:-9], "line 3: this is not JSON"),
    "no chunk": (lines([MOONCAKE[2]]), "has no request with a whole chunk"),
    "requests of text": ('{"requests": "none"}', "requests is no list"),
    "version": ('{"kvtier_trace": 99}\n', "is a recording of version 99, this kvtier reads 1"),
    "operation": (lines([{"kvtier_trace": 1}, {"op": "eat", "t": 0, "keys": []}]), "line 2 needs op"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_trace_is_refused_with_the_place(tmp_path: Path, case: str) -> None:
    text, message = WRONG[case]
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(InvalidRequest, match=message) as caught:
        formats.read([tmp_path / "a.jsonl"])
    assert "a.jsonl" in str(caught.value)


def test_a_damaged_gzip_is_refused(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(lines(MOONCAKE * 100).encode()))
    (tmp_path / "a.jsonl.gz").write_bytes(data[:-20])
    with pytest.raises(InvalidRequest, match="cannot read"):
        formats.read([tmp_path / "a.jsonl.gz"])
    data[40] ^= 255
    (tmp_path / "a.jsonl.gz").write_bytes(data)
    with pytest.raises(InvalidRequest, match=r"cannot read|not JSON"):
        formats.read([tmp_path / "a.jsonl.gz"])


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="there is no"):
        formats.read([tmp_path / "none.jsonl"])
    with pytest.raises(InvalidRequest, match="holds no"):
        formats.read([tmp_path])
