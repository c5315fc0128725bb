"""`kvtier bench read`: cold reads of the same bytes in every way, side by side."""

from __future__ import annotations

import dataclasses
import statistics
import time
from pathlib import Path  # noqa: TC003  the command line reads the types
from typing import TYPE_CHECKING, Annotated

import numpy as np
import xxhash
from cyclopts import Parameter

from kvtier import _native
from kvtier.cli.bench import files, fio, report
from kvtier.cli.bench.data import Amount, Data
from kvtier.cli.bench.measure import Contender, Meter, Sample, check_rounds, interleave, rows
from kvtier.cli.bench.place import open_place
from kvtier.cli.bench.stores import EngineName, StoreReads, engines
from kvtier.config import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kvtier.cli.bench.place import Place

_COLUMNS = {
    "gb_s": "GB/s", "fraction_of_fio": "of fio", "times_serial": "x serial", "cpu_s_per_gb": "CPU s/GB",
    "p50_ms": "p50 ms", "p99_ms": "p99 ms", "cold": "cold",
}  # fmt: skip


def read(
    *,
    path: Annotated[list[Path] | None, Parameter(negative="")] = None,
    device: str | None = None,
    gib: float = 1.0,
    chunk_mib: float = 2.0,
    engine: Annotated[list[EngineName] | None, Parameter(negative="")] = None,
    rounds: int = 5,
    seed: int = 0,
    json: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Read the same bytes cold: with fio, file by file, on 32 threads, in aiofiles, and through kvtier.

    Every round runs all of them once, in an order of its own, and the first is discarded. Figures are
    medians, and fractions medians of each round's ratio. GB are 10**9 bytes.

    Parameters
    ----------
    path
        Directory on the device to measure; repeat it for several devices. Default: a temporary one.
    device
        Profile of an emulated device to mount for this run, such as nvmeof-4.
    gib
        GiB per pass. The device holds it twice, memory twice.
    chunk_mib
        MiB per chunk.
    engine
        kvtier's engines to measure; repeat it for several. Default: all.
    rounds
        Rounds that count.
    seed
        Draws the order of each round.
    json
        File to write the figures to.
    plot
        PNG to draw: bandwidth, CPU, and fio's bandwidth against bytes in flight. Needs matplotlib.
    """
    amount = Amount.of(gib, chunk_mib)
    check_rounds(rounds)
    report.check_outputs(json, plot)
    names, absent = engines(engine or [])
    with open_place(path or [], device, amount.on_disk) as place:
        with report.progress(2 * amount.chunks) as step:
            data = Data(place.directories, amount, lambda: step("writing the chunks"))
        memory = amount.memory()
        contenders, probed, missing = _contenders(data, memory, place, names)
        absent |= missing
        checksum = _Checksum(memory)
        with report.progress((rounds + 1) * len(contenders)) as step:
            samples = interleave(contenders, rounds, seed, checksum.between(step))
    found = [dataclasses.asdict(row) for row in rows(contenders, samples)]
    cost = checksum.cpu_s_per_gb()
    title = f"cold reads, {gib:g} GiB in chunks of {chunk_mib:g} MiB, {place.description}"
    report.show(title, found, _COLUMNS, absent, [f"checksum alone: {cost:.3f} CPU s/GB"])
    figures = {
        "gib": gib, "chunk_mib": chunk_mib, "rounds": rounds, "seed": seed,
        "checksum_cpu_s_per_gb": cost, "rows": found, "absent": absent,
        "fio_probe": [{**dataclasses.asdict(way), "gb_s": gb_s} for way, gb_s in probed.items()],
    }  # fmt: skip
    report.write_json(json, place.description, figures)
    if plot is not None:
        from kvtier.cli.bench.matplotlib import draw

        draw(plot, title, figures)


def _contenders(
    data: Data, memory: npt.NDArray[np.uint8], place: Place, names: list[str]
) -> tuple[list[Contender], dict[fio.Way, float], dict[str, str]]:
    """The rows, GB/s of the ways of fio that were tried, and why a row is absent."""
    contenders, absent = files.contenders(data, memory, place.counter)
    probed: dict[fio.Way, float] = {}
    if fio.is_installed():
        candidates = list(fio.ways(data.amount.chunk_bytes, len(data.shares[-1])))
        with report.progress(fio.passes(candidates)) as step:
            best, probed = fio.best(candidates, lambda way: _fio(data, place, way), step)
        detail = f"{best}; latencies per request"
        contenders.insert(0, Contender("fio", lambda: _fio(data, place, best), detail))
    else:
        absent["fio"] = fio.MISSING
    for leased in (False, True):
        for name in names:
            reads = StoreReads(data, memory, place.counter, engine=name, leased=leased)
            contenders.append(reads.contender())
    return contenders, probed, absent


def _fio(data: Data, place: Place, way: fio.Way) -> Sample:
    """fio over the files of the chunks. Wall and CPU seconds are its own, coldness is ours."""
    data.drop_caches()
    folders = [directory / "files" for directory in data.directories]
    jobs = fio.split(folders, [[str(i) for i in share] for share in data.shares], way)
    with Meter(place.counter, data.amount.nbytes) as meter:
        sample = fio.run("read", way, jobs)
    if sample.nbytes != data.amount.nbytes:
        raise AssertionError(f"fio ({way}) read {sample.nbytes} bytes, not {data.amount.nbytes}")
    return dataclasses.replace(sample, cold=meter.cold)


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
