"""`kvtier bench mixed`: how long paced reads take, alone and beside writes as fast as they go."""

from __future__ import annotations

import random
import statistics
from contextlib import ExitStack, contextmanager
from pathlib import Path  # noqa: TC003  the command line reads the types
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

import kvtier
from kvtier.cli.bench import report
from kvtier.cli.bench.data import Amount, Data
from kvtier.cli.bench.load import Paced, WriteLoad, paced_reads
from kvtier.cli.bench.measure import check_rounds, percentile_ms
from kvtier.cli.bench.place import open_place
from kvtier.cli.bench.stores import StoreReads, wait_until_populated
from kvtier.config import MIB
from kvtier.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

_COLUMNS = {"gb_s": "reads GB/s", "write_gb_s": "writes GB/s", "p50_ms": "p50 ms", "p99_ms": "p99 ms"}
_NAMES = ("reads", "reads-under-writes")
_WRITE_ROOM = 512 * MIB  # per directory: what the writes go round in


def mixed(
    *,
    path: Annotated[list[Path] | None, Parameter(negative="")] = None,
    device: str | None = None,
    gib: float = 1.0,
    chunk_mib: float = 2.0,
    engine: Literal["auto", "uring", "threads"] = "auto",
    fraction: float = 0.5,
    seconds: float = 5.0,
    rounds: int = 5,
    seed: int = 0,
    json: Path | None = None,
) -> None:
    """Read a chunk every so often into lent memory, without and with a saturating load of puts.

    The pace is a fraction of the bandwidth at which the same store reads alone. A latency counts from
    the instant at which its read was due. The first round is discarded.

    Parameters
    ----------
    path
        Directory on the device to measure; repeat it for several devices. Default: a temporary one.
    device
        Profile of an emulated device to mount for this run, such as nvmeof-4.
    gib
        GiB to read from. The device holds it twice, memory once.
    chunk_mib
        MiB per chunk.
    engine
        I/O engine.
    fraction
        The pace, as a fraction of the bandwidth.
    seconds
        Seconds of reads, per round and kind.
    rounds
        Rounds that count.
    seed
        Draws the order of rounds and reads.
    json
        File to write the figures to.
    """
    amount = Amount.of(gib, chunk_mib)
    check_rounds(rounds)
    if not 0 < fraction <= 1 or not seconds > 0:
        raise InvalidRequest("--fraction needs to be above 0 and at most 1, --seconds above 0")
    report.check_outputs(json)
    with open_place(path or [], device, lambda parts: amount.on_disk(parts) + _WRITE_ROOM) as place:
        with report.progress(2 * amount.chunks) as step:
            data = Data(place.directories, amount, lambda: step("writing the chunks"))
        memory = amount.memory()
        reads = StoreReads(data, memory, place.counter, engine=engine, leased=False)
        bandwidth = statistics.median([reads.run().gb_s for _ in range(3)])
        interval = amount.chunk_bytes / 1e9 / (fraction * bandwidth)
        draw = random.Random(seed)
        phases: dict[str, list[Paced]] = {name: [] for name in _NAMES}
        with _open(data, engine) as stores, report.progress(2 * (rounds + 1)) as step:
            for number in range(rounds + 1):
                for name in draw.sample(_NAMES, 2):
                    step(name)
                    with WriteLoad(stores if name == _NAMES[1] else [], amount) as load:
                        phase = paced_reads(stores, data, memory, interval, seconds, draw, load)
                    if number:
                        phases[name].append(phase)
    settings = {"gib": gib, "chunk_mib": chunk_mib, "engine": engine, "fraction": fraction,
                "seconds": seconds, "rounds": rounds, "seed": seed}  # fmt: skip
    _report(phases, bandwidth, place.description, settings, json)


@contextmanager
def _open(data: Data, engine: str) -> Iterator[list[kvtier.Store]]:
    """The stores, with room to write beside what is read, which is kept from eviction."""
    amount, parts = data.amount, len(data.directories)
    with ExitStack() as stack:
        stores = []
        for part in range(parts):
            capacity = amount.capacity(parts) + _WRITE_ROOM
            settings = {"capacity": capacity, "dram": amount.staging(), "engine": engine, **amount.settings()}
            store = stack.enter_context(kvtier.open(data.slab(part), **settings))
            stack.enter_context(store.pin([data.keys[i] for i in data.shares[part]]))
            wait_until_populated(store)
            stores.append(store)
        yield stores


def _report(
    phases: dict[str, list[Paced]],
    bandwidth: float,
    where: str,
    settings: dict[str, Any],
    json: Path | None,
) -> None:
    found = [_row(name, phases[name]) for name in _NAMES]
    ratios = [
        loaded.percentile_ms(99) / alone.percentile_ms(99)
        for alone, loaded in zip(*(phases[name] for name in _NAMES), strict=True)
    ]
    ratio = statistics.median(ratios)
    note = (
        f"reads alone reach {bandwidth:.2f} GB/s and were paced at {settings['fraction']:g} of it; "
        f"writes raise their p99 {ratio:.2f} times"
    )
    report.show(f"mixed, chunks of {settings['chunk_mib']:g} MiB, {where}", found, _COLUMNS, None, [note])
    figures = {**settings, "bandwidth_gb_s": bandwidth, "p99_ratio": ratio, "rows": found}
    report.write_json(json, where, figures)


def _row(name: str, phases: list[Paced]) -> dict[str, Any]:
    latencies = [latency for phase in phases for latency in phase.latencies_s]
    return {
        "name": name,
        "gb_s": statistics.median(phase.read_gb_s for phase in phases),
        "write_gb_s": statistics.median(phase.write_gb_s for phase in phases),
        "p50_ms": percentile_ms(latencies, 50),
        "p99_ms": percentile_ms(latencies, 99),
    }
