"""`kvtier bench write`: sustained writes until they are on disk and confirmed."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from kvtier.cli.bench import fio, options, report
from kvtier.cli.bench.data import Amount, check, keys, open_store
from kvtier.cli.bench.measure import Contender, Meter, Sample, interleave, rows
from kvtier.cli.bench.place import open_place
from kvtier.cli.bench.stores import engines, wait_until_populated
from kvtier.config import MIB
from kvtier.errors import TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    import kvtier

_COLUMNS = {"gb_s": "GB/s", "fraction_of_fio": "of fio", "cpu_s_per_gb": "CPU s/GB"}
_PUT_BYTES = 64 * MIB
_PUTS_IN_FLIGHT = 2  # per device
_TIMEOUT = 600.0


def write(
    *,
    path: options.Paths = None,
    device: options.Device = None,
    gib: options.Gib = 1.0,
    chunk_mib: options.ChunkMib = 2.0,
    engine: options.Engines = None,
    rounds: options.Rounds = 5,
    seed: options.Seed = 0,
    json: options.Json = None,
) -> None:
    """Put chunks until they are on disk, then flush; against fio's random writes with a sync at the end.

    Both overwrite space that was written before. The first round is discarded; figures are medians,
    and fractions medians of each round's ratio. GB are 10**9 bytes. The device holds what is written
    twice, memory holds it once.
    """
    amount = Amount.of(gib, chunk_mib)
    options.check(rounds, json)
    names, absent = engines(engine or [])
    with open_place(path or [], device, amount.on_disk) as place:
        source = amount.memory()
        slabs = Slabs(place.directories, source)
        contenders = [Contender(f"kvtier-{name}", partial(slabs.write, name)) for name in names]
        if obstacle := fio.obstacle(amount.chunks, len(place.directories)):
            absent["fio"] = obstacle
        else:
            files = _Files(place.directories, source)
            candidates = list(fio.ways(amount.chunk_bytes, amount.chunks // len(place.directories)))
            with report.progress(fio.passes(candidates)) as step:
                best, _ = fio.best(candidates, files.write, step)
            contenders.insert(0, Contender("fio", partial(files.write, best), f"{best}; overwrites files"))
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
    """A store over all directories, filled again with every pass, under new keys."""

    def __init__(self, directories: Sequence[Path], source: npt.NDArray[np.uint8]) -> None:
        self._paths = [directory / "slab" for directory in directories]
        self._amount = Amount(*source.shape)
        self._source = source
        self._numbers = itertools.count()
        self._stored: list[kvtier.ChunkKey] = []

    def write(self, engine: str) -> Sample:
        """One pass: everything put and flushed, in batches, two of them in flight per device."""
        amount = self._amount
        capacity = amount.capacity(len(self._paths))
        settings = {"capacity": capacity, "dram": amount.staging(), "engine": engine, **amount.settings()}
        with open_store(self._paths, **settings) as store:
            store.delete(self._stored).result()
            store.flush().result()
            wait_until_populated(store)
            self._stored = keys(amount.chunks, f"pass {next(self._numbers)}")
            with Meter(None, amount.nbytes) as meter:
                self._put(store)
                flushed = store.flush().result()
        if flushed.failed or not flushed.synced:
            raise TierUnavailable("the device did not confirm what was written")
        return meter.sample()

    def _put(self, store: kvtier.Store) -> None:
        step = max(1, _PUT_BYTES // self._amount.chunk_bytes)
        running: deque[kvtier.Transfer[kvtier.BatchResult]] = deque()
        for start in range(0, self._amount.chunks, step):
            if len(running) >= _PUTS_IN_FLIGHT * len(self._paths):
                check(running.popleft().result(), "a put failed")
            chunks = slice(start, start + step)
            put = store.put(self._stored[chunks], self._source[chunks], until="disk", timeout=_TIMEOUT)
            running.append(put)
        for transfer in running:
            check(transfer.result(), "a put failed")
