"""`kvtier bench read`: cold reads of the same bytes in every way, side by side."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import xxhash
from cyclopts import Parameter

from kvtier import _native
from kvtier.cli.bench import files, fio, fio_reads, options, report
from kvtier.cli.bench.data import Amount, Data
from kvtier.cli.bench.measure import Contender, interleave, rows
from kvtier.cli.bench.place import open_place
from kvtier.cli.bench.stores import StoreReads, engines
from kvtier.cli.bench.unchecked import UncheckedReads
from kvtier.config import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kvtier.cli.bench.place import Place

_COLUMNS = {
    "gb_s": "GB/s", "fraction_of_fio": "of fio", "times_serial": "x serial", "cpu_s_per_gb": "CPU s/GB",
    "p50_ms": "p50 ms", "p99_ms": "p99 ms", "cold": "cold",
}  # fmt: skip
_LARGEST_WINDOW = 64 * MIB


def read(
    *,
    path: options.Paths = None,
    device: options.Device = None,
    gib: options.Gib = 1.0,
    chunk_mib: Annotated[
        tuple[float, ...],
        Parameter(negative="", help="MiB per chunk; repeat it for several, measured one after another."),
    ] = (2.0,),
    engine: options.Engines = None,
    rounds: options.Rounds = 5,
    seed: options.Seed = 0,
    json: options.Json = None,
    plot: options.Plot = None,
) -> None:
    """Read the same bytes cold: with fio, file by file, on 32 threads, in aiofiles, and through kvtier.

    Every round runs all of them once, in an order of its own, and the first is discarded. Figures are
    medians, and fractions medians of each round's ratio. GB are 10**9 bytes. The device holds what is read
    twice, memory holds it twice. With --plot other chunk sizes are measured too if just one is given, and
    kvtier's reads with other amounts in flight.
    """
    options.check(rounds, json, plot)
    sizes = list(dict.fromkeys(chunk_mib))
    if plot is not None and len(sizes) == 1:
        sizes += [factor * sizes[0] for factor in (0.25, 4.0)]
    amounts = [Amount.of(gib, mib) for mib in sizes]
    names, absent = engines(engine or [])
    runs: list[dict[str, Any]] = []
    for mib, amount in zip(sizes, amounts, strict=True):
        with open_place(path or [], device, amount.on_disk) as place:
            run = _measure(amount, place, names, rounds, seed, in_flight=plot is not None and not runs)
        run["absent"] |= absent
        title = f"cold reads, {gib:g} GiB in chunks of {mib:g} MiB, {place.description}"
        note = f"checksum alone: {run['checksum_cpu_s_per_gb']:.3f} CPU s/GB"
        report.show(title, run["rows"], _COLUMNS, run["absent"], [note])
        runs.append({"chunk_mib": mib, **run})
    by_size = [{"chunk_mib": run["chunk_mib"], "rows": run["rows"]} for run in runs]
    figures = {"gib": gib, "rounds": rounds, "seed": seed, **runs[0], "chunk_sizes": by_size}
    report.write_json(json, place.description, figures)
    if plot is not None:
        from kvtier.cli.bench.matplotlib import draw

        draw(plot, f"cold reads, {gib:g} GiB, {place.description}", figures)


def _measure(
    amount: Amount, place: Place, names: list[str], rounds: int, seed: int, *, in_flight: bool
) -> dict[str, Any]:
    """The figures of one chunk size."""
    with report.progress(2 * amount.chunks) as step:
        data = Data(place.directories, amount, lambda: step("writing the chunks"))
    memory = amount.memory()
    contenders, probed, absent = _contenders(data, memory, place, names)
    checksum = _Checksum(memory)
    with report.progress((rounds + 1) * len(contenders)) as step:
        samples = interleave(contenders, rounds, seed, checksum.between(step))
    windows: list[dict[str, Any]] = []
    if in_flight and names:
        windows = _in_flight(data, memory, place, names[0], rounds, seed)
    return {
        "checksum_cpu_s_per_gb": checksum.cpu_s_per_gb(),
        "rows": [dataclasses.asdict(row) for row in rows(contenders, samples)],
        "absent": absent,
        "fio_probe": [{**dataclasses.asdict(way), "gb_s": gb_s} for way, gb_s in probed.items()],
        "in_flight": windows,
    }


def _in_flight(
    data: Data, memory: npt.NDArray[np.uint8], place: Place, engine: str, rounds: int, seed: int
) -> list[dict[str, Any]]:
    """GB/s of lent reads through one engine, for window sizes from a chunk to 64 MiB."""
    passes = {}
    window = data.amount.chunk_bytes
    while window <= _LARGEST_WINDOW:
        reads = StoreReads(data, memory, place.counter, engine=engine, leased=False, io_window=window)
        passes[window] = Contender(f"{window / MIB:g} MiB in flight", reads.bandwidth)
        window *= 2
    with report.progress((rounds + 1) * len(passes)) as step:
        samples = interleave(list(passes.values()), rounds, seed, step)
    return [
        {
            "name": f"kvtier-{engine}",
            "bytes_in_flight": window,
            "gb_s": statistics.median(sample.gb_s for sample in samples[contender.name]),
        }
        for window, contender in passes.items()
    ]


def _contenders(
    data: Data, memory: npt.NDArray[np.uint8], place: Place, names: list[str]
) -> tuple[list[Contender], dict[fio.Way, float], dict[str, str]]:
    """The rows, GB/s of the ways of fio that were tried, and why a row is absent."""
    contenders, absent = files.contenders(data, memory, place.counter)
    probed: dict[fio.Way, float] = {}
    if obstacle := fio.obstacle(data.amount.chunks, len(data.directories)):
        absent["fio"] = obstacle
    else:
        best, probed = fio_reads.contender(data, place.counter)
        contenders.insert(0, best)
    for leased in (False, True):
        for name in names:
            reads = StoreReads(data, memory, place.counter, engine=name, leased=leased)
            contenders.append(reads.contender())
    if "uring" in names:
        contenders.append(UncheckedReads(data, memory, place.counter).contender())
    else:
        absent["kvtier-uring-unchecked"] = "needs the engine uring"
    return contenders, probed, absent


class _Checksum:
    """The checksum alone over the buffers that the passes read into, once per pass."""

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self._memory = memory
        self._figures: list[float] = []

    def between(self, step: Callable[[str], None]) -> Callable[[str], None]:
        """`step`, and a measurement: for the start of each pass."""

        def measured(name: str) -> None:
            step(name)
            self._measure()

        return measured

    def cpu_s_per_gb(self) -> float:
        """The median; the first was over memory that nothing was read into."""
        return statistics.median(self._figures[1:] or self._figures)

    def _measure(self) -> None:
        rows, width = self._memory.shape
        out = np.empty(-(-width // MIB), np.uint64)
        start = time.process_time()
        for row in self._memory:
            if _native.core is not None:
                _native.core.xxh3_parts(row.ctypes.data, width, MIB, 0, out)
            else:
                for part in range(0, width, MIB):
                    xxhash.xxh3_64_intdigest(row[part : part + MIB])
        self._figures.append((time.process_time() - start) / (rows * width) * 1e9)
