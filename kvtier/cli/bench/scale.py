"""`kvtier bench scale`: cold reads of the same bytes from one, two and four devices."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from kvtier.cli.bench import fio, fio_reads, options, report
from kvtier.cli.bench.data import Amount, Data
from kvtier.cli.bench.measure import Contender, interleave, ratio, rows
from kvtier.cli.bench.place import open_place
from kvtier.cli.bench.stores import StoreReads, engines
from kvtier.errors import InvalidRequest, TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvtier.cli.bench.measure import Sample

_COLUMNS = {
    "gb_s": "GB/s", "times_one": "x one device", "fraction_of_fio": "of fio", "cpu_s_per_gb": "CPU s/GB",
    "cold": "cold",
}  # fmt: skip
_DEVICE = "nvmeof-4"


def scale(
    *,
    path: options.Paths = None,
    device: options.Device = None,
    gib: options.Gib = 0.5,
    chunk_mib: options.ChunkMib = 2.0,
    engine: Annotated[
        options.EngineName | None, Parameter(help="I/O engine. Default: uring where it works, else threads.")
    ] = None,
    rounds: options.Rounds = 5,
    seed: options.Seed = 0,
    json: options.Json = None,
) -> None:
    """Read the same bytes cold through a store over 1, 2 and 4 devices, beside fio on the same devices.

    Without --path or --device on the emulated nvmeof-4. All are interleaved; the first round is discarded,
    figures are medians, and ratios medians of each round's. GB are 10**9 bytes. The first device holds what
    is read four times, memory holds it once; an emulated device is in memory.
    """
    amount = Amount.of(gib, chunk_mib)
    options.check(rounds, json)
    if path is not None and len(path) < 2:
        raise InvalidRequest("--path is given once: repeat it, with a directory on each device")
    names, absent = engines([engine] if engine else [])
    if not names:
        raise TierUnavailable(f"engine {engine}: {absent[f'kvtier-{engine}']}")
    if not path and device is None:
        device = _DEVICE

    def needed(devices: int) -> int:
        return sum(amount.on_disk(count) for count in _counts(devices))

    with open_place(path or [], device, needed) as place:
        counts = _counts(len(place.directories))
        memory = amount.memory()
        obstacle = fio.obstacle(amount.chunks)
        missing = {"fio": obstacle} if obstacle else {}
        contenders: list[Contender] = []
        for count in counts:
            directories = [directory / f"x{count}" for directory in place.directories[:count]]
            with report.progress(2 * amount.chunks) as step:
                data = _written(directories, amount, lambda step=step, n=count: step(f"writing to {n}"))
            if not missing:
                contenders.append(fio_reads.contender(data, place.counter, f"fio x{count}")[0])
            reads = StoreReads(data, memory, place.counter, engine=names[0], leased=False)
            contenders.append(Contender(f"kvtier-{names[0]} x{count}", reads.bandwidth))
        with report.progress((rounds + 1) * len(contenders)) as step:
            samples = interleave(contenders, rounds, seed, step)
    found = _rows(contenders, samples)
    title = f"cold reads by devices, {gib:g} GiB in chunks of {chunk_mib:g} MiB, {place.description}"
    report.show(title, found, _COLUMNS, missing)
    figures = {"gib": gib, "chunk_mib": chunk_mib, "rounds": rounds, "seed": seed, "rows": found}
    report.write_json(json, place.description, {**figures, "absent": missing})


def _counts(devices: int) -> list[int]:
    """How many of the devices to read from."""
    return [count for count in (1, 2, 4) if count < devices] + [devices]


def _written(directories: Sequence[Path], amount: Amount, on_chunk: Any) -> Data:
    for directory in directories:
        directory.mkdir()
    return Data(directories, amount, on_chunk)


def _rows(contenders: list[Contender], samples: dict[str, list[Sample]]) -> list[dict[str, Any]]:
    found = []
    for row in rows(contenders, samples):
        kind, count = row.name.split(" x")
        figures = dataclasses.asdict(row) | {
            "devices": int(count),
            "times_one": ratio(samples, row.name, f"{kind} x1"),
            "fraction_of_fio": ratio(samples, row.name, f"fio x{count}"),
        }
        found.append(figures)
    return found
