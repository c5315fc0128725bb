"""Trace files: Mooncake's, agent sessions, and kvtier's own recordings; plain or gzipped."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from typing import TYPE_CHECKING, Any

from kvtier.errors import InvalidRequest
from kvtier.replay import recordings
from kvtier.replay.trace import Trace, make_trace

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence
    from pathlib import Path

_DAY = 86_400.0
GROUP = 8
"""Ids of 64 tokens that make a chunk of 512, as Mooncake's are."""
_KNOWN = (
    "known are Mooncake's (a line {timestamp, hash_ids} for each request), agent sessions (one JSON object "
    "with requests for each session), and what Store.record writes"
)


def read(paths: Sequence[Path], *, seed: int = 0, group: int = GROUP) -> list[Trace]:
    """The traces in files, and in the files of folders. All agent sessions together are one trace.

    Sessions have no common clock: each starts at a time drawn with `seed`, uniform over 24 hours, in the
    order of their names. Their ids are their own, and `group` of them make a chunk; the rest is dropped.

    Raises InvalidRequest for what cannot be read, or is no trace.
    """
    traces, sessions = [], []
    for path in _files(paths):
        lines = _lines(path)
        first = next(lines, None)
        if first is None:
            raise InvalidRequest(f"{path} is empty, needs a trace; {_KNOWN}")
        if isinstance(first, dict) and "requests" in first:
            sessions.append((path, first))
        elif isinstance(first, dict) and "hash_ids" in first:
            traces.append(_checked(path, make_trace(_stem(path), _mooncake(path, first, lines))))
        elif isinstance(first, dict) and recordings.MARK in first:
            traces.append(_checked(path, recordings.read(path, _stem(path), first, lines)))
        else:
            raise InvalidRequest(f"{path} is no trace; {_KNOWN}")
    if sessions:
        name = "sessions" if len(sessions) > 1 else _stem(sessions[0][0])
        traces.append(_checked(sessions[0][0], make_trace(name, _agents(sessions, seed, group))))
    return traces


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            found = sorted(p for p in path.iterdir() if ".json" in p.suffixes or ".jsonl" in p.suffixes)
            if not found:
                raise InvalidRequest(f"{path} holds no .json or .jsonl file, plain or .gz")
            yield from found
        elif path.exists():
            yield path
        else:
            raise InvalidRequest(f"there is no {path}: give a trace file, or a folder of them")


def _lines(path: Path) -> Iterator[Any]:
    """The JSON values of a file: one a line, or one that takes all lines."""
    try:
        with path.open("rb") as file:
            is_gzip = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rt", encoding="utf-8") if is_gzip else path.open(encoding="utf-8") as text:
            for number, line in enumerate(text, 1):
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)
                except ValueError:
                    if number > 1:
                        raise InvalidRequest(f"{path}, line {number}: this is not JSON") from None
                    value = _whole(path, line + text.read())
                yield value
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}") from error


def _whole(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not JSON, nor lines of it: {error}") from error


def _mooncake(path: Path, first: Any, lines: Iterable[Any]) -> Iterator[tuple[float, list[Hashable]]]:
    """timestamp in milliseconds; ids are global and name a block with all before it."""
    for number, value in enumerate([first, *lines], 1):
        where = f"{path}, request {number}"
        if not isinstance(value, dict):
            raise InvalidRequest(
                f"{where} is {type(value).__name__}, needs an object with timestamp, hash_ids"
            )
        yield _number(where, value, "timestamp") / 1e3, _ids(where, value)


def _agents(
    sessions: Iterable[tuple[Path, Any]], seed: int, group: int
) -> Iterator[tuple[float, list[Hashable]]]:
    starts = random.Random(seed)
    for path, session in sessions:
        start = starts.uniform(0, _DAY)
        for time, ids in _session(str(path), session, 0.0):
            ends = range(group - 1, len(ids), group)
            yield start + time, [(path, ids[end]) for end in ends]


def _session(where: str, session: Any, start: float) -> Iterator[tuple[float, list[Any]]]:
    """Requests of a session, and of the conversations nested in it, whose times count from their start."""
    if not isinstance(session.get("requests"), list):
        raise InvalidRequest(f"{where}: requests is no list")
    for number, value in enumerate(session["requests"], 1):
        place = f"{where}, request {number}"
        if not isinstance(value, dict):
            raise InvalidRequest(f"{place} is {type(value).__name__}, needs an object with t and hash_ids")
        time = start + _number(place, value, "t")
        if "requests" in value:
            yield from _session(place, value, time)
        else:
            yield time, _ids(place, value)


def _number(where: str, value: Any, name: str) -> float:
    number = value.get(name)
    if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) < 1e15:
        raise InvalidRequest(f"{where}: {name} is {number!r}, needs a number")
    return float(number)


def _ids(where: str, value: Any) -> list[Any]:
    ids = value.get("hash_ids")
    if not isinstance(ids, list) or not all(type(chunk) in (int, str) for chunk in ids):
        raise InvalidRequest(f"{where}: hash_ids needs a list of numbers or strings")
    if len(set(ids)) < len(ids):
        raise InvalidRequest(
            f"{where}: hash_ids names a block twice: an id stands for all that is before it, too"
        )
    return ids


def _checked(path: Path, trace: Trace) -> Trace:
    if not trace.requests:
        raise InvalidRequest(f"{path} has no request with a whole chunk")
    return trace


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")
