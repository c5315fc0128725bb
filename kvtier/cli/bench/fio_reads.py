"""fio over the files of the chunks, in the best way it has there."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kvtier.cli.bench import fio, report
from kvtier.cli.bench.measure import Contender, Meter

if TYPE_CHECKING:
    from kvtier.cli.bench.data import Data
    from kvtier.cli.bench.measure import Sample
    from kvtier.cli.bench.place import ReadCounter


def contender(data: Data, counter: ReadCounter, name: str = "fio") -> tuple[Contender, dict[fio.Way, float]]:
    """The row, and GB/s of all the ways that were tried for it."""

    def run(way: fio.Way) -> Sample:
        """One pass. Wall and CPU seconds are fio's own, coldness is ours."""
        data.drop_caches()
        folders = [directory / "files" for directory in data.directories]
        jobs = fio.split(folders, [[str(i) for i in share] for share in data.shares], way)
        with Meter(counter, data.amount.nbytes) as meter:
            sample = fio.run("read", way, jobs)
        if sample.nbytes != data.amount.nbytes:
            raise AssertionError(f"fio ({way}) read {sample.nbytes} bytes, not {data.amount.nbytes}")
        return dataclasses.replace(sample, cold=meter.cold)

    candidates = list(fio.ways(data.amount.chunk_bytes, len(data.shares[-1])))
    with report.progress(fio.passes(candidates)) as step:
        best, probed = fio.best(candidates, run, step)
    return Contender(name, lambda: run(best), f"{best}; latencies per request"), probed
