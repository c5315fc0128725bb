"""The journal's compaction on a device that fails or hangs: puts and gets go on, the old journal counts."""

from __future__ import annotations

import errno
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from devices import instant_device
from kvtier.testing.faults import Fault
from small_stores import CHUNK, pinned_slots

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import kvtier
    from kvtier.testing.emulated import EmulatedDevice

NEW = "journal.new"


@pytest.fixture(scope="module")
def devices() -> Iterator[EmulatedDevice]:
    yield from instant_device("256MiB")


@pytest.fixture
def path(devices: EmulatedDevice, tmp_path: Path) -> Iterator[Path]:
    yield devices.paths[0] / tmp_path.name
    devices.clear_faults()


def start(store: kvtier.Store) -> Any:
    compactor = store._core.paths[0].tier.compactor
    with compactor._journal.lock:
        compactor.start(at_once=True)
    return compactor


def check(store: kvtier.Store, key: Any, payload: Any, numbers: range) -> None:
    targets = np.zeros((len(numbers), CHUNK), np.uint8)
    assert store.get([key(i) for i in numbers], into=targets).result(20).ok
    assert all((target == payload(i)).all() for i, target in zip(numbers, targets, strict=True))


def put(store: kvtier.Store, key: Any, payload: Any, numbers: range) -> None:
    for i in numbers:
        assert store.put([key(i)], [payload(i)], until="disk", timeout=10.0).result(20).ok


@pytest.mark.parametrize(
    "fault",
    [
        Fault(op="write", file=NEW, errno=errno.ENOSPC),
        Fault(op="write", file=NEW, errno=errno.EIO, nth=2),
        Fault(op="write", file=NEW, short=100, count=1),
        Fault(op="fsync", file=NEW, errno=errno.EIO),
        Fault(op="open", file=NEW, errno=errno.EROFS),
        Fault(op="metadata", file=NEW, errno=errno.EIO),
    ],
    ids=["full", "write", "short", "sync", "open", "rename"],
)
def test_invariant_6_a_device_that_fails_during_a_compaction(
    open_store: Any,
    devices: EmulatedDevice,
    path: Path,
    key: Any,
    payload: Any,
    eventually: Any,
    fault: Fault,
) -> None:
    store = open_store(path)
    put(store, key, payload, range(20))
    devices.inject(fault)
    compactor = start(store)
    eventually(lambda: compactor._thread is None)
    put(store, key, payload, range(20, 30))
    check(store, key, payload, range(30))
    stats = store.stats()
    assert stats["disk.compactions"] + stats["disk.compactions_failed"] == 1
    assert stats["disk.compactions"] == (fault.short is not None)  # which is just resumed
    devices.clear_faults()
    start(store)
    eventually(lambda: compactor._thread is None)
    assert compactor.done
    store.close()
    with open_store(path) as again:
        check(again, key, payload, range(30))
        assert again.stats()["disk.recovery_damaged"] == 0


@pytest.mark.parametrize("op", ["write", "fsync"])
def test_a_device_that_hangs_during_a_compaction_holds_up_nobody(
    open_store: Any, devices: EmulatedDevice, path: Path, key: Any, payload: Any, eventually: Any, op: Any
) -> None:
    store = open_store(path)
    put(store, key, payload, range(20))
    devices.inject(Fault(op=op, file=NEW, hang=True))
    compactor = start(store)
    eventually(lambda: devices.stats()[0].hanging)
    put(store, key, payload, range(20, 30))
    check(store, key, payload, range(30))
    assert store.delete([key(29)]).result(10) == 1
    assert store.flush().result(10).synced
    assert compactor._thread is not None
    devices.clear_faults()
    eventually(lambda: compactor.done)
    store.close()
    with open_store(path) as again:
        check(again, key, payload, range(29))
        assert again.match([key(29)]) == 0


@pytest.mark.parametrize("op", ["write", "fsync", "metadata"])
def test_a_device_that_hangs_during_a_compaction_does_not_hold_up_close(
    open_store: Any, devices: EmulatedDevice, path: Path, key: Any, payload: Any, eventually: Any, op: Any
) -> None:
    store = open_store(path, close_timeout=1.0)
    put(store, key, payload, range(20))
    assert not pinned_slots(store)
    devices.inject(Fault(op=op, file=NEW, hang=True))
    compactor = start(store)
    thread = compactor._thread
    eventually(lambda: devices.stats()[0].hanging)
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join(6)
    in_time = not closing.is_alive()
    devices.clear_faults()
    closing.join(20)
    assert in_time
    thread.join(20)
    assert not thread.is_alive()
    store._core.paths[0].tier.close()  # it was left open for the life of the process
    with open_store(path) as again:
        check(again, key, payload, range(20))


def test_a_hang_with_a_full_journal_ends_puts_at_their_deadline_and_gets_go_on(
    open_store: Any, devices: EmulatedDevice, path: Path, key: Any, payload: Any, eventually: Any
) -> None:
    store = open_store(path)
    put(store, key, payload, range(20))
    devices.inject(Fault(op="fsync", file=NEW, hang=True))
    compactor = start(store)
    eventually(lambda: devices.stats()[0].hanging)
    limit = compactor._journal.limit
    compactor._journal.limit = compactor._journal.nbytes  # no record more
    begin = time.monotonic()
    late = store.put([key(50)], [payload(50)], until="disk", timeout=1.0).result(20)
    assert not late.ok
    assert time.monotonic() - begin < 10
    check(store, key, payload, range(20))
    compactor._journal.limit = limit
    devices.clear_faults()
    eventually(lambda: compactor.done)
    put(store, key, payload, range(50, 60))
    store.close()
    with open_store(path) as again:
        check(again, key, payload, range(20))
