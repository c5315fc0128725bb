"""What the fault tests share: small stores that are checked for leaks, and a device that can be held."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kvtier
from kvtier.io.base import Batch, IOEngine
from kvtier.settings import load
from small_stores import SMALL, numbered_key, pinned_slots, random_payload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    import numpy.typing as npt


class HeldEngine(IOEngine):
    """A device that holds back what `hold` picks until `release`; the rest goes to a real engine."""

    name = "held"

    def __init__(self, inner: IOEngine) -> None:
        self._inner = inner
        self.held: list[Batch] = []
        self.hold: Callable[[Batch], bool] = lambda batch: False

    def submit(self, batch: Batch) -> None:
        if self.hold(batch):
            self.held.append(batch)
        else:
            self._inner.submit(batch)

    def hold_reads(self) -> None:
        self.hold = lambda batch: not batch.ops["write"].any()

    def hold_writes(self) -> None:
        self.hold = lambda batch: bool(batch.ops["write"].any())

    def release(self) -> None:
        """Let everything pass."""
        self.hold = lambda batch: False
        held, self.held = self.held, []
        for batch in held:
            self._inner.submit(batch)

    def release_one(self, i: int) -> None:
        """Let the batch `i` of those held pass."""
        self._inner.submit(self.held.pop(i))

    def register(self, address: int, nbytes: int) -> bool:
        return self._inner.register(address, nbytes)

    def close(self, timeout: float) -> bool:
        return not self.held and self._inner.close(timeout)


@pytest.fixture(scope="session")
def key() -> Callable[[int], kvtier.ChunkKey]:
    return numbered_key


@pytest.fixture(scope="session")
def payload() -> Callable[..., npt.NDArray[np.uint8]]:
    """`payload(i, nbytes)`: random bytes, the same for the same arguments."""
    return random_payload


@pytest.fixture(scope="session")
def eventually() -> Callable[..., None]:
    """`eventually(condition, seconds=10)`: poll until it holds."""

    def wait(condition: Callable[[], object], seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not come to be in time"
            time.sleep(0.002)

    return wait


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., kvtier.Store]]:
    """`open_store(path=None, **settings)`: a small store; afterwards nothing of it may be left.

    Invariant 8: slots, threads and descriptors are back, whatever went wrong in between.
    """
    threads, opened = _threads(), []

    def make(path: Path | None = None, wall: Callable[[], float] = time.time, **changes: Any) -> kvtier.Store:
        settings = load(path or tmp_path / "store", {**SMALL, "dram": 0, **changes})
        store = kvtier.Store(settings, wall=wall)
        opened.append(store)
        assert store._core.wait_until_populated(20)
        return store

    yield make
    gc.collect()
    leaks = []
    for store in opened:
        if not store._core.closed:
            leaks += pinned_slots(store)
        store.close()
    assert not leaks, f"slots still pinned: {leaks}"
    end = time.monotonic() + 5
    while (left := _threads() - threads) and time.monotonic() < end:
        time.sleep(0.01)
    assert not left, f"threads left behind: {left}"
    files = [target for target in _descriptors() if target.startswith(str(tmp_path))]
    assert not files, f"descriptors left behind: {files}"


@pytest.fixture
def open_held(
    open_store: Callable[..., kvtier.Store],
) -> Iterator[Callable[..., tuple[kvtier.Store, HeldEngine]]]:
    """`open_held(**settings)`: a store, and its device, which can be held."""
    engines: list[HeldEngine] = []

    def make(**changes: Any) -> tuple[kvtier.Store, HeldEngine]:
        store = open_store(**changes)
        assert store._core.paths[0].engine is not None
        engines.append(HeldEngine(store._core.paths[0].engine))
        store._core.paths[0].engine = engines[-1]
        return store, engines[-1]

    yield make
    for engine in engines:
        engine.release()


def _threads() -> set[str]:
    return {f"{t.name}:{t.native_id}" for t in threading.enumerate() if t.name.startswith("kvtier-")}


def _descriptors() -> list[str]:
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            targets.append(os.readlink(link))
        except OSError:
            continue  # the listing's own
    return targets
