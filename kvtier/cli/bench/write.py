"""`kvtier bench write`: sustained writes until they are on disk and confirmed."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from contextlib import ExitStack
from functools import partial
from pathlib import Path  # noqa: TC003  the command line reads the types
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

import kvtier
from kvtier.cli.bench import fio, report
from kvtier.cli.bench.data import Amount, check, keys
from kvtier.cli.bench.measure import Contender, Meter, Sample, check_rounds, interleave, rows
from kvtier.cli.bench.place import open_place
from kvtier.cli.bench.stores import EngineName, engines, wait_until_populated
from kvtier.config import MIB
from kvtier.errors import TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

_COLUMNS = {"gb_s": "GB/s", "fraction_of_fio": "of fio", "cpu_s_per_gb": "CPU s/GB"}
_PUT_BYTES = 64 * MIB
_PUTS_IN_FLIGHT = 2  # per store
_TIMEOUT = 600.0


def write(
    *,
    path: Annotated[list[Path] | None, Parameter(negative="")] = None,
    device: str | None = None,
    gib: float = 1.0,
    chunk_mib: float = 2.0,
    engine: Annotated[list[EngineName] | None, Parameter(negative="")] = None,
    rounds: int = 5,
    seed: int = 0,
    json: Path | None = None,
) -> None:
    """Put chunks until they are on disk, then flush; against fio's random writes with a sync at the end.

    Both overwrite space that was written before. The first round is discarded; figures are medians,
    and fractions medians of each round's ratio. GB are 10**9 bytes.

    Parameters
    ----------
    path
        Directory on the device to measure; repeat it for several devices. Default: a temporary one.
    device
        Profile of an emulated device to mount for this run, such as nvmeof-4.
    gib
        GiB per pass. The device holds it twice, memory once.
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
    """
    amount = Amount.of(gib, chunk_mib)
    check_rounds(rounds)
    report.check_outputs(json)
    names, absent = engines(engine or [])
    with open_place(path or [], device, amount.on_disk) as place:
        source = amount.memory()
        slabs = Slabs(place.directories, source)
        contenders = [Contender(f"kvtier-{name}", partial(slabs.write, name)) for name in names]
        if fio.is_installed():
            files = _Files(place.directories, source)
            candidates = list(fio.ways(amount.chunk_bytes, amount.chunks // len(place.directories)))
            with report.progress(fio.passes(candidates)) as step:
                best, _ = fio.best(candidates, files.write, step)
            contenders.insert(0, Contender("fio", partial(files.write, best), f"{best}; overwrites files"))
        else:
            absent["fio"] = fio.MISSING
        with report.progress((rounds + 1) * len(contenders)) as step:
            samples = interleave(contenders, rounds, seed, step)
    found = [dataclasses.asdict(row) for row in rows(contenders, samples)]
    title = f"sustained writes, {gib:g} GiB in chunks of {chunk_mib:g} MiB, {place.description}"
    report.show(title, found, _COLUMNS, absent)
    figures = {"gib": gib, "chunk_mib": chunk_mib, "rounds": rounds, "seed": seed, "rows": found}
    report.write_json(json, place.description, {**figures, "absent": absent})


class _Files:
    """A file per chunk, for fio to overwrite."""

    def __init__(self, directories: Sequence[Path], source: npt.NDArray[np.uint8]) -> None:
        self._folders = [directory / "files" for directory in directories]
        parts = len(directories)
        self._names = [[str(i) for i in range(part, len(source), parts)] for part in range(parts)]
        for folder, names in zip(self._folders, self._names, strict=True):
            folder.mkdir()
            for name in names:
                (folder / name).write_bytes(source[int(name)].data)

    def write(self, way: fio.Way) -> Sample:
        """One pass."""
        return fio.run("randwrite", way, fio.split(self._folders, self._names, way))


class Slabs:
    """A store per directory, filled again with every pass, under new keys."""

    def __init__(self, directories: Sequence[Path], source: npt.NDArray[np.uint8]) -> None:
        self._paths = [directory / "slab" for directory in directories]
        self._amount = Amount(*source.shape)
        self._source = source
        self._numbers = itertools.count()
        self._stored: list[kvtier.ChunkKey] = []

    def write(self, engine: str) -> Sample:
        """One pass: everything put and flushed, in batches, two of them in flight per store."""
        amount = self._amount
        with ExitStack() as stack:
            stores = []
            for path in self._paths:
                capacity = amount.capacity(len(self._paths))
                settings = {
                    "capacity": capacity,
                    "dram": amount.staging(),
                    "engine": engine,
                    **amount.settings(),
                }
                stores.append(stack.enter_context(kvtier.open(path, **settings)))
                stores[-1].delete(self._stored).result()
                stores[-1].flush().result()
                wait_until_populated(stores[-1])
            self._stored = keys(amount.chunks, f"pass {next(self._numbers)}")
            with Meter(None, amount.nbytes) as meter:
                self._put(stores)
                flushed = [store.flush().result() for store in stores]
        if not all(result.synced and not result.failed for result in flushed):
            raise TierUnavailable("the device did not confirm what was written")
        return meter.sample()

    def _put(self, stores: Sequence[kvtier.Store]) -> None:
        step = max(1, _PUT_BYTES // self._amount.chunk_bytes)
        running: deque[kvtier.Transfer[kvtier.BatchResult]] = deque()
        for start in range(0, self._amount.chunks, step * len(stores)):
            for part, store in enumerate(stores):
                stop = min(start + step * len(stores), self._amount.chunks)
                chunks = range(start + part, stop, len(stores))
                if not chunks:
                    continue
                if len(running) >= _PUTS_IN_FLIGHT * len(stores):
                    check(running.popleft().result(), "a put failed")
                some, source = [self._stored[i] for i in chunks], [self._source[i] for i in chunks]
                running.append(store.put(some, source, until="disk", timeout=_TIMEOUT))
        for transfer in running:
            check(transfer.result(), "a put failed")
