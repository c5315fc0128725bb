"""What the store's tests share: keys, payloads, and small stores that leave nothing behind."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtier
from kvtier.settings import load
from small_stores import SMALL, numbered_key, pinned_slots, random_payload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import numpy.typing as npt


@pytest.fixture(scope="session")
def key() -> Callable[[int], kvtier.ChunkKey]:
    return numbered_key


@pytest.fixture(scope="session")
def payload() -> Callable[..., npt.NDArray[np.uint8]]:
    """`payload(i, nbytes)`: random bytes, the same for the same arguments."""
    return random_payload


@pytest.fixture
def keys(key: Any) -> Callable[[int], list[kvtier.ChunkKey]]:
    return lambda count: [key(i) for i in range(count)]


@pytest.fixture
def payloads(payload: Any) -> Callable[[int], Any]:
    """`payloads(n)`: shape (n, CHUNK), row i belongs to key i."""
    return lambda count: np.stack([payload(i) for i in range(count)])


@pytest.fixture(params=["slab", "files"])
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of the disk tier of whatever `open_store` opens."""
    return str(request.param)


@pytest.fixture
def open_store(tmp_path: Path, kind: str) -> Iterator[Callable[..., kvtier.Store]]:
    """`open_store(path=None, **settings)`: a small store; at the end no slot of it may be pinned.

    `path=False` is a store in DRAM alone; `wall` the clock that chunks expire by.
    """
    opened: list[kvtier.Store] = []

    def make(
        path: Path | list[Path] | bool | None = None, wall: Callable[[], float] = time.time, **changes: Any
    ) -> kvtier.Store:
        settings = {**SMALL, "kind": kind, **changes}
        if path is False:
            del settings["capacity"]
        source = None if path is False else path or tmp_path / "store"
        opened.append(kvtier.Store(load(source, settings), wall=wall))
        return opened[-1]

    yield make
    gc.collect()
    pinned = []
    for store in opened:
        if not store._core.closed and store._writer._thread.is_alive():
            pinned += pinned_slots(store)
        store.close()
    assert not pinned, f"slots still pinned: {pinned}"
