"""A disk tier over several devices."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtier
from kvtier.config import MIB
from kvtier.io.base import IOEngine
from small_stores import CHUNK
from store_calls import HIT, KNOWN, MISS, REFUSED, got

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvtier.io.base import Batch
    from kvtier.store.paths import DiskPath


@pytest.fixture
def directories(tmp_path: Path) -> list[Path]:
    return [tmp_path / name for name in ("a", "b", "c")]


def chunks_per_path(store: kvtier.Store) -> list[int]:
    return [len(path.tier.index) for path in store._core.paths]


def test_chunks_are_spread_evenly_and_found_again(
    open_store: Any, keys: Any, payloads: Any, directories: list[Path]
) -> None:
    store = open_store(directories, capacity=24 * MIB)
    assert store.put(keys(30), payloads(30), until="disk").result(20).ok
    assert chunks_per_path(store) == [10, 10, 10]
    store.close()
    store = open_store(directories[::-1], capacity=24 * MIB, dram=0)
    assert store.match(keys(31)) == 30
    result, targets = got(store, keys(30))
    assert result.status.tolist() == [HIT] * 30
    assert (targets == payloads(30)).all()
    stats = store.stats()
    assert stats["disk.hits"] == stats["disk.chunks"] == 30
    assert stats["disk.bytes_read"] == 30 * CHUNK
    assert [stats[f"disk.{i}.chunks"] for i in range(3)] == [10, 10, 10]
    assert [stats[f"disk.{i}.path"] for i in range(3)] == [str(path) for path in directories[::-1]]
    assert stats["disk.capacity"] == 24 * MIB
    assert all(stats[f"disk.{i}.capacity"] == 8 * MIB for i in range(3))


def test_a_faster_path_gets_more(open_store: Any, keys: Any, payloads: Any, directories: list[Path]) -> None:
    store = open_store(directories[:2], capacity=24 * MIB)
    for path, rate in zip(store._core.paths, (3e9, 1e9), strict=True):
        _measure(path, rate)
    store.put(keys(40), payloads(40), until="disk").result(20)
    assert chunks_per_path(store) == [30, 10]
    assert store.stats()["disk.0.read_gb_s"] == pytest.approx(3.0, rel=0.01)


def _measure(path: DiskPath, rate: float) -> None:
    """Have the path's window see a device of this many bytes per second."""
    clock = 0.0
    for _ in range(400):
        while path.reads.has_room:
            path.reads.enter(MIB, clock)
        clock += MIB / rate
        path.reads.leave(MIB, clock, busy=True)
    path.reads.leave(path.reads.in_flight, clock, busy=False)


def test_nothing_is_evicted_while_another_path_has_room(
    open_store: Any, keys: Any, payloads: Any, directories: list[Path]
) -> None:
    store = open_store(directories[:2], capacity=8 * MIB)
    for path, rate in zip(store._core.paths, (100e9, 1e9), strict=True):
        _measure(path, rate)
    count = 0
    while store.put(keys(count + 1)[count:], payloads(count + 1)[count:], until="disk").result(20).ok:
        count += 1
        if store.stats()["disk.evictions"]:
            break
    fits = [int(1 / path.tier.share(CHUNK)) for path in store._core.paths]
    assert count - 1 == sum(fits), "both were filled first"


def test_invariant_5_each_path_stays_within_its_share(
    open_store: Any, keys: Any, payloads: Any, directories: list[Path]
) -> None:
    store = open_store(directories, capacity=6 * MIB)
    for start in range(0, 150, 50):
        store.put(keys(150)[start : start + 50], payloads(150)[start : start + 50], until="disk").result(20)
    assert store.stats()["disk.evictions"] > 0
    for directory in directories:
        assert sum(file.stat().st_size for file in directory.iterdir()) <= 2 * MIB + 4096


def test_a_put_larger_than_all_paths_keeps_its_head(
    open_store: Any, keys: Any, payloads: Any, directories: list[Path]
) -> None:
    store = open_store(directories, capacity=6 * MIB, dram=0)
    status = store.put(keys(150), payloads(150), until="disk").result(20).status.tolist()
    head = status.index(REFUSED)
    assert head >= 60
    assert status[head:] == [REFUSED] * (150 - head)
    assert store.match(keys(150)) == head


def test_without_one_of_its_paths_a_store_serves_the_others(
    open_store: Any, keys: Any, payloads: Any, directories: list[Path]
) -> None:
    store = open_store(directories, capacity=24 * MIB)
    store.put(keys(30), payloads(30), until="disk").result(20)
    on_b = [i for i, key in enumerate(keys(30)) if store._core.paths[1].tier.find(key) != -1]
    store.close()
    shutil.rmtree(directories[1])
    store = open_store(directories, capacity=24 * MIB, dram=0)
    result, targets = got(store, keys(30))
    assert [i for i, status in enumerate(result.status.tolist()) if status == MISS] == on_b
    kept = np.flatnonzero(result.status == HIT)
    assert (targets[kept] == payloads(30)[kept]).all()
    again = store.put(keys(30), payloads(30), until="disk").result(20)
    assert (again.status == KNOWN).sum() == 20
    assert got(store, keys(30))[0].ok


def test_deleted_on_every_path(open_store: Any, keys: Any, payloads: Any, directories: list[Path]) -> None:
    store = open_store(directories, capacity=24 * MIB)
    store.put(keys(12), payloads(12), until="disk").result(20)
    assert store.delete(keys(12)).result(20) == 12
    store.close()
    store = open_store(directories, capacity=24 * MIB)
    assert chunks_per_path(store) == [0, 0, 0]
    assert store.match(keys(1)) == 0


class Held(IOEngine):
    """An engine whose reads stay on the device until they are let go."""

    name = "held"

    def __init__(self, engine: IOEngine) -> None:
        self._engine = engine
        self.held: list[Batch] = []
        self.holds = True

    def submit(self, batch: Batch) -> None:
        if self.holds and not batch.ops[0]["write"]:
            self.held.append(batch)
        else:
            self._engine.submit(batch)

    def let_go(self) -> None:
        self.holds = False
        for batch in self.held:
            self._engine.submit(batch)

    def close(self, timeout: float) -> bool:
        return self._engine.close(timeout)


@pytest.fixture
def held_path(
    open_store: Any, keys: Any, payloads: Any, directories: list[Path]
) -> Callable[..., tuple[kvtier.Store, Held]]:
    """A store with 10 chunks on each of three paths, the second of which hangs."""

    def make(**settings: Any) -> tuple[kvtier.Store, Held]:
        store = open_store(directories, capacity=24 * MIB, dram=0, **settings)
        for key, payload in zip(keys(30), payloads(30), strict=True):
            # One by one: in a crowd the path that is quickest gets most.
            assert store.put([key], [payload], until="disk").result(20).ok
        assert chunks_per_path(store) == [10, 10, 10]
        path = store._core.paths[1]
        path.engine = engine = Held(path.engine)
        return store, engine

    return make


def test_a_path_that_hangs_costs_its_own_chunks_only(held_path: Any, keys: Any, payloads: Any) -> None:
    store, engine = held_path()
    lost = [store._core.paths[1].tier.find(key) != -1 for key in keys(30)]
    targets = np.empty((30, CHUNK), np.uint8)
    transfer = store.get(keys(30), into=targets, timeout=1.0)
    result = transfer.result(20)
    assert [status != HIT for status in result.status.tolist()] == lost
    kept = np.flatnonzero(result.status == HIT)
    assert (targets[kept] == payloads(30)[kept]).all()
    engine.let_go()
    assert got(store, keys(30))[0].ok


def test_a_path_that_hangs_does_not_hold_up_writes_to_the_others(
    held_path: Any, keys: Any, payloads: Any
) -> None:
    store, engine = held_path()
    transfer = store.get(keys(30), into=np.empty((30, CHUNK), np.uint8), timeout=20)
    more = range(100, 130)
    names, values = [keys(130)[i] for i in more], payloads(130)[100:]
    assert store.put(names, values, until="disk").result(20).ok
    engine.let_go()
    assert transfer.result(20).ok


def test_a_path_that_hangs_is_not_asked_until_it_works_again(
    held_path: Any, keys: Any, payloads: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    store, engine = held_path()
    monkeypatch.setattr("kvtier.store.paths._HANG", 0.5)  # not while it was filled, on a busy machine
    lost = [store._core.paths[1].tier.find(key) != -1 for key in keys(30)]
    first = store.get(keys(30), into=np.empty((30, CHUNK), np.uint8), timeout=1)
    assert first.result(20).reason[lost].tolist() == [kvtier.Reason.DEADLINE] * sum(lost)
    start = time.monotonic()
    result, _ = got(store, keys(30), timeout=15)
    assert time.monotonic() - start < 10, "those on the path that hangs do not wait for the deadline"
    assert result.reason[lost].tolist() == [kvtier.Reason.TIER_DOWN] * sum(lost)
    assert result.prefix == lost.index(True) == store.match(keys(30))
    again = store.put(keys(30), payloads(30), until="disk").result(20)
    assert again.ok, "what cannot be reached is stored again, on the others"
    assert got(store, keys(30))[0].ok
    assert store.stats()["disk.down"] is True
    engine.let_go()
    wait_until(lambda: store.stats()["disk.down"] is False)
    assert [store.stats()[f"disk.{i}.outages"] for i in range(3)] == [0, 1, 0]
    assert got(store, keys(30))[0].ok
    assert [record.message.split(": ")[1] for record in caplog.records] == [
        "nothing came back for 0.5 s", "works again",
    ]  # fmt: skip


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_what_waits_for_a_path_that_hangs_fails_when_it_is_found_out(
    held_path: Any, keys: Any, payloads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, engine = held_path(io_window=CHUNK)
    monkeypatch.setattr("kvtier.store.paths._HANG", 0.5)
    first = store.get(keys(30), into=np.empty((30, CHUNK), np.uint8), timeout=4)
    time.sleep(0.6)
    got(store, keys(1))  # any request notices
    late = first.result(10).reason.tolist()
    assert late.count(kvtier.Reason.DEADLINE) == 1, "what the device has"
    assert late.count(kvtier.Reason.TIER_DOWN) == 9, "what waited for it"
    engine.let_go()
    wait_until(lambda: store.stats()["disk.down"] is False)
    assert got(store, keys(30))[0].ok


class Failing(IOEngine):
    """An engine on whose device everything is an I/O error, until it is mended."""

    name = "failing"

    def __init__(self, engine: IOEngine) -> None:
        self._engine = engine
        self.fails = True
        self.asked = 0

    def submit(self, batch: Batch) -> None:
        self.asked += 1
        if not self.fails:
            return self._engine.submit(batch)
        batch.results[:] = errno.ENODEV
        threading.Thread(target=batch.on_done, args=(batch,), name="kvtier-failing").start()
        return None

    def close(self, timeout: float) -> bool:
        return self._engine.close(timeout)


def test_a_device_that_fails_is_left_alone_and_tried_again(
    open_store: Any, keys: Any, payloads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.store.health._FIRST_PAUSE", 0.3)
    store = open_store(dram=MIB)
    store.put(keys(8), payloads(8), until="disk").result(20)
    path = store._core.paths[0]
    path.engine = engine = Failing(path.engine)
    reasons = []
    for start in (100, 101, 102, 103, 104, 105):
        result = store.put(keys(106)[start:], payloads(106)[start:], until="disk").result(20)
        reasons += result.reason.tolist()
    assert kvtier.Reason.TIER_DOWN in reasons
    assert store.stats()["put.tier_down"] > 0
    assert store.match(keys(8)) == 8, "DRAM goes on"
    asked = engine.asked
    store.put([keys(200)[150]], payloads(200)[150:151], until="dram").result(20)
    assert got(store, [keys(200)[150]])[0].ok
    assert engine.asked <= asked + 1
    engine.fails = False

    def works() -> bool:
        return bool(store.put([keys(300)[250]], payloads(300)[250:251], until="disk").result(20).ok)

    wait_until(works)
    assert store.stats()["disk.down"] is False
    assert store.stats()["disk.outages"] == 1


def test_an_error_at_one_path_leaves_none_open(tmp_path: Path, directories: list[Path]) -> None:
    directories[2].write_text("a file is in the way")
    with pytest.raises(kvtier.TierUnavailable, match="is a file, and a store needs a directory"):
        kvtier.open(directories, capacity=24 * MIB, chunk_bytes=CHUNK)
    directories[2].unlink()
    kvtier.open(directories, capacity=24 * MIB, chunk_bytes=CHUNK).close()


def test_a_chunk_put_again_to_a_path_that_was_out_is_there_once(
    open_store: Any, keys: Any, payloads: Any
) -> None:
    """It does not count as known while the path is out, and the put of it may bring the path back."""
    store = open_store(dram=0)
    core, path = store._core, store._core.paths[0]
    for count in (4, 1, 1):
        assert store.put(keys(count), payloads(count), until="disk").result(20).ok
        with core.lock:
            assert len(path.tier.index) == len(path.tier.index.table.rows()) == 4
            assert path.tier.index.used_bytes == 4 * CHUNK
            path.health.hung(time.monotonic() - 100)  # to be tried at once
    with core.lock:
        path.health.worked()
    targets = np.zeros_like(payloads(4))
    assert store.get(keys(4), into=targets).result(20).ok
    assert (targets == payloads(4)).all()
    store.close()
    with open_store(dram=0) as again:
        assert again.match(keys(4)) == 4
        assert again.stats()["disk.chunks"] == 4
