"""The scrubber: what it finds, what it leaves alone, and that nobody waits for it."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtier
from devices import instant_device
from kvtier.config import KIB, MIB
from kvtier.errors import InvalidRequest, TierUnavailable
from kvtier.format import SLAB_HEADER_BYTES
from kvtier.io.base import Batch, IOEngine
from kvtier.store import scrub
from kvtier.testing.faults import Fault
from small_stores import CHUNK, pinned_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvtier.testing.emulated import EmulatedDevice

FAST = 1 << 40


@pytest.fixture
def kind() -> str:
    """Only slabs have it."""
    return "slab"


@pytest.fixture(autouse=True)
def _pass_after_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "_PASS_EVERY", 0.01)
    monkeypatch.setattr(scrub, "_PAUSE", 0.01)
    monkeypatch.setattr(scrub, "_YIELD", 0.002)


@pytest.fixture(scope="module")
def devices() -> Iterator[EmulatedDevice]:
    yield from instant_device("128MiB")


@pytest.fixture
def device(devices: EmulatedDevice) -> Iterator[EmulatedDevice]:
    yield devices
    devices.clear_faults()


def eventually(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to be in time"
        time.sleep(0.002)


def number(store: kvtier.Store, name: str) -> int:
    return int(store.stats()[f"scrub.{name}"])


def whole_passes(store: kvtier.Store, more: int = 2) -> None:
    """Wait until everything that is there now has been looked at: the first pass to end may be under way."""
    target = number(store, "passes") + more
    eventually(lambda: number(store, "passes") >= target)


def place(store: kvtier.Store, key: bytes) -> int:
    """Byte offset of a chunk in the slab's file."""
    tier = store._core.paths[0].tier
    with store._core.lock:
        return SLAB_HEADER_BYTES + int(tier.index.offset[tier.find(key)])


def flip(file: Path, offset: int) -> None:
    fd = os.open(file, os.O_RDWR)
    byte = os.pread(fd, 1, offset)
    os.pwrite(fd, bytes([byte[0] ^ 4]), offset)
    os.fsync(fd)
    os.close(fd)


def flip_in_dram(store: kvtier.Store, key: bytes, at: int) -> None:
    dram = store._core.dram
    address = dram.address(dram.index.offset[dram.find(key)]) + at
    ctypes.c_uint8.from_address(address).value ^= 0x20


def test_a_sound_store_is_walked_over_and_left_alone(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store(scrub=FAST)
    assert store.put(keys(8), payloads(8), until="disk").result(20).ok
    before = store.stats()
    whole_passes(store)
    after = store.stats()
    assert after["scrub.chunks"] >= before["scrub.chunks"] + 16  # in DRAM and on disk
    assert after["scrub.bytes"] >= before["scrub.bytes"] + 16 * CHUNK
    assert after["scrub.bad"] == after["scrub.unreadable"] == 0
    assert abs(after["scrub.last_pass"] - time.time()) < 60
    for name in ("disk.bytes_read", "dram.hits", "disk.hits", "get.requested"):
        assert after[name] == before[name]
    assert not pinned_slots(store)


def test_it_is_off_unless_asked_for(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store()
    assert store.put(keys(2), payloads(2), until="disk").result(20).ok
    assert store._core._scrubber is None
    assert not any(thread.name == "kvtier-scrub" for thread in threading.enumerate())
    assert number(store, "passes") == 0
    assert not store._core.dram._sums
    with pytest.raises(InvalidRequest, match=r"scrub.* is -1"):
        open_store(scrub=-1)


@pytest.mark.parametrize("codec", ["raw", "lz4"])
def test_a_flipped_bit_on_disk_is_found_before_it_is_wanted(
    open_store: Any, device: EmulatedDevice, keys: Any, codec: str
) -> None:
    store = open_store(device.paths[0] / f"flip-{codec}", dram=0, scrub=FAST)
    values = np.repeat(np.arange(8, dtype=np.uint8)[:, None], CHUNK, axis=1)
    assert store.put(keys(8), values, until="disk", codec=codec).result(20).ok
    whole_passes(store)
    flip(device.backing_path(0) / f"flip-{codec}" / "slab", place(store, keys(8)[5]) + 17)
    eventually(lambda: number(store, "bad") == 1)
    assert store.match(keys(8)) == 5
    result = store.get(keys(8), into=np.empty_like(values)).result(20)
    assert result.reason.tolist() == [0] * 5 + [kvtier.Reason.ABSENT] + [0] * 2
    whole_passes(store)
    assert number(store, "bad") == 1
    store.close()
    again = open_store(device.paths[0] / f"flip-{codec}", dram=0)
    assert [again.match([key]) for key in keys(8)] == [1] * 5 + [0] + [1] * 2


def test_the_last_part_of_a_large_chunk_is_read_too(open_store: Any, tmp_path: Path, payload: Any) -> None:
    nbytes = 5 * MIB // 2 + 100
    path = tmp_path / "large"
    store = open_store(
        path,
        dram=0,
        capacity=64 * MIB,
        landing=8 * MIB,
        chunk_bytes=3 * MIB,
        scrub=FAST,
        part_bytes=128 * KIB,
    )
    key = kvtier.ChunkKey(bytes(32))
    assert store.put([key], [payload(1, nbytes)], until="disk").result(20).ok
    whole_passes(store)
    assert number(store, "chunks") * (nbytes // 4096 + 1) * 4096 <= number(store, "bytes")
    assert number(store, "bad") == 0
    flip(path / "slab", place(store, key) + nbytes - 1)
    eventually(lambda: number(store, "bad") == 1)
    assert store.match([key]) == 0


def test_a_flipped_bit_in_dram_is_found_and_the_disk_serves(
    open_store: Any, keys: Any, payloads: Any
) -> None:
    store = open_store(scrub=FAST)
    assert store.put(keys(8), payloads(8), until="disk").result(20).ok
    whole_passes(store)
    flip_in_dram(store, keys(8)[3], 12345)
    eventually(lambda: number(store, "bad") == 1)
    targets = np.zeros_like(payloads(8))
    assert store.get(keys(8), into=targets).result(20).ok
    assert (targets == payloads(8)).all()
    assert store.stats()["disk.hits"] == 1
    flip_in_dram(store, keys(8)[3], 5)  # which came from disk
    eventually(lambda: number(store, "bad") == 2)


def test_a_flipped_bit_in_dram_alone_is_a_miss(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store(False, scrub=FAST)
    with store.reserve(keys(3), CHUNK) as reservation:
        for view, value in zip(reservation.views, payloads(3), strict=True):
            view[:] = value
        assert reservation.commit().result(20).ok
    flip_in_dram(store, keys(3)[1], 0)
    eventually(lambda: number(store, "bad") == 1)
    assert [store.match([key]) for key in keys(3)] == [1, 0, 1]
    assert not pinned_slots(store)


def test_it_leaves_recency_as_it_is(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store(scrub=FAST)
    assert store.put(keys(8), payloads(8), until="disk").result(20).ok
    tiers = (store._core.dram, store._core.paths[0].tier)
    before = [tier.index.by_age().tolist() for tier in tiers]
    whole_passes(store, 3)
    assert [tier.index.by_age().tolist() for tier in tiers] == before


def test_it_goes_on_under_a_load(open_store: Any, key: Any, payload: Any) -> None:
    """Evictions, deletes and slots used again while they are scrubbed: nothing good is found bad."""
    store = open_store(scrub=FAST, dram=MIB)
    end = time.monotonic() + 3
    i = 0
    while time.monotonic() < end:
        batch = range(i, i + 6)
        result = store.put([key(n) for n in batch], [payload(n % 7) for n in batch]).result(20)
        assert (result.status <= kvtier.Status.KNOWN).all()
        if i % 5 == 0:
            store.delete([key(n) for n in batch[:2]]).result(20)
        i += 6
    whole_passes(store)
    assert number(store, "bad") == number(store, "unreadable") == 0
    assert store.stats()["disk.evictions"] > 50


class HeldReads(IOEngine):
    """A device whose reads for callers are held back until `release`; the scrubber's would pass."""

    name = "held"

    def __init__(self, inner: IOEngine) -> None:
        self._inner = inner
        self.held: list[Batch] | None = []
        self.scrubbed = 0

    def submit(self, batch: Batch) -> None:
        by_scrubber = not hasattr(batch.context, "chunks")
        self.scrubbed += by_scrubber
        if self.held is None or by_scrubber:
            self._inner.submit(batch)
        else:
            self.held.append(batch)

    def release(self) -> None:
        held, self.held = self.held or [], None
        for batch in held:
            self._inner.submit(batch)

    def close(self, timeout: float) -> bool:
        return self._inner.close(timeout)


@pytest.mark.parametrize("what", ["read", "write"])
def test_it_yields_to_reads_and_writes(open_store: Any, keys: Any, payloads: Any, what: str) -> None:
    store = open_store(dram=0, scrub=FAST)
    assert store.put(keys(8), payloads(8), until="disk").result(20).ok
    path = store._core.paths[0]
    held = path.engine = HeldReads(path.engine)
    waiting: Any
    if what == "read":
        waiting = store.get(keys(4), into=np.zeros_like(payloads(4)))
    else:
        new = [kvtier.ChunkKey(bytes([9]) * 32)]
        waiting = store.put(new, payloads(1), until="disk")
    eventually(lambda: held.held)
    time.sleep(0.1)  # for the read that was under way
    before = held.scrubbed
    time.sleep(0.5)
    assert held.scrubbed == before
    held.release()
    assert waiting.result(20).ok
    eventually(lambda: held.scrubbed > before)


def test_it_keeps_to_its_rate(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store(dram=0, scrub=4 * CHUNK)
    assert store.put(keys(8), payloads(8), until="disk").result(20).ok
    start, before = time.monotonic(), number(store, "bytes")
    time.sleep(1.5)
    assert number(store, "bytes") - before <= 4 * CHUNK * (time.monotonic() - start) + 2 * CHUNK


def test_an_idle_store_is_not_read_all_the_time(
    open_store: Any, keys: Any, payloads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub, "_PASS_EVERY", 600.0)
    store = open_store(scrub=FAST)
    eventually(lambda: number(store, "passes") == 1)
    assert store.put(keys(8), payloads(8), until="disk").result(20).ok
    store.flush().result(20)
    scrubber = next(t for t in threading.enumerate() if t.name == "kvtier-scrub")
    time.sleep(0.3)
    assert number(store, "passes") == 1
    assert number(store, "bytes") == 0
    begin = time.monotonic()
    store.close()
    assert not scrubber.is_alive()
    assert time.monotonic() - begin < 10


def test_a_device_that_hangs_stops_it_and_nothing_else(
    open_store: Any, device: EmulatedDevice, keys: Any, payloads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub, "_HANG", 0.2)
    store = open_store(device.paths[0] / "hang", scrub=FAST)
    assert store.put(keys(8), payloads(8), until="disk").result(20).ok
    whole_passes(store)
    device.inject(Fault(op="read", file="slab", hang=True))
    eventually(lambda: device.stats()[0].hanging)
    time.sleep(0.5)
    stuck = number(store, "passes")
    time.sleep(0.2)
    assert number(store, "passes") == stuck
    assert device.stats()[0].hanging == 1  # it asks for nothing more
    assert not pinned_slots(store)
    targets = np.zeros_like(payloads(8))
    assert store.get(keys(8), into=targets).result(20).ok  # from DRAM
    device.clear_faults()
    whole_passes(store)
    assert number(store, "bad") == number(store, "unreadable") == 0


def test_a_device_that_hangs_does_not_hold_up_close(
    open_store: Any, device: EmulatedDevice, keys: Any, payloads: Any
) -> None:
    store = open_store(device.paths[0] / "close", scrub=FAST, close_timeout=1.0)
    assert store.put(keys(8), payloads(8), until="disk").result(20).ok
    device.inject(Fault(op="read", file="slab", hang=True))
    eventually(lambda: device.stats()[0].hanging)
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join(8)
    in_time = not closing.is_alive()
    device.clear_faults()
    closing.join(20)
    assert in_time
    assert not any(thread.name == "kvtier-scrub" for thread in threading.enumerate())


def test_what_cannot_be_read_is_kept_and_put_again(
    open_store: Any, device: EmulatedDevice, keys: Any, payloads: Any
) -> None:
    store = open_store(device.paths[0] / "eio", dram=0, scrub=FAST)
    assert store.put(keys(8), payloads(8), until="disk").result(20).ok
    offset = place(store, keys(8)[2])
    device.inject(Fault(op="read", file="slab", errno=errno.EIO, offset=offset, length=CHUNK))
    eventually(lambda: number(store, "unreadable") > 0)
    assert number(store, "bad") == 0
    assert store.match(keys(8)) == 2
    assert store.stats()["disk.outages"] == 0  # it takes no path out
    device.clear_faults()
    targets = np.zeros_like(payloads(8))
    assert store.get(keys(8), into=targets).result(20).ok
    assert (targets == payloads(8)).all()
    assert store.match(keys(8)) == 8


def test_a_path_that_is_out_is_not_scrubbed(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store(dram=0, scrub=FAST)
    assert store.put(keys(8), payloads(8), until="disk").result(20).ok
    core = store._core
    with core.lock:
        core.paths[0].health.hung(time.monotonic() + 1000)
    time.sleep(0.1)
    before = number(store, "bytes")
    time.sleep(0.3)
    assert number(store, "bytes") == before
    with core.lock:
        core.paths[0].health.worked()
    whole_passes(store)


@pytest.mark.parametrize("i", range(15))
def test_invariant_8_closing_at_any_time_leaves_nothing(
    open_store: Any, keys: Any, payloads: Any, i: int
) -> None:
    store = open_store(scrub=FAST)
    store.put(keys(8), payloads(8), until="disk").result(20)
    time.sleep(0.003 * i)
    store.close()
    assert not any(thread.name == "kvtier-scrub" for thread in threading.enumerate())


def test_without_a_thread_the_store_does_not_open(open_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == "kvtier-scrub":
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(TierUnavailable, match="can't start new thread"):
        open_store(scrub=FAST)
    monkeypatch.setattr(threading.Thread, "start", real)
    open_store(scrub=FAST)
