"""Hit rates over cache sizes: a curve that `kvtier replay` wrote, or a trace run through one LRU."""

from __future__ import annotations

import gzip
import json
import statistics
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtier.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TRACE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Curve:
    """Share of chunk references that hit, by capacity in chunks: points in rising order of capacity."""

    points: tuple[tuple[float, float], ...]
    chunk_tokens: int
    source: str

    def at(self, chunks: float) -> float:
        """Between points in a straight line, from (0, 0) on; beyond the last one no more than it."""
        left = (0.0, 0.0)
        for right in self.points:
            if chunks <= right[0]:
                share = (chunks - left[0]) / (right[0] - left[0]) if right[0] > left[0] else 1.0
                return left[1] + share * (right[1] - left[1])
            left = right
        return left[1]


def read_curve(file: Path, policy: str | None, chunk_tokens: int | None) -> Curve:
    """The curve of one policy in the JSON of `kvtier replay --json`.

    `chunk_tokens` is for files that do not tell. Raises InvalidRequest for a file without such rows, and
    where it is open which policy is meant.
    """
    try:
        report = json.loads(_bytes(file))
    except ValueError as error:
        raise InvalidRequest(f"the hit curve {file} is no JSON: {error}") from error
    rows = report.get("rows") if isinstance(report, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InvalidRequest(f"the hit curve {file} has no list `rows`: `kvtier replay --json` writes it")
    policies = sorted({str(row.get("policy", "lru")) for row in rows})
    if policy is None and len(policies) == 1:
        policy = policies[0]
    if policy not in policies:
        raise InvalidRequest(
            f"policy is {policy!r}; the hit curve {file} has {', '.join(policies) or 'none'}"
        )
    points: dict[float, float] = {}
    for row in (row for row in rows if str(row.get("policy", "lru")) == policy):
        chunks, rate = row.get("capacity_chunks"), row.get("hit_rate")
        if not _number(chunks) or not _number(rate) or not (chunks > 0 and 0 <= rate <= 1):
            raise InvalidRequest(
                f"the hit curve {file} has a row of capacity_chunks {chunks!r} and hit_rate {rate!r}: needs "
                "a number above 0, and one from 0 to 1"
            )
        if points.setdefault(float(chunks), float(rate)) != rate:
            raise InvalidRequest(
                f"the hit curve {file} has several rows of {policy} at {chunks} chunks: "
                "give a file of one replay"
            )
    tokens = chunk_tokens or report.get("chunk_tokens") or rows[0].get("chunk_tokens")
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise InvalidRequest(f"the hit curve {file} has no chunk_tokens: give [workload] chunk_tokens")
    return Curve(tuple(sorted(points.items())), tokens, f"{file.name}, {policy}")


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests as lists of block ids, and how long they are."""

    requests: tuple[tuple[int, ...], ...]
    prompt_tokens: float
    """Of a request, on average."""
    output_tokens: float
    source: str

    def hit_rate(self, blocks: int) -> float:
        """Share of block references that hit in one LRU of `blocks` blocks, touched from tail to head.

        A block hits while all blocks before it do; a request above the capacity keeps its head. That is
        what a store does, without its tiers, tenants and limits: `kvtier replay` runs through those.
        """
        cache: OrderedDict[int, None] = OrderedDict()
        hits = references = 0
        for request in self.requests:
            references += len(request)
            kept = list(dict.fromkeys(request))[:blocks]
            for block in request:
                if block not in cache:
                    break
                hits += 1
            for block in reversed(kept):
                cache[block] = None
                cache.move_to_end(block)
            while len(cache) > blocks:
                cache.popitem(last=False)
        return hits / references if references else 0.0


def read_trace(file: Path) -> Trace:
    """A trace of JSON lines in Mooncake's format, plain or gzipped. Raises InvalidRequest for another."""
    requests, prompts, outputs = [], [], []
    for number, line in enumerate(_bytes(file).splitlines(), start=1):
        try:
            request = json.loads(line)
            blocks = tuple(map(int, request["hash_ids"]))
            prompts.append(float(request["input_length"]))
            outputs.append(float(request["output_length"]))
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidRequest(
                f"line {number} of the trace {file} is not {{input_length, output_length, hash_ids}}: "
                f"{error!r}. Of other traces, `kvtier replay --json` makes a hit curve"
            ) from error
        requests.append(blocks)
    if not requests:
        raise InvalidRequest(f"the trace {file} has no requests")
    return Trace(tuple(requests), statistics.fmean(prompts), statistics.fmean(outputs), file.name)


def trace_curve(trace: Trace, capacities: Sequence[int], chunk_tokens: int) -> Curve:
    """The curve of a trace at `capacities`, in blocks."""
    points = tuple((float(blocks), trace.hit_rate(blocks)) for blocks in sorted(set(capacities)))
    return Curve(points, chunk_tokens, f"{trace.source}, through an LRU")


def _bytes(file: Path) -> bytes:
    try:
        data = file.read_bytes()
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError) as error:
        raise InvalidRequest(f"cannot read {file}: {error}") from error


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
