"""`kvtier replay TRACE...`: the command."""

from __future__ import annotations

import math
from pathlib import Path  # noqa: TC003  the command line reads the types
from typing import Annotated, Any

from cyclopts import Parameter

from kvtier.cli.bench import options, report
from kvtier.config import AdmissionName, PolicyName  # noqa: TC001
from kvtier.errors import InvalidRequest
from kvtier.replay import bounds, formats
from kvtier.replay.run import bound, replay
from kvtier.replay.trace import Trace  # noqa: TC001

VERSION = 1
_PERCENT = (0.5, 1.0, 2.5, 5.0, 10.0, 25.0)
_COLUMNS = {
    "chunks": "chunks", "percent": "%", "hit": "hit %", "dram": "DRAM %", "to_bound": "best %",
    "writes": "writes", "orphans": "orphans", "evicted": "evicted", "rate": "refs/s",
}  # fmt: skip
_NOTES = (
    "hit %: of all references; best %: of what belady hits; writes: to the lowest tier, for each "
    "distinct chunk; orphans: references to chunks behind one that was missing; refs/s: by CPU time",
)


def command(
    *traces: Path,
    policy: Annotated[
        tuple[PolicyName, ...], Parameter(negative="", help="Who leaves; repeat it for several.")
    ] = ("lru", "s3fifo", "reuse"),
    capacity_chunks: Annotated[
        tuple[int, ...], Parameter(negative="", help="Chunks that the tier holds; repeat it for several.")
    ] = (),
    capacity_percent: Annotated[
        tuple[float, ...],
        Parameter(negative="", help="The same in percent of the distinct chunks of the whole trace."),
    ] = (),
    dram_chunks: Annotated[int, Parameter(help="Chunks of a DRAM tier above it; 0: none.")] = 0,
    dram_percent: Annotated[float, Parameter(help="The same in percent of the capacity below.")] = 0.0,
    dram_policy: Annotated[PolicyName, Parameter(help="Who leaves DRAM.")] = "lru",
    admission: Annotated[AdmissionName, Parameter(help="What gets into the lowest tier.")] = "always",
    warm: Annotated[
        float, Parameter(help="Share of the requests, from the first, that fill the tiers and do not count.")
    ] = 0.0,
    chunk_bytes: Annotated[int, Parameter(help="Bytes of a chunk; 1 leaves figures in chunks.")] = 1,
    seed: Annotated[int, Parameter(help="Draws when agent sessions start.")] = 0,
    group: Annotated[int, Parameter(help="Ids of an agent session that make a chunk.")] = formats.GROUP,
    belady: Annotated[bool, Parameter(help="Compute the bound that knows the future, too.")] = True,
    json: options.Json = None,
    plot: options.Plot = None,
) -> None:
    """Play request traces through the tiers' own indexes and policies, without payloads.

    TRACE is a file of Mooncake's format, of an agent session, or of Store.record, plain or gzipped, or a
    folder of such files. A chunk is a hit while all chunks before it in its request are there, too.
    """
    options.check(1, json, plot)
    _check(traces, capacity_chunks, capacity_percent, dram_chunks, dram_percent, warm, chunk_bytes, group)
    found = formats.read(traces, seed=seed, group=group)
    rows: list[dict[str, Any]] = []
    summaries = []
    sizes = {trace.name: _sizes(trace, capacity_chunks, capacity_percent) for trace in found}
    runs = sum(len(sizes[trace.name]) * (len(policy) + belady) + 2 for trace in found)
    with report.progress(runs) as step:
        for trace in found:
            step(f"{trace.name}: keys")
            keys = trace.keys()
            own = []
            for chunks in sizes[trace.name]:
                for name in policy:
                    step(f"{trace.name}: {name}, {chunks} chunks")
                    own.append(
                        replay(
                            trace, keys, name, chunks, dram_policy=dram_policy, admission=admission,
                            warm=warm, dram_chunks=dram_chunks or round(chunks * dram_percent / 100),
                            chunk_bytes=chunk_bytes,
                        )
                    )  # fmt: skip
                if belady:
                    step(f"{trace.name}: belady, {chunks} chunks")
                    own.append(bound(trace, "belady", chunks, warm))
            own.append(bound(trace, "infinite", trace.unique, warm))
            step(f"{trace.name}: reuse distances")
            summaries.append(_summary(trace, own[-1]["hit_rate"]))
            rows += own
    for summary in summaries:
        _show(summary, [row for row in rows if row["trace"] == summary["trace"]])
    report.write_json(json, "memory", {
        "version": VERSION, "warm": warm, "chunk_bytes": chunk_bytes, "traces": summaries, "rows": rows,
    })  # fmt: skip
    if plot is not None:
        from kvtier.cli.replay import matplotlib

        matplotlib.draw(plot, summaries, rows)


def _check(
    traces: tuple[Path, ...],
    chunks: tuple[int, ...],
    percent: tuple[float, ...],
    dram_chunks: int,
    dram_percent: float,
    warm: float,
    chunk_bytes: int,
    group: int,
) -> None:
    """Raise InvalidRequest for an option out of its range."""
    if not traces:
        raise InvalidRequest("replay got no trace: give a file, or a folder of files")
    for name, values, least, most in (
        ("--capacity-chunks", chunks, 1, math.inf),
        ("--capacity-percent", percent, 1e-9, 100),
        ("--dram-chunks", (dram_chunks,), 0, math.inf),
        ("--dram-percent", (dram_percent,), 0, 100),
        ("--warm", (warm,), 0, 0.99),
        ("--chunk-bytes", (chunk_bytes,), 1, math.inf),
        ("--group", (group,), 1, math.inf),
    ):
        for value in values:
            if not least <= value <= most:
                limits = f"of at least {least:g}" + ("" if most == math.inf else f", at most {most:g}")
                raise InvalidRequest(f"{name} is {value}, needs a number {limits}")
    if dram_chunks and dram_percent:
        raise InvalidRequest("--dram-chunks and --dram-percent say the same: leave one of them out")


def _sizes(trace: Trace, chunks: tuple[int, ...], percent: tuple[float, ...]) -> list[int]:
    shares = percent or (() if chunks else _PERCENT)
    return sorted({*chunks, *(max(1, int(trace.unique * share / 100)) for share in shares)})


def _summary(trace: Trace, infinite: float) -> dict[str, Any]:
    distances = bounds.reuse_distances(trace)
    return {
        "trace": trace.name,
        "requests": len(trace.requests),
        "references": trace.references,
        "unique_chunks": trace.unique,
        "seconds": trace.times[-1] - trace.times[0],
        "infinite_hit_rate": infinite,
        "reuse_distance": bounds.histogram(distances, trace.references),
    }


def _show(summary: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    best = {row["capacity_chunks"]: row["hit_rate"] for row in rows if row["policy"] == "belady"}
    has_dram = any(row.get("dram_chunks") for row in rows)
    reuse = ", ".join(
        f"{bucket['up_to']:,} {bucket['share']:.1%}"
        for bucket in summary["reuse_distance"]
        if bucket["share"] >= 0.005
    )
    report.show(
        f"{summary['trace']}: {summary['requests']:,} requests, {summary['references']:,} references to "
        f"{summary['unique_chunks']:,} chunks",
        [_line(row, best.get(row["capacity_chunks"], 0.0)) for row in rows],
        {name: heading for name, heading in _COLUMNS.items() if has_dram or name != "dram"},
        notes=(
            *_NOTES,
            f"distinct chunks since the last use, up to, and their share of all references: {reuse}",
        ),
    )


def _line(row: dict[str, Any], best: float) -> dict[str, Any]:
    line = {
        "name": row["policy"], "chunks": row["capacity_chunks"],
        "percent": f"{row['capacity_percent']:.3g}", "hit": f"{100 * row['hit_rate']:.2f}",
    }  # fmt: skip
    if "references" not in row:
        return line
    return line | {
        "dram": f"{100 * row['hit_rate_dram']:.2f}" if row["dram_chunks"] else None,
        "to_bound": f"{100 * row['hit_rate'] / best:.0f}" if best else None,
        "writes": f"{row['write_amplification']:.2f}",
        "orphans": row["orphans"],
        "evicted": row["evictions_disk"],
        "rate": f"{row['references_per_s'] / 1e3:,.0f}k",
    }
