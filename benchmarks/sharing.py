"""Two processes on one directory of kind `files`: how fast each reads the other's sessions, against its own.

    python benchmarks/sharing.py [--path DIR | --device prototype-4ms]

Each process puts 32 sessions. Then, round by round and in turn, both read their own at once, and both the
other's, cold and checked, a session a call. "full hits" are of the other's sessions. "of a slab" is what the
two get from slabs of their own at once, for comparison. GB are 10**9 bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import mmap
import statistics
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

import kvtier
from kvtier.testing.emulated import EmulatedDevice

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

MIB = 1 << 20
SESSIONS, CHUNKS, CHUNK = 32, 8, MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--path", type=Path, help="directory on the device to measure (default: temporary)")
    parser.add_argument("--device", help="an emulated device's profile")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with place(args.path, args.device) as folder:
        slab = measure([folder / "slab0", folder / "slab1"], "slab", args.rounds)
        files = measure([folder / "files"] * 2, "files", args.rounds)
    table = Table("", "GB/s, both together", "of own files", title=args.device or str(folder))
    own = statistics.median(files["own"])
    for name, rates in (
        ("slabs of their own", slab["own"]),
        ("own files", files["own"]),
        ("the other's", files["other"]),
    ):
        pairs = zip(rates, files["own"], strict=True)
        ratio = (
            statistics.median(rate / base for rate, base in pairs)
            if rates is not slab["own"]
            else statistics.median(rates) / own
        )
        table.add_row(name, f"{statistics.median(rates):.2f}", f"{ratio:.2f}")
    Console().print(table)
    Console().print(f"full hits: {min(files['full']):.0f} of {SESSIONS} sessions")


@contextlib.contextmanager
def place(path: Path | None, device: str | None) -> Iterator[Path]:
    if device is None:
        with tempfile.TemporaryDirectory(dir=path, prefix="kvtier-sharing-") as folder:
            yield Path(folder)
    else:
        with EmulatedDevice(device, size="2GiB") as emulated:
            yield emulated.paths[0]


def measure(paths: list[Path], kind: str, rounds: int) -> dict[str, list[float]]:
    """By what was read: the rate of both processes together in each round; and the least full hits."""
    context = get_context("spawn")
    pipes = []
    for i, path in enumerate(paths):
        ours, theirs = context.Pipe()
        context.Process(target=work, args=(theirs, path, kind, i), daemon=True).start()
        pipes.append(ours)
    both(pipes, ("put",))
    found: dict[str, list[float]] = {"own": [], "other": [], "full": []}
    time.sleep(1.0)  # until each has seen the other's
    for turn in range(rounds):
        for name, shift in (("own", 0), ("other", 1))[:: 1 if turn % 2 else -1]:
            if kind == "slab" and shift:
                continue
            start = time.monotonic()
            full = both(pipes, ("get", shift))
            found[name].append(2 * SESSIONS * CHUNKS * CHUNK / (time.monotonic() - start) / 1e9)
            if shift:
                found["full"].append(min(full))
    both(pipes, None)
    return found


def both(pipes: list[Connection], order: Any) -> list[Any]:
    for pipe in pipes:
        pipe.send(order)
    return [pipe.recv() for pipe in pipes]


def work(pipe: Connection, path: Path, kind: str, number: int) -> None:
    """A process: it puts its sessions, and gets whose it is told to."""
    memory = np.frombuffer(mmap.mmap(-1, CHUNKS * CHUNK), np.uint8).reshape(CHUNKS, CHUNK)
    nbytes = SESSIONS * CHUNKS * CHUNK
    with kvtier.open(
        path, kind=kind, capacity=nbytes * (3 if kind == "files" else 2), dram=0, chunk_bytes=CHUNK
    ) as store:
        while (order := pipe.recv()) is not None:
            if order[0] == "put":
                for session in range(SESSIONS):
                    store.put(keys(number, session), payload(number, session), until="disk").result()
                store.flush().result()
                pipe.send(True)
                continue
            whose, full = (number + order[1]) % 2, 0
            for session in range(SESSIONS):
                memory[:, ::4096] = 0
                result = store.get(keys(whose, session), into=memory, lend=True).result()
                full += result.ok and bool((memory[:, :64] == payload(whose, session, 64)).all())
            pipe.send(full)
    pipe.send(None)


def keys(whose: int, session: int) -> list[kvtier.ChunkKey]:
    names = (b"%d %d %d" % (whose, session, i) for i in range(CHUNKS))
    return [kvtier.ChunkKey(hashlib.sha256(name).digest()) for name in names]


def payload(whose: int, session: int, nbytes: int = CHUNK) -> np.ndarray:
    rows = [
        np.random.default_rng((whose, session, i)).integers(0, 256, nbytes, np.uint8) for i in range(CHUNKS)
    ]
    return np.stack(rows)


if __name__ == "__main__":
    main()
