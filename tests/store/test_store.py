"""What the store does when all is well, with the right values."""

from __future__ import annotations

import asyncio
import mmap
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtier
from kvtier import InvalidRequest, Reason, Status

if TYPE_CHECKING:
    from collections.abc import Callable

KIB, MIB = 1 << 10, 1 << 20
CHUNK = 64 * KIB
STORED, KNOWN, HIT, MISS, REFUSED = (
    Status.STORED, Status.KNOWN, Status.HIT, Status.MISS, Status.REFUSED,
)  # fmt: skip


@pytest.fixture
def keys(key: Any) -> Callable[[int], list[kvtier.ChunkKey]]:
    return lambda count: [key(i) for i in range(count)]


@pytest.fixture
def payloads(payload: Any) -> Callable[[int], Any]:
    """`payloads(n)`: shape (n, CHUNK), row i belongs to key i."""
    return lambda count: np.stack([payload(i) for i in range(count)])


def got(store: kvtier.Store, keys: list[Any], **options: Any) -> tuple[kvtier.BatchResult, Any]:
    targets = np.zeros((len(keys), CHUNK), np.uint8)
    return store.get(keys, into=targets, **options).result(20), targets


def idle(store: kvtier.Store) -> None:
    assert store.flush().result(20).synced


# Put and get.


@pytest.mark.parametrize("until", ["dram", "disk"])
@pytest.mark.parametrize("dram", [0, 2 * MIB])
def test_what_was_put_is_got(open_store: Any, keys: Any, payloads: Any, until: Any, dram: int) -> None:
    store = open_store(dram=dram)
    result = store.put(keys(10), payloads(10), until=until).result(20)
    assert result.status.tolist() == [STORED] * 10
    assert result.reason.tolist() == [Reason.NONE] * 10
    assert result.nbytes.tolist() == [CHUNK] * 10
    result, targets = got(store, keys(10))
    assert result.status.tolist() == [HIT] * 10
    assert result.nbytes.tolist() == [CHUNK] * 10
    assert (targets == payloads(10)).all()
    stats = store.stats()
    assert (stats["dram.hits"], stats["disk.hits"]) == ((10, 0) if dram else (0, 10))


def test_invariant_4_a_known_key_moves_nothing(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store()
    first = payloads(3)
    assert store.put(keys(3), first, until="disk").result(20).ok
    before = store.stats()
    for until in ("dram", "disk"):
        result = store.put(keys(3), np.zeros_like(first), until=until).result(20)
        assert result.status.tolist() == [KNOWN] * 3
        assert result.nbytes.tolist() == [0] * 3
        assert result.prefix == 3
    idle(store)
    after = store.stats()
    assert after["put.known"] - before["put.known"] == 6
    assert after["disk.bytes_written"] == before["disk.bytes_written"]
    assert after["disk.journal_bytes"] == before["disk.journal_bytes"]
    assert (got(store, keys(3))[1] == first).all()


def test_the_first_of_two_payloads_for_one_key_counts(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store()
    k, first = keys(2), payloads(3)
    result = store.put([k[0], k[1], k[0]], first, until="disk").result(20)
    assert result.status.tolist() == [STORED, STORED, KNOWN]
    result, targets = got(store, [k[0], k[0], k[1]])
    assert result.ok
    assert (targets == first[[0, 0, 1]]).all()


def test_the_source_may_be_changed_once_it_is_copied(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store()
    source = payloads(8)
    transfer = store.put(keys(8), source, until="disk")
    assert transfer.wait_copied(20)
    source[:] = 0
    assert transfer.result(20).ok
    assert (got(store, keys(8))[1] == payloads(8)).all()


def test_every_kind_of_buffer(open_store: Any, keys: Any) -> None:
    torch = pytest.importorskip("torch")
    store = open_store()
    sources = [
        bytes(range(256)) * 8, bytearray(range(256)) * 8, memoryview(bytes(range(256)) * 8),
        np.arange(512, dtype=np.float32), torch.arange(256, dtype=torch.float64),
        torch.ones(4, 256, dtype=torch.bfloat16),
    ]  # fmt: skip
    assert store.put(keys(6), sources).result(20).nbytes.tolist() == [2048] * 6
    targets = [
        bytearray(2048), np.zeros((2, 1024), np.uint8), memoryview(bytearray(2048)),
        np.zeros(512, np.float32), torch.zeros(256, dtype=torch.float64),
        torch.zeros(1024, dtype=torch.bfloat16),
    ]  # fmt: skip
    assert store.get(keys(6), into=targets).result(20).ok
    assert bytes(targets[0]) == bytes(targets[2]) == targets[1].tobytes() == sources[0]
    assert (targets[3] == sources[3]).all()
    assert torch.equal(targets[4], sources[4])
    assert (targets[5] == 1).all()


def test_rows_backwards_and_apart(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store()
    assert store.put(keys(4), payloads(4)[::-1]).result(20).ok
    wide = np.zeros((4, 2 * CHUNK), np.uint8)
    assert store.get(keys(4), into=wide[::-1, 100 : 100 + CHUNK]).result(20).ok
    assert (wide[:, 100 : 100 + CHUNK] == payloads(4)).all()
    assert not wide[:, :100].any()
    assert not wide[:, 100 + CHUNK :].any()


def test_empty_batches(open_store: Any) -> None:
    store = open_store()
    assert store.match([]) == 0
    assert store.put([], []).result(5).prefix == 0
    assert store.get([], into=[]).result(5).ok
    assert store.read([]).result(5).views == []
    assert store.delete([]).result(5) == 0
    with store.reserve([], 10) as reservation:
        assert reservation.commit().result(5).ok
    with store.pin([]) as count:
        assert count == 0


def test_targets_of_missing_keys_stay_as_they_are(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store()
    store.put(keys(3)[::2], payloads(3)[::2]).result(20)
    targets = np.full((3, CHUNK), 77, np.uint8)
    result = store.get(keys(3), into=targets).result(20)
    assert result.status.tolist() == [HIT, MISS, HIT]
    assert result.reason.tolist() == [Reason.NONE, Reason.ABSENT, Reason.NONE]
    assert result.prefix == 1
    assert not result.ok
    assert (targets[1] == 77).all()


def test_delete_and_put_again(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store()
    store.put(keys(4), payloads(4), until="disk").result(20)
    assert store.delete([*keys(2), *keys(2)]).result(20) == 2
    assert store.delete(keys(2)).result(20) == 0
    assert got(store, keys(4))[0].status.tolist() == [MISS, MISS, HIT, HIT]
    anew = payloads(4)[::-1]
    assert store.put(keys(2), anew[:2], until="disk").result(20).status.tolist() == [STORED] * 2
    assert (got(store, keys(2))[1] == anew[:2]).all()
    store.close()
    store = open_store()
    assert (got(store, keys(2))[1] == anew[:2]).all()


# Prefixes.


def test_match_and_pin_end_at_the_first_gap(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store()
    k, p = keys(6), payloads(6)
    store.put([*k[:3], *k[4:]], [*p[:3], *p[4:]]).result(20)
    assert store.match(k) == 3
    assert store.match(k[3:]) == 0
    assert store.match(k[4:]) == 2
    with store.pin(k) as count:
        assert count == 3
        idle(store)
        assert store.stats()["dram.pinned_slots"] == 3
    assert store.stats()["dram.pinned_slots"] == 0


@pytest.mark.parametrize("until", ["dram", "disk"])
def test_a_put_larger_than_dram_keeps_its_head_there(
    open_store: Any, keys: Any, payloads: Any, until: Any
) -> None:
    store = open_store(dram=MIB)  # 16 chunks
    assert store.put(keys(40), payloads(40), until=until).result(20).ok
    idle(store)
    assert store.stats()["dram.chunks"] == 16
    _, targets = got(store, keys(16))
    assert store.stats()["dram.hits"] == 16
    assert (targets == payloads(16)).all()
    assert got(store, keys(40))[0].ok


def test_a_put_larger_than_the_disk_keeps_its_head(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store(capacity=MIB, dram=0)
    result = store.put(keys(40), payloads(40), until="disk").result(20)
    head = result.prefix
    assert 8 <= head < 16
    assert result.status.tolist() == [STORED] * head + [REFUSED] * (40 - head)
    assert set(result.reason[head:].tolist()) == {Reason.NO_SPACE}
    assert store.stats()["put.no_space"] == 40 - head
    assert store.stats()["disk.evictions"] == 0
    assert store.match(keys(40)) == head
    assert (got(store, keys(head))[1] == payloads(head)).all()


def test_a_get_larger_than_dram_keeps_its_head_there(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store(dram=0)
    store.put(keys(40), payloads(40), until="disk").result(20)
    store.close()
    store = open_store(dram=MIB)
    result, targets = got(store, keys(40))
    assert result.ok
    assert (targets == payloads(40)).all()
    before = store.stats()["dram.hits"]
    assert got(store, keys(16))[0].ok
    assert store.stats()["dram.hits"] - before == 16


@pytest.mark.parametrize("tier", ["dram", "disk"])
def test_a_put_larger_than_a_tier_keeps_a_head_that_is_known(
    open_store: Any, keys: Any, payloads: Any, tier: str
) -> None:
    store = open_store(capacity=MIB, dram=0) if tier == "disk" else open_store(dram=MIB)
    until = "disk" if tier == "disk" else "dram"
    known = store.put(keys(8), payloads(8), until=until).result(20)
    assert known.ok
    result = store.put(keys(40), payloads(40), until=until).result(20)
    assert result.status[:8].tolist() == [KNOWN] * 8
    idle(store)
    rows = [getattr(store._core, tier).find(k) for k in keys(8)]
    assert -1 not in rows, "KNOWN, and evicted by what comes behind it"


def test_a_get_larger_than_dram_keeps_its_head_there_for_the_next(
    open_store: Any, keys: Any, payloads: Any
) -> None:
    store = open_store(dram=MIB, io_window=CHUNK)
    store.put(keys(40), payloads(40), until="disk").result(20)
    engine = store._core.engine
    submit = engine.submit

    def slowly(batch: Any) -> None:
        """One read at a time, and that after the hits were copied."""
        while store._reader._copying:
            time.sleep(0.001)
        submit(batch)

    engine.submit = slowly
    for _ in range(3):
        assert got(store, keys(40))[0].ok
        assert -1 not in [store._core.dram.find(k) for k in keys(16)]


@pytest.mark.parametrize("last", ["put", "get"])
def test_heads_outlive_tails_on_disk(open_store: Any, key: Any, payload: Any, last: str) -> None:
    check_heads_outlive_tails(open_store(capacity=2 * MIB, dram=0), key, payload, "disk", last)


@pytest.mark.parametrize("last", ["put", "get"])
def test_heads_outlive_tails_on_disk_over_many_batches(
    open_store: Any, key: Any, payload: Any, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a prefix above 16 MiB: its batches end one after the other."""
    monkeypatch.setattr("kvtier.store.reads.MAX_BATCH_BYTES", CHUNK)
    monkeypatch.setattr("kvtier.store.writeback.MAX_BATCH_BYTES", CHUNK)
    check_heads_outlive_tails(open_store(capacity=2 * MIB, dram=0), key, payload, "disk", last)


@pytest.mark.parametrize("last", ["put", "get"])
def test_heads_outlive_tails_in_dram(open_store: Any, key: Any, payload: Any, last: str) -> None:
    check_heads_outlive_tails(open_store(path=False, dram=2 * MIB), key, payload, "dram", last)


def check_heads_outlive_tails(store: kvtier.Store, key: Any, payload: Any, until: Any, last: str) -> None:
    """A prefix, pushed out by others, loses its tail first."""
    prefix = [key(i) for i in range(8)]
    assert store.put(prefix, [payload(i) for i in range(8)], until=until).result(20).ok
    if last == "get":
        assert got(store, prefix)[0].ok
    lengths = []
    for i in range(100, 140):
        assert store.put([key(i)], [payload(i)], until=until).result(20).ok
        lengths.append(store.match(prefix))
        there = [store.match([k]) for k in prefix]
        assert there == sorted(there, reverse=True), "a hole: the tail outlived the head"
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 8
    assert lengths[-1] == 0
    assert len(set(lengths)) > 4, "it went chunk by chunk"


def test_a_hit_in_dram_keeps_the_chunk_on_disk_young(open_store: Any, key: Any, payload: Any) -> None:
    store = open_store(capacity=MIB, dram=MIB)
    assert store.put([key(0)], [payload(0)], until="disk").result(20).ok
    for i in range(1, 60):
        assert got(store, [key(0)])[0].ok
        assert store.put([key(i)], [payload(i)], until="disk").result(20).ok
    assert store.stats()["disk.evictions"] > 20
    store.close()
    assert (got(open_store(capacity=MIB, dram=MIB), [key(0)])[1] == payload(0)).all()


def test_pinned_chunks_are_not_evicted(open_store: Any, keys: Any, key: Any, payload: Any) -> None:
    store = open_store(capacity=MIB, dram=0)
    assert store.put(keys(4), [payload(i) for i in range(4)], until="disk").result(20).ok
    with store.pin(keys(4)) as count:
        assert count == 4
        for i in range(100, 140):
            assert store.put([key(i)], [payload(i)], until="disk").result(20).ok
        assert store.match(keys(4)) == 4
    for i in range(200, 240):
        assert store.put([key(i)], [payload(i)], until="disk").result(20).ok
    assert store.match(keys(4)) == 0


def test_a_disk_full_of_pins_refuses(open_store: Any, keys: Any, key: Any, payloads: Any) -> None:
    store = open_store(capacity=MIB, dram=0)
    head = store.put(keys(40), payloads(40), until="disk").result(20).prefix
    with store.pin(keys(head)):
        result = store.put([key(99)], payloads(1), until="disk").result(20)
        assert (result.status[0], result.reason[0]) == (REFUSED, Reason.NO_SPACE)
    assert store.put([key(99)], payloads(1), until="disk").result(20).ok


# Reads.


def test_single_flight(open_store: Any, keys: Any, payloads: Any) -> None:
    """One read of the disk serves all who want the same chunks at the same time."""
    store = open_store()
    store.put(keys(8), payloads(8), until="disk").result(20)
    store.close()
    store = open_store()
    ready = threading.Barrier(8)
    outcomes: list[Any] = []

    def want() -> None:
        ready.wait(10)
        outcomes.append(got(store, keys(8)))

    threads = [threading.Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(outcomes) == 8
    assert all(result.ok and (targets == payloads(8)).all() for result, targets in outcomes)
    stats = store.stats()
    assert stats["disk.bytes_read"] == 8 * CHUNK
    assert stats["disk.hits"] + stats["dram.hits"] == 64


def test_reads_promote(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store()
    store.put(keys(4), payloads(4), until="disk").result(20)
    store.close()
    store = open_store()
    for hits in ((0, 4), (4, 4)):
        assert got(store, keys(4))[0].ok
        assert (store.stats()["dram.hits"], store.stats()["disk.hits"]) == hits


def test_a_loan_receives_the_exact_bytes(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store()
    store.put(keys(4), payloads(4), until="disk").result(20)
    for dram in (0, 2 * MIB):
        store.close()
        store = open_store(dram=dram)
        memory = np.frombuffer(mmap.mmap(-1, 4 * CHUNK), np.uint8).reshape(4, CHUNK)
        for _ in range(2):
            memory[:] = 0
            transfer = store.get(keys(4), into=memory, lend=True)
            assert transfer.result(20).ok
            assert transfer.released
            assert (memory == payloads(4)).all()


def test_a_loan_and_others_at_once(open_store: Any, keys: Any, payloads: Any) -> None:
    """The same chunks lent, copied and leased together, in every order."""
    store = open_store(dram=0)
    store.put(keys(4), payloads(4), until="disk").result(20)
    for order in ([0, 1, 2], [1, 2, 0], [2, 0, 1]):
        memory = np.frombuffer(mmap.mmap(-1, 4 * CHUNK), np.uint8).reshape(4, CHUNK)
        plain = np.zeros((4, CHUNK), np.uint8)
        calls = [
            lambda memory=memory: store.get(keys(4), into=memory, lend=True),
            lambda plain=plain: store.get(keys(4), into=plain),
            lambda: store.read(keys(4)),
        ]
        transfers = {i: calls[i]() for i in order}
        assert transfers[0].result(20).ok
        assert transfers[1].result(20).ok
        assert (memory == payloads(4)).all()
        assert (plain == payloads(4)).all()
        with transfers[2].result(20) as lease:
            for i, view in enumerate(lease.views):
                if view is None:
                    assert lease.result.reason[i] == Reason.NO_SPACE, "it joined a loan"
                else:
                    assert (view == payloads(4)[i]).all()


def test_a_lease_is_read_only_and_stays(open_store: Any, keys: Any, key: Any, payloads: Any) -> None:
    store = open_store(capacity=MIB, dram=MIB)
    store.put(keys(4), payloads(4), until="disk").result(20)
    with store.read(keys(4)).result(20) as lease:
        assert lease.result.status.tolist() == [HIT] * 4
        for view in lease.views:
            assert view is not None
            with pytest.raises(ValueError, match="read-only"):
                view[0] = 0
        for i in range(100, 160):  # evict what can be
            assert store.put([key(i)], payloads(1)).result(20).ok
        assert store.delete(keys(4)).result(20) == 4
        for i in range(200, 260):
            assert store.put([key(i)], payloads(1)).result(20).ok
        assert all((view == payloads(4)[i]).all() for i, view in enumerate(lease.views))
        assert store.stats()["dram.pinned_slots"] >= 4
    idle(store)
    assert store.stats()["dram.pinned_slots"] == 0


def test_a_lease_larger_than_dram_has_its_head(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store(dram=MIB)
    store.put(keys(40), payloads(40), until="disk").result(20)
    with store.read(keys(40)).result(20) as lease:
        head = lease.result.prefix
        assert head == 16
        assert lease.result.status.tolist() == [HIT] * 16 + [REFUSED] * 24
        assert set(lease.result.reason[16:].tolist()) == {Reason.NO_SPACE}
        assert [view is None for view in lease.views] == [False] * 16 + [True] * 24
        assert all((view == payloads(40)[i]).all() for i, view in enumerate(lease.views[:16]))
        assert got(store, keys(40))[0].ok, "reads land elsewhere"
    assert store.stats()["dram.pinned_slots"] == 0


def test_a_lease_that_nobody_kept_is_released(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store()
    store.put(keys(4), payloads(4)).result(20)
    idle(store)
    lease = store.read(keys(4)).result(20)
    assert store.stats()["dram.pinned_slots"] == 4
    del lease
    end = time.monotonic() + 5
    while store.stats()["dram.pinned_slots"]:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_view_outlives_the_store(open_store: Any, keys: Any, payloads: Any) -> None:
    """The memory stays mapped while anything refers to it: no crash, whatever it holds."""
    store = open_store()
    store.put(keys(1), payloads(1)).result(20)
    lease = store.read(keys(1)).result(20)
    view = lease.views[0]
    store.close()
    assert view is not None
    assert (view == payloads(1)[0]).all()
    lease.release()


# Reservations.


@pytest.mark.parametrize("dram", [0, 2 * MIB])
def test_a_reservation_is_filled_in_place(open_store: Any, keys: Any, payloads: Any, dram: int) -> None:
    store = open_store(dram=dram)
    k, p = keys(4), payloads(4)
    store.put(k[1:2], p[1:2], until="disk").result(20)
    with store.reserve(k, CHUNK) as reservation:
        assert [view is None for view in reservation.views] == [False, True, False, False]
        assert reservation.result.status.tolist() == [STORED, KNOWN, STORED, STORED]
        for i, view in enumerate(reservation.views):
            if view is not None:
                view[:] = p[i]
        assert store.match(k) == 0, "not before it is committed"
        result = reservation.commit(until="disk").result(20)
    assert result.status.tolist() == [STORED, KNOWN, STORED, STORED]
    assert (got(store, k)[1] == p).all()
    store.close()
    assert (got(open_store(dram=dram), k)[1] == p).all()


def test_an_aborted_reservation_leaves_nothing(open_store: Any, keys: Any) -> None:
    store = open_store()
    with store.reserve(keys(4), CHUNK):
        assert store.stats()["dram.pinned_slots"] == 4
    assert store.stats()["dram.pinned_slots"] == 0
    assert store.match(keys(4)) == 0
    assert store.stats()["put.requested"] == 0


def test_a_put_overtakes_a_reservation(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store()
    reservation = store.reserve(keys(1), CHUNK)
    assert store.put(keys(1), payloads(1), until="disk").result(20).ok
    reservation.views[0][:] = 0
    assert reservation.commit(until="disk").result(20).status.tolist() == [KNOWN]
    assert (got(store, keys(1))[1] == payloads(1)).all()


def test_a_reservation_takes_what_there_is(open_store: Any, keys: Any) -> None:
    store = open_store(dram=MIB)
    with store.reserve(keys(20), CHUNK) as reservation:
        assert reservation.result.status.tolist() == [STORED] * 16 + [REFUSED] * 4
        assert reservation.result.reason.tolist() == [0] * 16 + [Reason.NO_SPACE] * 4


# Queues, deadlines, cancelling.


def test_a_thousand_puts_are_enqueued_at_once(open_store: Any, key: Any) -> None:
    store = open_store(capacity=8 * MIB, dram=4 * MIB)
    source = [np.full(1000, i % 256, np.uint8) for i in range(1024)]
    k = [key(i) for i in range(1024)]
    start = time.perf_counter()
    transfer = store.put(k, source)
    assert time.perf_counter() - start < 0.05
    assert transfer.result(20).ok
    assert (got_small(store, k) == np.array([s[0] for s in source])).all()


def got_small(store: kvtier.Store, keys: list[Any]) -> Any:
    targets = np.zeros((len(keys), 1000), np.uint8)
    assert store.get(keys, into=targets).result(20).ok
    assert (targets == targets[:, :1]).all()
    return targets[:, 0]


def test_invariant_7_a_full_queue_refuses_the_tail(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store(max_queued_chunks=4)
    result = store.put(keys(10), payloads(10)).result(20)
    assert result.status.tolist() == [STORED] * 4 + [REFUSED] * 6
    assert result.reason.tolist() == [0] * 4 + [Reason.QUEUE_FULL] * 6
    assert store.stats()["put.queue_full"] == 6
    assert store.put(keys(10)[4:8], payloads(10)[4:8]).result(20).ok, "there is room again"


def stalled(store: kvtier.Store) -> Any:
    """Hold the writer: all of memory is reserved, and a read that may yet free some never ends."""
    slots = []
    for tier in (store._core.dram, store._core.landing):
        while (offset := tier.reserve(CHUNK)) is not None:
            slots.append((tier, offset))
    store._core.reads_are_idle = lambda: False

    def release() -> None:
        with store._core.lock:
            for tier, offset in slots:
                tier.release(offset)
            store._core.reads_are_idle = store._reader.is_idle
            store._core.changed.notify_all()

    return release


def test_a_put_that_waits_can_be_cancelled(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store()
    release = stalled(store)
    running = store.put(keys(1), payloads(1))
    waiting = store.put(keys(3)[1:], payloads(3)[1:])
    assert waiting.cancel()
    result = waiting.result(1)
    assert result.status.tolist() == [Status.FAILED] * 2
    assert result.reason.tolist() == [Reason.CANCELLED] * 2
    assert waiting.copied
    assert not waiting.cancel()
    release()
    assert running.result(20).ok
    assert store.match(keys(3)) == 1
    assert store.stats()["put.cancelled"] == 2


def test_a_put_fails_at_its_deadline(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store()
    release = stalled(store)
    start = time.monotonic()
    transfers = [store.put(keys(2)[i : i + 1], payloads(1), timeout=0.2) for i in range(2)]
    for transfer in transfers:
        result = transfer.result(5)
        assert (result.status[0], result.reason[0]) in [
            (Status.FAILED, Reason.DEADLINE), (REFUSED, Reason.NO_SPACE),
        ]  # fmt: skip
        assert transfer.copied
    assert time.monotonic() - start < 1.2
    release()
    assert store.put(keys(2), payloads(2)).result(20).ok


def test_invariant_7_the_clock_forgets_what_is_done(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store()
    for _ in range(500):
        assert store.put(keys(1), payloads(1)).result(20).ok
    assert len(store._core.clock) < 130


def test_copied_and_released_come_before_the_outcome(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store()
    seen: list[tuple[bool, bool]] = []
    put = store.put(keys(4), payloads(4))
    put.add_done_callback(lambda transfer: seen.append((transfer.copied, True)))
    put.result(20)
    get = store.get(keys(4), into=payloads(4))
    get.add_done_callback(lambda transfer: seen.append((True, transfer.released)))
    get.result(20)
    end = time.monotonic() + 5
    while len(seen) < 2:
        assert time.monotonic() < end
    assert seen == [(True, True)] * 2
    assert get.done()
    assert get.wait_released(0)
    assert put.wait_copied(0)


def test_asyncio(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store()
    k, p = keys(12), payloads(12)

    async def work() -> None:
        puts = [store.put(k[i : i + 3], p[i : i + 3], until="disk") for i in range(0, 12, 3)]
        assert all(result.ok for result in await asyncio.gather(*puts))
        targets = np.zeros_like(p)
        gets = [store.get(k[i : i + 4], into=targets[i : i + 4]) for i in range(0, 12, 4)]
        assert all(result.ok for result in await asyncio.gather(*gets))
        assert (targets == p).all()
        assert (await store.flush()).synced
        with await store.read(k[:2]) as lease:
            assert (lease.views[1] == p[1]).all()
        assert await store.delete(k[:2]) == 2
        assert (await store.get(k[:1], into=[targets[0]])).status[0] == MISS

    asyncio.run(work())


def test_a_cancelled_task_stops_waiting_and_the_put_goes_on(
    open_store: Any, keys: Any, payloads: Any
) -> None:
    store = open_store()
    release = stalled(store)
    transfer = store.put(keys(2), payloads(2))

    async def work() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(waiting(transfer)), 0.05)
        assert not transfer.done()
        release()
        assert (await transfer).ok

    async def waiting(transfer: Any) -> Any:
        return await transfer

    asyncio.run(work())
    assert store.match(keys(2)) == 2


def test_an_outcome_after_its_event_loop(
    open_store: Any, keys: Any, payloads: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop that has ended meanwhile is no trouble."""
    store = open_store()
    release = stalled(store)
    transfer = store.put(keys(1), payloads(1))

    async def work() -> None:
        async def waiting() -> None:
            await transfer

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(waiting(), 0.05)

    asyncio.run(work())
    release()
    assert transfer.result(20).ok
    idle(store)
    assert not caplog.records


# Opening.


@pytest.mark.parametrize(("before", "after"), [(8, 24), (24, 8), (24, 2), (2, 3)])
def test_a_store_reopened_larger_or_smaller(
    open_store: Any, keys: Any, payloads: Any, before: int, after: int
) -> None:
    store = open_store(capacity=before * MIB, dram=0)
    head = store.put(keys(100), payloads(100), until="disk").result(20).prefix
    store.close()
    for _ in range(2):
        store = open_store(capacity=after * MIB, dram=0)
        files = [store.config.path / name for name in ("slab", "journal")]
        assert sum(path.stat().st_size for path in files) <= store.config.capacity
        result, targets = got(store, keys(100))
        there = result.status == HIT
        assert (targets[there] == payloads(100)[there]).all()
        assert set(result.reason[~there].tolist()) <= {Reason.ABSENT}
        assert there.sum() == head if after > before else there.sum() >= min(head, 20)
        assert store.stats()["get.checksum"] == 0
        store.close()
    store = open_store(capacity=after * MIB, dram=0)
    fresh = [k[:-1] + b"f" for k in keys(100)]
    head = store.put(fresh, payloads(100), until="disk").result(20).prefix
    assert head >= 20
    assert (got(store, fresh[:head])[1] == payloads(100)[:head]).all()


def test_capacity_as_it_was_created(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store()
    store.put(keys(2), payloads(2), until="disk").result(20)
    store.close()
    store = open_store(capacity=0)
    assert store.stats()["disk.capacity"] == 8 * MIB
    assert store.match(keys(2)) == 2
    with pytest.raises(InvalidRequest, match="capacity is not given"):
        open_store(store.config.path.parent / "new", capacity=0)


def test_a_store_in_dram_alone(open_store: Any, keys: Any, key: Any, payloads: Any) -> None:
    store = open_store(path=False)
    assert store.put(keys(4), payloads(4)).result(20).ok
    assert (got(store, keys(4))[1] == payloads(4)).all()
    flushed = store.flush().result(20)
    assert flushed.failed == 0
    for i in range(100, 140):
        assert store.put([key(i)], payloads(1)).result(20).ok
    assert store.match(keys(4)) == 0
    assert store.stats()["dram.evictions"] == 12
    assert store.stats()["engine"] == "none"


def test_a_store_without_dram(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store(dram=0)
    assert store.put(keys(30), payloads(30)).result(20).ok
    for _ in range(2):
        result, targets = got(store, keys(30))
        assert result.ok
        assert (targets == payloads(30)).all()
    stats = store.stats()
    assert stats["disk.hits"] == 60
    assert stats["disk.bytes_read"] == 60 * CHUNK
    assert stats["dram.capacity"] == 0


# Invariant 9.


def test_invariant_9_importing_changes_nothing() -> None:
    code = """
import gc, logging, multiprocessing, signal, sys, threading, warnings, asyncio
def state():
    return dict(
        threads=[t.name for t in threading.enumerate()], gc=(gc.isenabled(), gc.get_threshold()),
        signals={s: signal.getsignal(s) for s in signal.valid_signals()},
        logging=(logging.root.handlers[:], logging.root.level), hook=sys.excepthook,
        thread_hook=threading.excepthook, start=multiprocessing.get_start_method(allow_none=True),
        warnings=warnings.filters[:], switch=sys.getswitchinterval(), recursion=sys.getrecursionlimit(),
        policy=type(asyncio.get_event_loop_policy()),
    )
import numpy, xxhash
before = state()
import kvtier
store = kvtier.Store(kvtier.StoreConfig(dram=1 << 20, chunk_bytes=1 << 16))
store.put([bytes(32)], [bytes(10)]).result()
store.close()
after = state()
assert before == after, [n for n in before if before[n] != after[n]]
optional = {"torch", "pydantic", "pydantic_settings", "lz4", "aiofiles", "transformers", "rich", "cyclopts"}
print(sorted(optional & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
