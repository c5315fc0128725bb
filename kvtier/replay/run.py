"""A replay of one trace: every policy at every size, as rows of figures."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvtier.replay import bounds
from kvtier.replay.tiers import Tiers

if TYPE_CHECKING:
    from kvtier.config import AdmissionName, PolicyName
    from kvtier.replay.trace import Trace


def replay(
    trace: Trace,
    keys: list[bytes],
    policy: PolicyName,
    chunks: int,
    *,
    dram_chunks: int = 0,
    dram_policy: PolicyName = "lru",
    admission: AdmissionName = "always",
    warm: float = 0.0,
    chunk_bytes: int = 1,
) -> dict[str, Any]:
    """Play `trace`, whose chunks have `keys`, through a tier of `chunks`, below `dram_chunks` of DRAM.

    The first `warm` of the requests fill the tiers and are not counted. Bytes are of chunks of
    `chunk_bytes`.
    """
    tiers = Tiers(chunks, policy, dram_chunks=dram_chunks, dram_policy=dram_policy, admission=admission)
    first = trace.first_counted(warm)
    key = keys.__getitem__
    named = [list(map(key, request)) for request in trace.requests]
    before = tiers.counts()
    start = time.process_time()
    for number, request in enumerate(named):
        if number == first:
            before = tiers.counts()
        tiers.serve(trace.times[number], request)
    seconds = time.process_time() - start
    counts = tiers.counts().minus(before)
    references = max(1, counts.references)
    new = len({chunk for request in trace.requests[first:] for chunk in request})
    hits = counts.hits_dram + counts.hits_disk
    return {
        "trace": trace.name,
        "policy": policy,
        "capacity_chunks": chunks,
        "capacity_percent": 100 * chunks / trace.unique,
        "dram_chunks": dram_chunks,
        "dram_policy": dram_policy if dram_chunks else None,
        "admission": admission,
        "hit_rate": hits / references,
        "hit_rate_dram": counts.hits_dram / references,
        "hit_rate_disk": counts.hits_disk / references,
        "references": counts.references,
        "hits": hits,
        "bytes_read_dram": counts.hits_dram * chunk_bytes,
        "bytes_read_disk": counts.hits_disk * chunk_bytes,
        "bytes_written_dram": counts.written_dram * chunk_bytes,
        "bytes_written_disk": counts.written_disk * chunk_bytes,
        "write_amplification": counts.written_disk / max(1, new),
        "writes_per_reference": counts.written_disk / references,
        "orphans": counts.orphans,
        "orphan_rate": counts.orphans / references,
        "evictions_dram": counts.evicted_dram,
        "evictions_disk": counts.evicted_disk,
        "not_admitted": counts.refused,
        "references_per_s": trace.references / max(seconds, 1e-9),
    }


def bound(trace: Trace, name: str, chunks: int, warm: float = 0.0) -> dict[str, Any]:
    """The row of a bound: `belady` at a size, or `infinite`."""
    rate = bounds.infinite(trace, warm) if name == "infinite" else bounds.belady(trace, chunks, warm)
    return {
        "trace": trace.name,
        "policy": name,
        "capacity_chunks": chunks,
        "capacity_percent": 100 * chunks / trace.unique,
        "hit_rate": rate,
    }
