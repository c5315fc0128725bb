"""The figures the README claims, measured here and now: `python benchmarks/limits.py [--path DIR]`."""

from __future__ import annotations

import argparse
import gc
import hashlib
import mmap
import os
import statistics
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

import kvtier
from kvtier import _native
from kvtier.config import extent_area, extent_size
from kvtier.format import PUT, RECORD, Header, journal_head, seal

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
CHUNK = 2 * MIB
CHUNKS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", type=Path, help="directory on the device to measure (default: temporary)")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.path) as directory:
        table = Table("what", "median", "least", "most", "unit", title="kvtier limits")
        for row in (
            *reads(Path(directory) / "reads", args.rounds),
            *enqueue(args.rounds),
            *keys(args.rounds),
            *opening(Path(directory), args.rounds),
        ):
            table.add_row(*row)
        Console().print(table)


def row(what: str, values: list[float], unit: str, digits: int = 3) -> tuple[str, ...]:
    shown = [f"{v:.{digits}f}" for v in (statistics.median(values), min(values), max(values))]
    return (what, *shown, unit)


def reads(path: Path, rounds: int) -> list[tuple[str, ...]]:
    """1 GiB cold in 2 MiB chunks, checksums on, into touched memory."""
    names = [hashlib.sha256(b"%d" % i).digest() for i in range(CHUNKS)]
    source = np.random.default_rng(0).integers(0, 256, (CHUNKS, CHUNK), np.uint8)
    with kvtier.open(path, capacity="1.5GiB", dram="256MiB", chunk_bytes="2MiB") as store:
        assert store.put(names, source, until="disk").result().ok
    target = np.frombuffer(mmap.mmap(-1, CHUNKS * CHUNK), np.uint8).reshape(CHUNKS, CHUNK)
    target[:] = 1
    engines = ["uring", "threads"] if _native.core and not _native.core.probe_uring() else ["threads"]
    figures: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for engine in engines:
            for way, dram in (("leased", "1100MiB"), ("lent", "64MiB"), ("copied", "64MiB")):
                with kvtier.open(path, dram=dram, chunk_bytes="2MiB", engine=engine) as store:
                    store._core.wait_until_populated(60)
                    figures.setdefault((engine, way), []).append(_read(store, names, target, way))
                    if way != "leased":
                        assert (target[::37] == source[::37]).all()
                        target[:] = 1
    kind = "native" if _native.core else "Python"
    result = []
    for (engine, way), values in figures.items():
        name = f"cold read, {engine} ({kind}), {way}"
        result.append(row(name, [cpu for cpu, _ in values], "CPU s/GB"))
        result.append(row(name, [1 / wall for _, wall in values], "GB/s", 2))
    return result


def _read(store: kvtier.Store, names: list[Any], target: np.ndarray, way: str) -> tuple[float, float]:
    """CPU and wall seconds per GB."""
    gc.collect()
    cpu, wall = time.process_time(), time.perf_counter()
    if way == "leased":
        lease = store.read(names).result()
        ok = lease.result.ok
    else:
        ok = store.get(names, into=target, lend=way == "lent").result().ok
    gigabytes = CHUNKS * CHUNK / 1e9
    figures = (time.process_time() - cpu) / gigabytes, (time.perf_counter() - wall) / gigabytes
    assert ok
    if way == "leased":
        lease.release()
    return figures


def enqueue(rounds: int) -> list[tuple[str, ...]]:
    """1,024 puts of 64 KiB in one call: the time until it returns."""
    names = [hashlib.sha256(b"%d" % i).digest() for i in range(1024)]
    source = [np.ones(64 * 1024, np.uint8) for _ in names]
    times = []
    for _ in range(rounds):
        with kvtier.open(dram="128MiB", chunk_bytes="64KiB") as store:
            times.append(_milliseconds(lambda store=store: transfers.append(store.put(names, source))))
            transfers.pop().result()
    return [row("enqueue 1,024 puts", times, "ms")]


transfers: list[Any] = []


def keys(rounds: int) -> list[tuple[str, ...]]:
    tokens = np.arange(100_000, dtype=np.uint32)
    result = []
    for chunk in (256, 16):
        times = [
            _milliseconds(lambda c=chunk: kvtier.chunk_keys(tokens, namespace=bytes(32), chunk_tokens=c))
            for _ in range(4 * rounds)
        ]
        result.append(row(f"keys of 100,000 tokens, chunks of {chunk}", times, "ms"))
    return result


def opening(directory: Path, rounds: int) -> list[tuple[str, ...]]:
    """Open a store whose journal holds that many chunks: of two parts, and of one for the million."""
    result = []
    for count, slot in ((100_000, 72 * 1024), (1_000_000, 4096)):
        path = directory / f"open-{count}"
        _synthesise(path, count, slot)
        times, sizes = [], []
        for _ in range(rounds):
            start = time.perf_counter()
            store = kvtier.open(path, **_SMALL)
            times.append(time.perf_counter() - start)
            assert store.stats()["disk.chunks"] == count
            store.close()
        tracemalloc.start()
        with kvtier.open(path, **_SMALL):
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0] / count)
        tracemalloc.stop()
        result.append(row(f"open {count:,} chunks", times, "s"))
        result.append(row(f"memory of {count:,} chunks", sizes, "bytes each", 0))
        (path / "slab").unlink()
    return result


_SMALL: dict[str, Any] = {"dram": 0, "landing": "1MiB", "io_window": "1MiB", "chunk_bytes": "4KiB"}


def _synthesise(path: Path, count: int, slot: int) -> None:
    """The files of a store of `count` chunks; the slab is sparse, since opening reads no payload."""
    part = 64 * 1024
    capacity = int(count * slot * 1.12) + 64 * MIB
    extent = extent_size(extent_area(capacity, slot), slot)
    header = Header.new(part_bytes=part, capacity=capacity, extent_bytes=extent, chunk_bytes=slot)
    per_extent = extent // slot
    at = np.arange(count)
    records = np.zeros(count, RECORD)
    records["kind"], records["parts"] = PUT, -(-slot // part)
    records["payload_bytes"] = records["stored_bytes"] = records["slot_bytes"] = slot
    records["generation"] = at + 1
    records["offset"] = at // per_extent * extent + at % per_extent * slot
    records["key"] = np.frombuffer(os.urandom(32 * count), "V32")
    journal = header.for_journal(count + 1)
    path.mkdir()
    (path / "journal").write_bytes(journal_head(journal) + seal(records, journal.journal_id, 0))
    (path / "slab").write_bytes(header.encode().ljust(4096, b"\0"))


def _milliseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    main()
