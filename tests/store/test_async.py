"""Queues, deadlines, cancelling, callbacks, and awaiting what a transfer comes to."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvtier import Reason, Status
from kvtier.config import MIB
from small_stores import CHUNK
from store_calls import MISS, REFUSED, STORED, idle

if TYPE_CHECKING:
    import kvtier


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
