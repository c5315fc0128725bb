"""The small stores that tests open: their settings, their keys and payloads, and what they leave pinned."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import kvtier
from kvtier.config import KIB, MIB

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

CHUNK = 64 * KIB
SMALL: dict[str, Any] = {
    "capacity": 8 * MIB,
    "dram": 2 * MIB,
    "landing": MIB,
    "chunk_bytes": CHUNK,
    "part_bytes": 64 * KIB,
    "io_threads": 4,
    "get_timeout": 20.0,
    "put_timeout": 20.0,
    "close_timeout": 5.0,
}


def numbered_key(i: int) -> kvtier.ChunkKey:
    return kvtier.ChunkKey(i.to_bytes(32, "little"))


def random_payload(i: int, nbytes: int = CHUNK) -> npt.NDArray[np.uint8]:
    """Random bytes, the same for the same arguments."""
    return np.random.default_rng((i, nbytes)).integers(0, 256, nbytes, np.uint8)


class WallClock:
    """Seconds since 1970, as a test sets them."""

    def __init__(self, now: float = 1_000_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def bytes_on_disk(path: Path) -> int:
    """Bytes of all files of one path's store, whatever its kind, but the lock's. Counted while nobody who
    keeps to the ledger can rename or remove any.
    """
    sizes = 0
    with contextlib.ExitStack() as undo:
        with contextlib.suppress(FileNotFoundError):
            ledger = undo.enter_context((path / "ledger").open("rb"))
            fcntl.flock(ledger, fcntl.LOCK_SH)
        for folder, _, names in os.walk(path):
            for name in set(names) - {"lock"}:
                with contextlib.suppress(FileNotFoundError):  # by the owner of a slab
                    sizes += os.stat(f"{folder}/{name}").st_size
    return sizes


def pinned_slots(store: kvtier.Store) -> list[tuple[str, Any]]:
    """The counters of slots that are still pinned when all is written, and read by those that nobody
    waits for.
    """
    store.flush().result(20)
    end = time.monotonic() + 10
    while True:
        pinned = [(n, v) for n, v in store.stats().items() if n.endswith("pinned_slots") and v]
        if not pinned or time.monotonic() > end:
            return pinned
        time.sleep(0.005)
