"""What the store's tests share: keys, payloads, and small stores that leave nothing behind."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import numpy.typing as npt

KIB, MIB = 1 << 10, 1 << 20
SMALL: dict[str, Any] = {
    "capacity": 8 * MIB,
    "dram": 2 * MIB,
    "landing": MIB,
    "chunk_bytes": 64 * KIB,
    "part_bytes": 64 * KIB,
    "io_threads": 4,
    "get_timeout": 20.0,
    "put_timeout": 20.0,
    "close_timeout": 5.0,
}


@pytest.fixture(scope="session")
def key() -> Callable[[int], kvtier.ChunkKey]:
    return lambda i: kvtier.ChunkKey(i.to_bytes(32, "little"))


@pytest.fixture(scope="session")
def payload() -> Callable[..., npt.NDArray[np.uint8]]:
    """`payload(i, nbytes)`: random bytes, the same for the same arguments."""
    return lambda i, nbytes=64 * KIB: np.random.default_rng((i, nbytes)).integers(0, 256, nbytes, np.uint8)


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., kvtier.Store]]:
    """`open_store(path=None, **settings)`: a small store; at the end no slot of it may be pinned.

    `path=False` is a store in DRAM alone.
    """
    opened: list[kvtier.Store] = []

    def make(path: Path | bool | None = None, **changes: Any) -> kvtier.Store:
        settings = {**SMALL, **changes}
        if path is False:
            del settings["capacity"]
        opened.append(kvtier.open(None if path is False else path or tmp_path / "store", **settings))
        return opened[-1]

    yield make
    gc.collect()
    pinned = []
    for store in opened:
        if not store._core.closed and store._writer._thread.is_alive():
            store.flush().result(20)
            pinned += [(n, v) for n, v in store.stats().items() if n.endswith("pinned_slots") and v]
        store.close()
    assert not pinned, f"slots still pinned: {pinned}"
