"""`kvtier bench copy`: hits in DRAM into the caller's memory, against the best copy loop there is."""

from __future__ import annotations

import ctypes
import dataclasses
import statistics
from contextlib import ExitStack
from pathlib import Path  # noqa: TC003  the command line reads the types
from typing import TYPE_CHECKING, Any

import numpy as np

import kvtier
from kvtier import _native
from kvtier.cli.bench import report
from kvtier.cli.bench.data import Amount, check, keys
from kvtier.cli.bench.measure import Contender, Meter, Sample, check_rounds, interleave, rows
from kvtier.cli.bench.stores import wait_until_populated
from kvtier.config import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

_COLUMNS = {"gb_s": "GB/s", "fraction_of_best": "of best loop", "cpu_s_per_gb": "CPU s/GB"}
_LOOPS = ("memmove", "copy_many")


def copy(
    *, gib: float = 0.25, chunk_mib: float = 2.0, rounds: int = 9, seed: int = 0, json: Path | None = None
) -> None:
    """Get chunks that are in DRAM, against ctypes.memmove and the native copy, on one thread each.

    The first round is discarded; figures are medians, and fractions medians of each round's ratio to
    the faster loop. GB are 10**9 bytes, counted once.

    Parameters
    ----------
    gib
        GiB per pass. Memory holds it three times.
    chunk_mib
        MiB per chunk.
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
    with ExitStack() as stack:
        source, memory = amount.memory(), amount.memory()
        dram = amount.nbytes * 5 // 4 + 4 * amount.chunk_bytes + 32 * MIB
        store = stack.enter_context(kvtier.open(dram=dram, **amount.settings()))
        contenders, absent = _contenders(store, source, memory)
        step = stack.enter_context(report.progress((rounds + 1) * len(contenders)))
        samples = interleave(contenders, rounds, seed, step)
    found = [dataclasses.asdict(row) for row in rows(contenders, samples)]
    loops = [samples[name] for name in _LOOPS if name in samples]
    best = [max(sample.gb_s for sample in passes) for passes in zip(*loops, strict=True)]
    for row in found:
        ratios = [gb_s / limit for gb_s, limit in zip(row["gb_s_of_rounds"], best, strict=True)]
        row["fraction_of_best"] = statistics.median(ratios)
    report.show(f"copies, {gib:g} GiB in chunks of {chunk_mib:g} MiB", found, _COLUMNS, absent)
    figures = {"gib": gib, "chunk_mib": chunk_mib, "rounds": rounds, "seed": seed, "rows": found}
    report.write_json(json, "memory", {**figures, "absent": absent})


def _contenders(
    store: kvtier.Store, source: npt.NDArray[np.uint8], memory: npt.NDArray[np.uint8]
) -> tuple[list[Contender], dict[str, str]]:
    chunks, width = source.shape
    source[:] = np.random.default_rng(0).integers(0, 256, width, np.uint8)
    source[:, 0] = np.arange(chunks)
    names = keys(chunks)
    check(store.put(names, source).result(), "cannot store the chunks to copy")
    wait_until_populated(store)
    addresses, targets = [_addresses(array) for array in (source, memory)]

    def memmove() -> None:
        for address, target in zip(addresses.tolist(), targets.tolist(), strict=True):
            ctypes.memmove(target, address, width)

    def copy_many() -> None:
        core: Any = _native.core
        core.copy_many(addresses, targets, np.full(chunks, width, np.uint64))

    def get() -> None:
        check(store.get(names, into=memory).result(), "a chunk in DRAM was not found")

    def measured(call: Callable[[], None]) -> Callable[[], Sample]:
        def run() -> Sample:
            memory[:, :1] = ~source[:, :1]
            with Meter(None, memory.nbytes) as meter:
                call()
            if not (memory[:, :1] == source[:, :1]).all():
                raise AssertionError("not everything was copied")
            return meter.sample()

        return run

    absent = dict.fromkeys(("gather", "scatter"), "kvtier copies no paged layouts yet")
    loops = [Contender("memmove", measured(memmove))]
    if _native.core is not None:
        loops.append(Contender("copy_many", measured(copy_many)))
    else:
        absent["copy_many"] = _native.why_not
    return [*loops, Contender("kvtier-get", measured(get))], absent


def _addresses(array: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    return np.array([row.ctypes.data for row in array], np.uint64)
