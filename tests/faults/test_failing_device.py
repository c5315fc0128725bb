"""Devices that return errors: outcomes with reasons, and all is well again when the device is."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvtier import Reason, Status
from kvtier.config import MIB
from small_stores import CHUNK
from store_calls import outcome, put_and_get

if TYPE_CHECKING:
    from collections.abc import Iterator

    import kvtier


@contextlib.contextmanager
def broken(store: kvtier.Store, flags: int) -> Iterator[None]:
    """The slab's descriptor, exchanged for one that cannot do everything."""
    disk: Any = store._core.paths[0].tier
    fd = disk._file.fd
    good = os.dup(fd)
    bad = os.open(store.config.path / "slab", flags | os.O_DIRECT)
    os.dup2(bad, fd)
    os.close(bad)
    try:
        yield
    finally:
        os.dup2(good, fd)
        os.close(good)


@pytest.mark.parametrize("lend", [False, True])
def test_invariant_2_a_device_that_cannot_read(open_store: Any, payload: Any, key: Any, lend: bool) -> None:
    store = open_store()
    put_and_get(store, key(1), payload(1))
    raw = np.empty(CHUNK + 4096, np.uint8)
    target = raw[-raw.ctypes.data % 4096 :][:CHUNK]
    with broken(store, os.O_WRONLY):
        transfer = store.get([key(1)], into=[target], lend=lend)
        assert outcome(transfer.result(10)) == (Status.FAILED, Reason.IO_ERROR)
        assert transfer.wait_released(10)
        lease = store.read([key(1)]).result(10)
        assert outcome(lease.result) == (Status.FAILED, Reason.IO_ERROR)
        assert lease.views[0] is None
        lease.release()
    assert store.stats()["get.io_error"] == 2
    assert store.get([key(1)], into=[target], lend=lend).result(10).ok, (
        "the device is back, and so is the chunk"
    )
    assert (target == payload(1)).all()


def test_a_chunk_that_cannot_be_read_is_put_again(open_store: Any, payload: Any, key: Any) -> None:
    store = open_store()
    put_and_get(store, key(1), payload(1))
    target = np.empty(CHUNK, np.uint8)
    with broken(store, os.O_WRONLY):
        store.get([key(1)], into=[target]).result(10)
        again = store.put([key(1)], [payload(1)], until="disk").result(10)
        assert outcome(again) == (Status.STORED, Reason.NONE)
    assert store.get([key(1)], into=[target]).result(10).ok
    assert (target == payload(1)).all()


def test_a_chunk_that_cannot_be_read_is_reserved_again(open_store: Any, payload: Any, key: Any) -> None:
    store = open_store()
    put_and_get(store, key(1), payload(1))
    target = np.empty(CHUNK, np.uint8)
    with broken(store, os.O_WRONLY):
        store.get([key(1)], into=[target]).result(10)
    with store.reserve([key(1)], CHUNK) as reservation:
        if reservation.views[0] is not None:
            reservation.views[0][:] = payload(1)
        assert reservation.commit(until="disk").result(10).ok
    assert store.get([key(1)], into=[target]).result(10).ok


def test_a_device_that_cannot_write(open_store: Any, payload: Any, key: Any) -> None:
    store = open_store(dram=MIB)
    with broken(store, os.O_RDONLY):
        result = store.put([key(1)], [payload(1)], until="disk").result(10)
        assert outcome(result) == (Status.FAILED, Reason.IO_ERROR)
        assert store.put([key(2)], [payload(2)]).result(10).ok, "DRAM has it"
        assert store.flush().result(10).failed == 2
        assert store.flush().result(10).failed == 0, "counted once"
        target = np.empty(CHUNK, np.uint8)
        assert store.get([key(2)], into=[target]).result(10).ok
    assert store.stats()["disk.write_failures"] == 2
    assert store.put([key(1), key(2)], [payload(1), payload(2)], until="disk").result(10).ok
    store.close()
    assert open_store(dram=MIB).match([key(1), key(2)]) == 2


def test_a_journal_that_cannot_be_written(open_store: Any, payload: Any, key: Any) -> None:
    store = open_store()
    put_and_get(store, key(1), payload(1))
    journal = store._core.paths[0].tier.journal
    good = os.dup(journal._fd)
    bad = os.open(os.devnull, os.O_RDONLY)
    os.dup2(bad, journal._fd)
    os.close(bad)
    result = store.put([key(2)], [payload(2)], until="disk").result(10)
    assert outcome(result) == (Status.FAILED, Reason.IO_ERROR)
    assert store.match([key(2)]) == 0
    assert store.delete([key(1)]).result(10) == 1
    os.dup2(good, journal._fd)
    os.close(good)
    put_and_get(store, key(2), payload(2))
    store.close()
    store = open_store()
    assert store.match([key(1)]) == 0, "its tombstone was written later"
    assert store.match([key(2)]) == 1
