"""What all tests share: keys, payloads, engines, and stores that are checked for leaks when they close."""

from __future__ import annotations

import gc
import hashlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import kvtier
from kvtier import _native
from kvtier.config import MIB, StoreConfig
from kvtier.io import uring_obstacle
from kvtier.io.aio import AioEngine
from kvtier.io.threads import ThreadEngine
from kvtier.store.store import Store
from small_stores import SMALL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from kvtier.io.base import IOEngine

PAGE = 4096
ENGINES = ["uring", "threads", "threads-python", "aio"]

# Their asserts say as much as those of tests. (pytest's default is the test modules and conftests alone.)
pytest.register_assert_rewrite("store_calls", "store_scripts", "hf_models")

settings.register_profile(
    "kvtier",
    deadline=None,
    derandomize=os.environ.get("HYPOTHESIS_RANDOM") is None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("kvtier")


_frozen_modules = 0


@pytest.fixture(autouse=True)
def _collections_of_garbage_pass_over_modules() -> None:
    """torch alone has half a million objects, which each leak check would look at again."""
    global _frozen_modules
    if len(sys.modules) > _frozen_modules:
        gc.collect()
        gc.freeze()
        _frozen_modules = len(sys.modules)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The developer's own KVTIER_* variables change no test."""
    for name in list(os.environ):
        if name.startswith("KVTIER_") and name != "KVTIER_NATIVE":
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def keys() -> Callable[..., list[kvtier.ChunkKey]]:
    """`keys(n, start=0)`: n distinct keys, the same in every process."""

    def make(count: int, start: int = 0) -> list[kvtier.ChunkKey]:
        return [kvtier.ChunkKey(hashlib.sha256(b"key %d" % i).digest()) for i in range(start, start + count)]

    return make


@pytest.fixture(scope="session")
def payload() -> Callable[[bytes, int], npt.NDArray[np.uint8]]:
    """`payload(key, nbytes)`: the bytes that belong to a key, read-only."""
    return lambda key, nbytes: np.frombuffer(hashlib.shake_128(key).digest(nbytes), np.uint8)


@pytest.fixture(scope="session")
def aligned() -> Callable[[int], npt.NDArray[np.uint8]]:
    """`aligned(nbytes)`: zeroed memory that starts on a page."""

    def make(nbytes: int) -> npt.NDArray[np.uint8]:
        raw = np.zeros(nbytes + PAGE, np.uint8)
        start = -raw.ctypes.data % PAGE
        return raw[start : start + nbytes]

    return make


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[IOEngine]:
    """Every engine that works here, closed at the end."""
    made = make_engine(request.param)
    yield made
    assert made.close(10), "the engine still has batches"


def make_engine(name: str, depth: int = 4) -> IOEngine:
    """An engine by its test name; skips the test where it cannot be had."""
    if name == "threads-python":
        return ThreadEngine(depth)
    if name == "aio":
        return AioEngine(depth)
    if _native.core is None:
        pytest.skip(_native.why_not)
    from kvtier.io.native import NativeThreadEngine, UringEngine

    if name == "threads":
        return NativeThreadEngine(depth)
    if obstacle := uring_obstacle():
        pytest.skip(obstacle)
    try:
        return UringEngine(depth=depth, max_bytes=64 * MIB)
    except OSError as error:  # a small limit of locked memory
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def engine_maker() -> Callable[..., IOEngine]:
    """`engine_maker(name, depth=4)`: for tests that close the engine themselves."""
    return make_engine


@pytest.fixture
def small_config(tmp_path: Path) -> Callable[..., StoreConfig]:
    """`small_config(**settings)`: a StoreConfig of a few MiB in a fresh directory."""
    return lambda **changes: StoreConfig(
        **{"paths": (tmp_path / "store",), **SMALL, "io_window": MIB, "close_timeout": 10.0, **changes}
    )


@pytest.fixture
def open_store(small_config: Callable[..., StoreConfig]) -> Iterator[Callable[..., Store]]:
    """`open_store(**settings)`: a small store, closed and checked for leaks at the end.

    `check_leaks=False` is for stores that a test breaks in a way that leaks by design.
    """
    threads_before = _threads()
    opened: list[tuple[Store, bool]] = []

    def make(*, check_leaks: bool = True, **changes: Any) -> Store:
        store = Store(small_config(**changes))
        opened.append((store, check_leaks))
        return store

    yield make
    gc.collect()  # leases that the test dropped
    checked = [store for store, check in opened if check]
    pinned = {name: count for store in checked for name, count in _pinned(store).items() if count}
    paths = {store.config.path for store in checked if store.config.path}
    for store, _ in opened:
        store.close()
    assert not pinned, f"slots still pinned before close: {pinned}"
    if len(checked) == len(opened):
        end = time.monotonic() + 5  # a thread that was joined may be listed for a moment
        while (left := _threads() - threads_before) and time.monotonic() < end:
            time.sleep(0.01)
        assert not left, f"threads left behind: {left}"
        assert not _descriptors(paths), "file descriptors left behind"


def _pinned(store: Store) -> dict[str, int]:
    try:
        store.flush().result(20)
    except kvtier.StoreClosed:
        return {}
    return {name: int(value) for name, value in store.stats().items() if name.endswith("pinned_slots")}


def _threads() -> set[str]:
    """Python's and the native core's threads of kvtier, by name and thread id."""
    found = {f"{t.name}:{t.native_id}" for t in threading.enumerate() if t.name.startswith("kvtier")}
    for task in Path("/proc/self/task").glob("*/comm"):
        try:
            name = task.read_text().strip()
        except OSError:
            continue  # it ended meanwhile
        if name.startswith("kvtier"):
            found.add(f"{name}:{task.parent.name}")
    return found


def _descriptors(paths: set[Path]) -> list[str]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if any(target.startswith(f"{path}/") for path in paths):
            found.append(target)
    return found
