"""Reads that are shared, promote what they find, go into lent memory, or lease what is in DRAM."""

from __future__ import annotations

import mmap
import threading
import time
from typing import Any

import numpy as np
import pytest

from kvtier import Reason, TierName
from kvtier.config import MIB
from small_stores import CHUNK
from store_calls import HIT, REFUSED, got, idle


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


def test_invariant_10_a_result_says_which_tier_served_each_hit(
    open_store: Any, keys: Any, payloads: Any
) -> None:
    store = open_store()
    stored = store.put(keys(6), payloads(6), until="disk").result(20)
    assert not stored.tier.any()
    store.close()
    store = open_store()
    none, dram, disk = TierName
    store.prefetch(keys(2)).result(20)
    expected = [dram, dram, disk, disk, none]
    with store.read([*keys(4), bytes(32)[:-1] + b"x"]).result(20) as lease:
        assert lease.result.tier.tolist() == expected
        assert lease.result.tier.dtype == np.uint8
    store.delete(keys(6)[2:4]).result(20)
    result, _ = got(store, keys(6))
    assert result.tier.tolist() == [dram, dram, none, none, disk, disk]
    memory = np.frombuffer(mmap.mmap(-1, 2 * CHUNK), np.uint8).reshape(2, CHUNK)
    lent = store.get(keys(2), into=memory, lend=True).result(20)
    assert lent.tier.tolist() == [dram, dram]
    stats = store.stats()
    # prefetched, leased and got from disk; leased, got and lent from DRAM
    assert (stats["disk.hits"], stats["dram.hits"]) == (2 + 2 + 2, 2 + 2 + 2)


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
