"""The small stores that tests open: their settings, their keys and payloads, and what they leave pinned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import kvtier
from kvtier.config import KIB, MIB

if TYPE_CHECKING:
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


def pinned_slots(store: kvtier.Store) -> list[tuple[str, Any]]:
    """The counters of slots that are still pinned when all is written."""
    store.flush().result(20)
    return [(n, v) for n, v in store.stats().items() if n.endswith("pinned_slots") and v]
