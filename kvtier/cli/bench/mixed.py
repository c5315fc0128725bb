"""`kvtier bench mixed`: how long paced reads take, alone and beside writes as fast as they go."""

from __future__ import annotations

import random
import statistics
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from kvtier.cli.bench import options, report
from kvtier.cli.bench.data import Amount, Data, open_store
from kvtier.cli.bench.load import Paced, WriteLoad, paced_reads
from kvtier.cli.bench.measure import percentile_ms
from kvtier.cli.bench.place import open_place
from kvtier.cli.bench.stores import StoreReads, wait_until_populated
from kvtier.config import MIB
from kvtier.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import kvtier
    from kvtier.cli.bench.place import ReadCounter

_COLUMNS = {"gb_s": "reads GB/s", "write_gb_s": "writes GB/s", "p50_ms": "p50 ms", "p99_ms": "p99 ms"}
_NAMES = ("reads", "reads-under-writes")
_WRITE_ROOM = 512 * MIB  # per device: what the writes go round in


def mixed(
    *,
    path: options.Paths = None,
    device: options.Device = None,
    gib: Annotated[float, Parameter(help="GiB to read from.")] = 1.0,
    chunk_mib: options.ChunkMib = 2.0,
    engine: Annotated[Literal["auto", "uring", "threads"], Parameter(help="I/O engine.")] = "auto",
    fraction: Annotated[float, Parameter(help="The pace, as a fraction of the bandwidth.")] = 0.5,
    seconds: Annotated[float, Parameter(help="Seconds of reads, per round and kind.")] = 5.0,
    rounds: options.Rounds = 5,
    seed: options.Seed = 0,
    json: options.Json = None,
) -> None:
    """Read a chunk every so often into lent memory, without and with a saturating load of puts.

    The pace is a fraction of the bandwidth at which the same store reads alone. A latency counts from
    the instant at which its read was due. The first round is discarded. The device holds what is
    read twice, memory holds it once.
    """
    amount = Amount.of(gib, chunk_mib)
    options.check(rounds, json)
    if not 0 < fraction <= 1 or not seconds > 0:
        raise InvalidRequest("--fraction needs to be above 0 and at most 1, --seconds above 0")
    with open_place(path or [], device, partial(room, amount)) as place:
        with report.progress(2 * amount.chunks) as step:
            data = Data(place.directories, amount, lambda: step("writing the chunks"))
        with report.progress(2 * (rounds + 1)) as step:
            figures = measure(data, place.counter, step, engine=engine, fraction=fraction, seconds=seconds,
                              rounds=rounds, seed=seed)  # fmt: skip
    note = (
        f"reads alone reach {figures['bandwidth_gb_s']:.2f} GB/s and were paced at {fraction:g} of it; "
        f"writes raise their p99 {figures['p99_ratio']:.2f} times"
    )
    title = f"mixed, chunks of {chunk_mib:g} MiB, {place.description}"
    report.show(title, figures["rows"], _COLUMNS, None, [note])
    settings = {"gib": gib, "chunk_mib": chunk_mib, "engine": engine, "fraction": fraction,
                "seconds": seconds, "rounds": rounds, "seed": seed}  # fmt: skip
    report.write_json(json, place.description, {**settings, **figures})


def room(amount: Amount, parts: int) -> int:
    """Bytes that it takes on each of `parts` devices."""
    return amount.on_disk(parts) + _WRITE_ROOM


def measure(
    data: Data,
    counter: ReadCounter,
    step: Callable[[str], object],
    *,
    engine: str,
    fraction: float,
    seconds: float,
    rounds: int,
    seed: int,
) -> dict[str, Any]:
    """Both kinds of phases, and how much writes raise the p99; `step` is told of each of `rounds` + 1."""
    amount, devices = data.amount, len(data.slabs)
    memory = amount.memory()
    reads = StoreReads(data, memory, counter, engine=engine, leased=False)
    bandwidth = statistics.median([reads.run().gb_s for _ in range(3)])
    interval = amount.chunk_bytes / 1e9 / (fraction * bandwidth)
    draw = random.Random(seed)
    phases: dict[str, list[Paced]] = {name: [] for name in _NAMES}
    with _open(data, engine) as store:
        for number in range(rounds + 1):
            for name in draw.sample(_NAMES, 2):
                step(name)
                written = store if name == _NAMES[1] else None
                with WriteLoad(written, amount, devices) as load:
                    phase = paced_reads(store, data, memory, interval, seconds, draw, load)
                if number:
                    phases[name].append(phase)
    pairs = zip(*(phases[name] for name in _NAMES), strict=True)
    ratio = statistics.median(loaded.percentile_ms(99) / alone.percentile_ms(99) for alone, loaded in pairs)
    rows = [_row(name, phases[name]) for name in _NAMES]
    return {"bandwidth_gb_s": bandwidth, "p99_ratio": ratio, "rows": rows}


@contextmanager
def _open(data: Data, engine: str) -> Iterator[kvtier.Store]:
    """The store, with room to write beside what is read, which is kept from eviction."""
    amount, devices = data.amount, len(data.slabs)
    capacity = amount.capacity(devices) + devices * _WRITE_ROOM
    settings = {"capacity": capacity, "dram": amount.staging(), "engine": engine, **amount.settings()}
    with open_store(data.slabs, **settings) as store, store.pin(data.keys):
        wait_until_populated(store)
        yield store


def _row(name: str, phases: list[Paced]) -> dict[str, Any]:
    latencies = [latency for phase in phases for latency in phase.latencies_s]
    return {
        "name": name,
        "gb_s": statistics.median(phase.read_gb_s for phase in phases),
        "write_gb_s": statistics.median(phase.write_gb_s for phase in phases),
        "p50_ms": percentile_ms(latencies, 50),
        "p99_ms": percentile_ms(latencies, 99),
    }
