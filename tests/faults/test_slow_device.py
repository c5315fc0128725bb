"""A device that takes its time: deadlines, quarantine, loans, and what else happens meanwhile."""

from __future__ import annotations

import gc
import mmap
import shutil
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

import kvtier
from kvtier import Reason, Status
from kvtier.config import MIB
from small_stores import CHUNK
from store_calls import outcome


def lendable(nbytes: int = CHUNK) -> Any:
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def stored(store: kvtier.Store, keys: list[Any], payloads: list[Any]) -> None:
    assert store.put(keys, payloads, until="disk").result(20).ok


def test_invariant_2_a_get_fails_at_its_deadline(open_held: Any, key: Any, payload: Any) -> None:
    store, device = open_held()
    stored(store, [key(1)], [payload(1)])
    device.hold_reads()
    start = time.monotonic()
    transfer = store.get([key(1)], into=[np.empty(CHUNK, np.uint8)], timeout=0.3)
    assert outcome(transfer.result(5)) == (Status.FAILED, Reason.DEADLINE)
    assert 0.3 <= time.monotonic() - start < 1.3
    assert transfer.released, "an ordinary target is never the kernel's"
    assert store.stats()["get.deadline"] == 1
    assert store.stats()["landing.pinned_slots"] == 1, "the slot is the kernel's until it is done"
    device.release()
    target = np.empty(CHUNK, np.uint8)
    assert outcome(store.get([key(1)], into=[target]).result(5)) == (Status.HIT, Reason.NONE)
    assert (target == payload(1)).all()


def test_a_slot_that_the_kernel_holds_is_given_to_nobody(open_held: Any, key: Any, payload: Any) -> None:
    store, device = open_held(landing=CHUNK)  # one slot
    stored(store, [key(1)], [payload(1)])
    stored(store, [key(2)], [payload(2)])
    device.hold_reads()
    late = store.get([key(1)], into=[np.empty(CHUNK, np.uint8)], timeout=0.1)
    assert outcome(late.result(5)) == (Status.FAILED, Reason.DEADLINE)
    target = np.empty(CHUNK, np.uint8)
    waiting = store.get([key(2)], into=[target])
    with pytest.raises(TimeoutError):
        waiting.result(0.2)
    assert len(device.held) == 1, "the second read was started without a slot of its own"
    device.release()
    assert waiting.result(5).ok
    assert (target == payload(2)).all()


def test_a_loan_is_released_when_the_kernel_is_done(open_held: Any, key: Any, payload: Any) -> None:
    store, device = open_held()
    stored(store, [key(1)], [payload(1)])
    device.hold_reads()
    target = lendable()
    transfer = store.get([key(1)], into=[target], lend=True, timeout=0.1)
    assert outcome(transfer.result(5)) == (Status.FAILED, Reason.DEADLINE)
    assert not transfer.released
    assert not transfer.wait_released(0.1)
    device.release()
    assert transfer.wait_released(5)


def test_lent_memory_is_kept_alive_until_it_is_released(open_held: Any, key: Any, payload: Any) -> None:
    class Buffer(np.ndarray[Any, Any]):
        pass

    store, device = open_held()
    stored(store, [key(1)], [payload(1)])
    device.hold_reads()
    target = lendable().view(Buffer)
    alive = weakref.ref(target)
    transfer = store.get([key(1)], into=[target], lend=True, timeout=0.1)
    assert outcome(transfer.result(5)) == (Status.FAILED, Reason.DEADLINE)
    del target
    gc.collect()
    kept = alive() is not None
    device.release()
    assert transfer.wait_released(5)
    assert kept, "the kernel was left to write into freed memory"


def test_a_late_read_may_be_asked_for_again(open_held: Any, key: Any, payload: Any) -> None:
    store, device = open_held()
    stored(store, [key(1)], [payload(1)])
    device.hold_reads()
    loan = lendable()
    late = store.get([key(1)], into=[loan], lend=True, timeout=0.1)
    late.result(5)
    target = np.empty(CHUNK, np.uint8)
    again = store.get([key(1)], into=[target])
    assert len(device.held) == 1, "it joins the read that is under way"
    device.release()
    assert again.result(5).ok
    assert (target == payload(1)).all()
    assert late.wait_released(5)


def test_invariant_3_an_absent_key_costs_neither_io_nor_memory(
    open_held: Any, key: Any, payload: Any
) -> None:
    store, device = open_held()
    stored(store, [key(1)], [payload(1)])
    device.hold_reads()
    store.get([key(1)], into=[np.empty(CHUNK, np.uint8)])
    held = store.stats()["landing.pinned_slots"], store.stats()["dram.pinned_slots"]
    assert outcome(store.get([key(2)], into=[np.empty(CHUNK, np.uint8)]).result(1))[0] is Status.MISS
    assert len(device.held) == 1, "only the read of the key that is there"
    assert (store.stats()["landing.pinned_slots"], store.stats()["dram.pinned_slots"]) == held
    assert store.match([key(1), key(2)]) == 1


def test_invariant_1_a_deleted_chunk_is_a_miss_while_it_is_being_read(
    open_held: Any, key: Any, payload: Any
) -> None:
    store, device = open_held()
    stored(store, [key(1)], [payload(1)])
    device.hold_reads()
    before = store.get([key(1)], into=[np.empty(CHUNK, np.uint8)])
    assert store.delete([key(1)]).result(5) == 1
    after = store.get([key(1)], into=[np.empty(CHUNK, np.uint8)])
    device.release()
    assert before.result(5).ok, "it was asked for before the delete"
    assert outcome(after.result(5)) == (Status.MISS, Reason.ABSENT)


def test_invariant_1_a_chunk_put_anew_while_the_old_one_is_being_read(
    open_held: Any, key: Any, payload: Any
) -> None:
    store, device = open_held()
    stored(store, [key(1)], [payload(1)])
    device.hold_reads()
    store.get([key(1)], into=[np.empty(CHUNK, np.uint8)])
    store.delete([key(1)]).result(5)
    stored(store, [key(1)], [payload(2)])
    target = np.empty(CHUNK, np.uint8)
    transfer = store.get([key(1)], into=[target])
    device.release()
    assert transfer.result(5).ok
    assert (target == payload(2)).all()


def test_invariant_1_nothing_is_written_behind_a_target(open_held: Any, key: Any, payload: Any) -> None:
    store, device = open_held()
    stored(store, [key(1)], [payload(1)])
    device.hold_reads()
    store.get([key(1)], into=[np.empty(CHUNK, np.uint8)])
    store.delete([key(1)]).result(5)
    memory = np.zeros(CHUNK, np.uint8)
    transfer = store.get([key(1)], into=[memory[:100]])
    device.release()
    transfer.result(5)
    assert not memory[100:].any(), "a get of 100 bytes wrote behind them"


def test_a_write_that_waits_for_reads_goes_on_after_them(
    open_held: Any, key: Any, payload: Any, eventually: Any
) -> None:
    store, device = open_held(capacity=MIB)
    count = 0
    while store.stats()["disk.evictions"] == 0:
        stored(store, [key(count)], [payload(count)])
        count += 1
    there = [key(i) for i in range(count) if store.match([key(i)])]
    device.hold_reads()
    reads = store.get(there, into=np.empty((len(there), CHUNK), np.uint8))
    put = store.put([key(999)], [payload(999)], until="disk")
    eventually(lambda: put.copied)
    flush = store.flush()
    device.release()
    assert reads.result(5).ok
    try:
        assert put.result(2).ok
        assert flush.result(2).synced
    finally:
        store._writer.writeback.pump()  # so that the store can be closed


def test_invariant_6_a_deleted_chunk_stays_deleted_after_a_crash(
    open_held: Any, key: Any, payload: Any, tmp_path: Any
) -> None:
    store, _ = open_held()
    deleted: list[int] = []
    tier = store._core.paths[0].tier
    lock = tier.commit_lock

    class DeleteFirst:
        def __enter__(self) -> None:
            if threading.current_thread() is not threading.main_thread() and not deleted:
                name = threading.current_thread().name
                if name not in ("kvtier-copy", "kvtier-write", "kvtier-clock"):
                    deleted.append(0)
                    deleted[0] = store.delete([key(1)]).result(5)
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    tier.commit_lock = DeleteFirst()
    assert outcome(store.put([key(1)], [payload(1)], until="disk").result(5)) == (
        Status.FAILED, Reason.DELETED,
    )  # fmt: skip
    tier.commit_lock = lock
    assert deleted == [1]
    shutil.copytree(store.config.path, tmp_path / "after")  # what a kill -9 would leave
    with kvtier.open(tmp_path / "after", chunk_bytes=CHUNK) as after:
        assert after.match([key(1)]) == 0


def test_close_leaves_nobody_waiting_for_a_device_that_hangs(
    open_held: Any, key: Any, payload: Any, eventually: Any
) -> None:
    store, device = open_held(close_timeout=0.3)
    stored(store, [key(1)], [payload(1)])
    device.hold = lambda batch: True
    get = store.get([key(1)], into=[np.empty(CHUNK, np.uint8)])
    put = store.put([key(2)], [payload(2)], until="disk")
    flush = store.flush()
    eventually(lambda: len(device.held) == 2)
    start = time.monotonic()
    store.close()
    assert time.monotonic() - start < 2
    for transfer in (get, put):
        assert outcome(transfer.result(2)) == (Status.FAILED, Reason.CLOSED)
    with pytest.raises(kvtier.StoreClosed):
        flush.result(2)
    # The kernel's memory and the files are kept for good: give them back by hand.
    device.release()
    assert device.close(5)
    from kvtier.store import core

    core._abandoned.remove(store._core)
    store._core.paths[0].tier.close()


def test_a_put_at_its_deadline_is_counted_once(open_held: Any, key: Any, payload: Any) -> None:
    """Invariant 10: whoever is first, the clock or the writer that waits for room."""
    store, device = open_held(dram=MIB)
    keys = [key(i) for i in range(32)]
    stored(store, keys, [payload(i) for i in range(32)])
    lease = store.read(keys).result(5)
    cold = keys[lease.result.prefix]
    device.hold_reads()
    slots = []
    while (offset := store._core.landing.reserve(CHUNK)) is not None:
        slots.append(offset)
    loan = lendable()
    reading = store.get([cold], into=[loan], lend=True)  # a read that may yet free a slot
    for i in range(40):
        result = store.put([key(1000 + i)], [payload(0)], timeout=0.01).result(5)
        assert outcome(result) in [(Status.FAILED, Reason.DEADLINE), (Status.REFUSED, Reason.NO_SPACE)]
    device.release()
    assert reading.result(5).ok
    lease.release()
    for offset in slots:
        store._core.landing.release(offset)
    stats = store.stats()
    reasons = [stats[f"put.{reason.name.lower()}"] for reason in Reason if reason]
    assert stats["put.requested"] == stats["put.stored"] + stats["put.known"] + sum(reasons) == 72


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_endless_default_timeout_does_not_stop_the_clock(
    open_held: Any, key: Any, payload: Any, eventually: Any
) -> None:
    store, device = open_held(get_timeout=float("inf"), put_timeout=0.5)
    stored(store, [key(1)], [payload(1)])
    device.hold_reads()
    eventually(lambda: not len(store._core.clock))
    store.get([key(1)], into=[np.empty(CHUNK, np.uint8)])
    store._core.clock._thread.join(0.3)  # where it dies, if it does
    try:
        transfer = store.get([key(1)], into=[np.empty(CHUNK, np.uint8)], timeout=0.2)
        assert outcome(transfer.result(5)) == (Status.FAILED, Reason.DEADLINE)
    finally:
        device.release()


COLLECTED = """
import gc, os, sys, threading
import numpy as np, kvtier
gc.disable()
store = kvtier.open(sys.argv[1], capacity="8MiB", dram="1MiB", landing="1MiB", chunk_bytes="64KiB")
disk = store._core.paths[0].tier
insert = disk.insert
disk.insert = lambda write: (gc.collect(), insert(write))[1]  # the collector runs under the lock
transfer = store.put([bytes(32)], [np.zeros(65536, np.uint8)], until="disk")
cycle = [store]
cycle.append(cycle)
del store, cycle
transfer.result(10)
print("done", flush=True)
os._exit(0)
"""


def test_a_store_that_the_collector_finds_closes_itself(tmp_path: Any) -> None:
    worker = subprocess.run(
        [sys.executable, "-P", "-c", COLLECTED, str(tmp_path / "store")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert worker.stdout == "done\n", worker.stderr
