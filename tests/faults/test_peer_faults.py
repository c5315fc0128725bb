"""Faults that users met in other KV caches, and that a store can have: kvtier does not.

One test for each behaviour, named after it, with the peer's own issue: here those of files, devices and
restarts, in `test_peer_races.py` those of memory, concurrency and keys. Behaviours that another test of this
suite shows already:

| behaviour | seen in | shown by |
|---|---|---|
| a truncated file is a hit; a short read is taken as whole | LMCache (cut file), FlexKV and UCM (io_uring, AIO) | test_corruption.py::test_invariant_1_a_slab_cut_short*, io/test_engines.py |
| bit rot is a hit; no checksum on the hot read path | LMCache #4533 #4558, Mooncake, FlexKV | test_corruption.py::test_invariant_1_any_byte_of_a_payload* |
| the wrong chunk, or another request's KV, is a hit | LMCache #4385 | test_corruption.py::test_invariant_1_two_slots_swapped, ..._an_older_slab_of_the_same_store, store/test_store_model.py |
| 64-bit keys collide | FlexKV, KVBM | tiers/slab/test_recovery.py::test_keys_that_share_their_first_bytes_are_told_apart, index/test_table.py |
| a failed write leaks its buffer, and stores nothing afterwards | LMCache #3533 | test_failing_device.py::test_a_device_that_cannot_write |
| a partial load returns buffers that were never loaded | LMCache #3022 | store/test_reads.py::test_a_lease_larger_than_dram_has_its_head |
| a load waits for keys that are not there | SGLang #31398 | test_slow_device.py::test_invariant_3_an_absent_key_costs_neither_io_nor_memory |
| a load from a dead or hung device never ends | Dynamo #5012 #6032, SGLang #9643 | test_slow_device.py::test_invariant_2_a_get_fails_at_its_deadline |
| after a crash, reads fail until a lease of the dead owner ends | Mooncake (10 s) | test_process.py::test_a_killed_owner_leaves_no_lock |
| a torn file is served after a crash | LMCache #4991 | test_crash.py, test_crash_steps.py |
| space that was only promised runs out later | FlexKV (sparse files) | test_file_systems.py::test_a_full_disk_refuses_and_recovers |
| keys depend on PYTHONHASHSEED | LMCache #2136 #1139 and six more | here, and test_hashing.py::test_keys_do_not_depend_on_the_process |
| importing changes the process | LMCache (start method, gc) | store/test_opening.py::test_invariant_9_importing_changes_nothing |
| a put costs the caller the copy or the disk | LMCache #2546 | store/test_async.py::test_a_thousand_puts_are_enqueued_at_once |
| large pinned memory cannot be registered, and reads fail | Mooncake | test_file_systems.py::test_a_small_locked_memory_limit |
| a first use is never stored | KVBM's frequency filter | test_restart_forgets_everything_and_breaks_the_cap, here |
"""  # noqa: E501  a table

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from devices import instant_device
from kvtier import Reason, Status
from kvtier.config import MIB
from kvtier.testing.faults import Fault
from small_stores import CHUNK
from store_calls import HIT, MISS, STORED, got, outcome, put_and_get
from store_scripts import run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvtier.testing.emulated import EmulatedDevice


@pytest.fixture(scope="module")
def devices() -> Iterator[EmulatedDevice]:
    yield from instant_device("128MiB")


@pytest.fixture
def device(devices: EmulatedDevice) -> Iterator[EmulatedDevice]:
    yield devices
    devices.clear_faults()


def numbered(key: Any, payload: Any, numbers: range) -> tuple[list[Any], Any]:
    return [key(i) for i in numbers], np.stack([payload(i) for i in numbers])


def bytes_in(path: Path) -> int:
    return sum(entry.stat().st_size for entry in path.iterdir())


# Restart and capacity.


def test_restart_forgets_everything_and_breaks_the_cap(
    open_store: Any, tmp_path: Path, key: Any, payload: Any
) -> None:
    """LMCache #562 #1175 #2273 #1454 #4564 #4725, FlexKV, PegaFlow #225, vLLM #52784: an index in memory
    alone, so that old files are found by nobody and counted by nobody."""
    for start in range(0, 60, 12):
        with open_store(capacity=MIB) as store:
            if start:
                known, values = numbered(key, payload, range(start - 4, start))
                result, targets = got(store, known)
                assert result.ok
                assert (targets == values).all()
            assert store.put(*numbered(key, payload, range(start, start + 12)), until="disk").result(20).ok
            assert bytes_in(tmp_path / "store") <= MIB
    with open_store() as store:
        assert store.stats()["disk.chunks"] >= 12


def test_the_last_chunks_wait_for_others_before_they_are_written(
    open_store: Any, tmp_path: Path, key: Any, payload: Any
) -> None:
    """Mooncake's buckets (measured: 288 of 512 objects on disk after 90 s): the rest stays in memory."""
    out = run(
        """
        store = open()
        assert store.put([key(1)], [payload(1)]).result(10).ok  # and no flush
        deadline = time.monotonic() + 20
        while store.stats()["disk.chunks"] < 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        print(store.stats()["disk.chunks"], flush=True)
        os._exit(0)
        """,
        tmp_path / "store",
    )
    assert out == "1\n"
    result, targets = got(open_store(), [key(1)])
    assert result.ok
    assert (targets == 1).all()


def test_zero_hits_unless_the_hash_seed_is_fixed(tmp_path: Path) -> None:
    """LMCache #2136 #1139 #1095 #1739 #2511 #2979 #2581, vLLM #42625, infera: keys from Python's `hash`."""
    body = """
        layout = kvtier.KVLayout(layers=1, kv_heads=1, head_dim=8, dtype="float32", chunk_tokens=16)
        keys = kvtier.Namespace(model="m", weights=bytes(32), layout=layout).chunk_keys(list(range(160)))
        with open() as store:
            print(store.match(keys))
            store.put(keys, [payload(i) for i in range(len(keys))], until="disk").result(10)
        """
    found = [
        run(body, tmp_path / "store", env={**os.environ, "PYTHONHASHSEED": seed}) for seed in ("1", "2", "0")
    ]
    assert found == ["0\n", "10\n", "10\n"]


def test_chunks_are_dropped_in_silence(open_store: Any, key: Any, payload: Any) -> None:
    """foyer-py (measured: 114 of 256 survive a reopen, no error), PegaFlow, LMCache #4991: what a full
    queue cannot take is refused with a reason, and all else is there."""
    keys, values = numbered(key, payload, range(96))
    with open_store(max_queued_chunks=16) as store:
        puts = [store.put([k], [v], until="disk") for k, v in zip(keys, values, strict=True)]
        outcomes = [outcome(put.result(20)) for put in puts]
        assert set(outcomes) <= {(STORED, Reason.NONE), (Status.REFUSED, Reason.QUEUE_FULL)}
        refused = sum(status is Status.REFUSED for status, _ in outcomes)
        assert store.stats()["put.queue_full"] == refused
        assert store.stats()["disk.evictions"] == 0
    with open_store() as store:
        result, targets = got(store, keys)
        for i, (status, _) in enumerate(outcomes):
            assert (result.status[i] == HIT) == (status is STORED), f"chunk {i} is {outcomes[i]}"
            assert result.status[i] == MISS or (targets[i] == values[i]).all()


# Files and devices that fail.


def test_a_removed_file_raises(open_store: Any, tmp_path: Path, key: Any, payload: Any) -> None:
    """LMCache #4405 (KeyError ends the engine): here the open store goes on, and the next one starts anew."""
    with open_store() as store:
        put_and_get(store, key(1), payload(1))
        for name in ("slab", "journal"):
            (tmp_path / "store" / name).unlink()
        result, targets = got(store, [key(1), key(2)])
        assert result.status.tolist() == [HIT, MISS]
        assert (targets[0] == payload(1)).all()
        assert store.put([key(2)], [payload(2)], until="disk").result(10).ok
        store.delete([key(1)]).result(10)
    with open_store() as store:
        assert store.match([key(2)]) == 0
        put_and_get(store, key(1), payload(1))


def test_a_damaged_chunk_poisons_its_key_for_good(
    open_store: Any, tmp_path: Path, key: Any, payload: Any
) -> None:
    """LMCache's `fs` (lookup says hit, load fails, a store skips what exists: for ever)."""
    keys, values = numbered(key, payload, range(4))
    with open_store() as store:
        assert store.put(keys, values, until="disk").result(10).ok
    slab = bytearray((tmp_path / "store/slab").read_bytes())
    at = slab.find(values[1].tobytes())
    slab[at + 100] ^= 1
    (tmp_path / "store/slab").write_bytes(slab)
    with open_store() as store:
        result, _ = got(store, keys)
        assert result.status.tolist() == [HIT, MISS, HIT, HIT]
        assert store.match(keys) == 1, "a look-up knows it by now"
        assert store.put(keys, values, until="disk").result(10).status.tolist()[1] == STORED
        assert store.match(keys) == 4
    with open_store() as store:
        result, targets = got(store, keys)
        assert result.ok
        assert (targets == values).all()


def test_a_failed_store_stays_visible(
    open_store: Any, device: EmulatedDevice, key: Any, payload: Any
) -> None:
    """LMCache #4991: a store that failed is a hit for look-ups, and then gibberish."""
    store = open_store(device.paths[0] / "failed")
    fault = device.inject(Fault(op="write", file="slab", errno=errno.EIO))
    result = store.put([key(1)], [payload(1)], until="disk").result(10)
    assert outcome(result) == (Status.FAILED, Reason.IO_ERROR)
    assert fault.hits
    assert store.match([key(1)]) == 0
    assert outcome(got(store, [key(1)])[0]) == (MISS, Reason.ABSENT)
    fault.remove()
    put_and_get(store, key(1), payload(1))


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM, errno.EIO])
def test_a_passing_error_deletes_the_chunk(
    open_store: Any, device: EmulatedDevice, key: Any, payload: Any, code: int
) -> None:
    """vLLM's file tier deletes the file at any exception; NIXL reports a failed completion as a success."""
    store = open_store(device.paths[0] / f"passing-{code}")
    put_and_get(store, key(1), payload(1))
    fault = device.inject(Fault(op="read", file="slab", errno=code))
    assert outcome(got(store, [key(1)])[0]) == (Status.FAILED, Reason.IO_ERROR)
    fault.remove()
    result, targets = got(store, [key(1)])
    assert result.ok
    assert (targets[0] == payload(1)).all()


def test_a_failed_prefetch_ends_all_later_ones(
    open_store: Any, device: EmulatedDevice, key: Any, payload: Any
) -> None:
    """SGLang: a back end that returns nothing kills the prefetch thread for the life of the process."""
    path = device.paths[0] / "prefetch"
    keys, values = numbered(key, payload, range(4))
    with open_store(path, dram=2 * MIB) as store:
        assert store.put(keys, values, until="disk").result(10).ok
    store = open_store(path, dram=2 * MIB)
    fault = device.inject(Fault(op="read", file="slab", errno=errno.EIO))
    assert store.prefetch([*keys, key(99)]).result(10).status.tolist() == [Status.FAILED] * 4 + [MISS]
    fault.remove()
    assert store.prefetch(keys).result(10).ok
    before = store.stats()["disk.bytes_read"]
    assert (got(store, keys)[1] == values).all()
    assert store.stats()["disk.bytes_read"] == before


@pytest.mark.parametrize("behind", ["a delete", "a flush"])
def test_a_hanging_device_does_not_hold_up_what_is_in_memory(
    open_store: Any, device: EmulatedDevice, key: Any, payload: Any, eventually: Any, behind: str
) -> None:
    """Dynamo #5012 #6032, SGLang #9643, LMCache's MP server (88 min stall): one stuck device stops all."""
    store = open_store(device.paths[0] / f"hang-{behind[2:]}", dram=2 * MIB)
    keys, values = numbered(key, payload, range(8))
    assert store.put(keys, values, until="disk").result(10).ok
    assert store.flush().result(10).synced
    waiting: Any
    if behind == "a delete":
        device.inject(Fault(op="write", file="journal", hang=True))
        waiting = store.delete([keys[7]])
    else:
        device.inject(Fault(op="write", file="slab", delay=0.2))  # for the flush to wait for
        device.inject(Fault(op="fsync", hang=True))
        store.put([key(100)], [payload(100)])
        waiting = store.flush()
    eventually(lambda: device.stats()[0].hanging)
    try:
        targets = np.zeros((7, CHUNK), np.uint8)
        assert store.get(keys[:7], into=targets, timeout=1.0).result(6).ok
        assert (targets == values[:7]).all()
    finally:
        device.clear_faults()
        waiting.result(10)


def test_a_hanging_sync_does_not_hold_up_puts_into_memory(
    open_store: Any, device: EmulatedDevice, key: Any, payload: Any, eventually: Any
) -> None:
    """LMCache #2546 #3533: the disk is felt by whoever only wants memory."""
    store = open_store(device.paths[0] / "sync", dram=2 * MIB)
    put_and_get(store, key(1), payload(1))
    device.inject(Fault(op="fsync", hang=True))
    flushed = store.flush()
    eventually(lambda: device.stats()[0].hanging)
    try:
        assert store.put([key(2)], [payload(2)], timeout=2.0).result(10).ok
    finally:
        device.clear_faults()
        flushed.result(10)


@pytest.mark.parametrize("what", ["sync", "journal"])
def test_a_hanging_device_does_not_hold_up_the_end_of_the_process(
    open_store: Any, device: EmulatedDevice, key: Any, payload: Any, what: str
) -> None:
    """LMCache #3206 #4980 #4516: what is stuck in storage keeps the engine from ending."""
    store = open_store(device.paths[0] / f"close-{what}", dram=2 * MIB, close_timeout=1.0)
    put_and_get(store, key(1), payload(1))
    device.inject(
        Fault(op="fsync", hang=True) if what == "sync" else Fault(op="write", file="journal", hang=True)
    )
    store.delete([key(1)])
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join(6)
    in_time = not closing.is_alive()
    device.clear_faults()
    closing.join(20)
    assert in_time
