"""`kvtier bench keys`: what it costs to name a long prompt's chunks and to find them."""

from __future__ import annotations

import statistics
import time
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter

import kvtier
from kvtier.cli.bench import options, report
from kvtier.cli.bench.data import check
from kvtier.cli.bench.measure import percentile_ms

_COLUMNS = {
    "chunks": "chunks", "keys_ms": "keys ms", "match_ms": "match ms", "total_ms": "both ms",
    "p99_ms": "both p99 ms",
}  # fmt: skip
_NAMESPACE = bytes(32)
_PAYLOAD = np.ones(4096, np.uint8)


def keys(
    *,
    tokens: Annotated[int, Parameter(help="Length of the prompt.")] = 100_000,
    chunk_tokens: Annotated[
        tuple[int, ...], Parameter(negative="", help="Tokens per chunk; repeat it for several.")
    ] = (256, 16),
    rounds: options.Rounds = 50,
    json: options.Json = None,
) -> None:
    """Compute the keys of a prompt that is stored, and match them: medians in milliseconds."""
    options.check(rounds, json)
    prompt = np.random.default_rng(0).integers(0, 150_000, tokens, np.uint32)
    with report.progress(len(chunk_tokens)) as step:
        found = []
        for chunk in chunk_tokens:
            step(f"chunks of {chunk} tokens")
            found.append(_measure(prompt, chunk, rounds))
    report.show(f"keys and match of {tokens:,} stored tokens, sha256", found, _COLUMNS)
    report.write_json(json, "memory", {"tokens": tokens, "rounds": rounds, "rows": found})


def _measure(prompt: np.ndarray[Any, np.dtype[np.uint32]], chunk: int, rounds: int) -> dict[str, Any]:
    def names() -> list[kvtier.ChunkKey]:
        return kvtier.chunk_keys(prompt, namespace=_NAMESPACE, chunk_tokens=chunk)

    stored = names()
    hashing, matching = [], []
    room = 2 * len(stored) * len(_PAYLOAD) + (64 << 20)
    queued = len(stored) + 1
    with kvtier.open(dram=room, chunk_bytes=len(_PAYLOAD), max_queued_chunks=queued) as store:
        if stored:
            check(store.put(stored, [_PAYLOAD] * len(stored)).result(), "cannot store the prompt")
        for _ in range(rounds):
            start = time.perf_counter()
            own = names()
            between = time.perf_counter()
            matched = store.match(own)
            end = time.perf_counter()
            hashing.append(between - start)
            matching.append(end - between)
            if matched != len(stored):
                raise AssertionError(f"{matched} of {len(stored)} stored chunks were found")
    both = [sum(pair) for pair in zip(hashing, matching, strict=True)]
    return {
        "name": f"keys-{chunk}",
        "chunks": len(stored),
        "keys_ms": statistics.median(hashing) * 1e3,
        "match_ms": statistics.median(matching) * 1e3,
        "total_ms": statistics.median(both) * 1e3,
        "p99_ms": percentile_ms(both, 99),
    }
