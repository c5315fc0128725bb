"""Disks that fail, lie or hang, engines that give up in mid-load, and stores without room."""

from __future__ import annotations

import errno
import threading
import time
from typing import Any

import numpy as np
import pytest

from engine_sim import CHUNK_TOKENS, blocks, compute, engine_tensors, kv_of, prompt
from kvtier import Reason, Status
from kvtier.connector import load as loading
from kvtier.connector import save as saving
from kvtier.testing.faults import Fault

TOKENS = prompt(6 * CHUNK_TOKENS + 20)
CHUNKS = 6
ENGINES = ["auto", "threads"]


def saved(connector: Any, tensors: Any, tokens: list[int] = TOKENS) -> None:
    table = blocks(-(-len(tokens) // 16), seed=7)
    compute(tensors, tokens, table)
    with connector.request(tokens) as request:
        assert connector.save(request, table, until="disk", timeout=20.0).result(20).ok
    tensors.plain[:] = -1


def chunk_of(table: Any, number: int) -> Any:
    return table[number * 4 : number * 4 + 4]


def started(connector: Any, tensors: Any, table: Any, **options: Any) -> Any:
    with connector.request(TOKENS) as request:
        found = connector.match(request)
        assert found == CHUNKS * CHUNK_TOKENS
        return connector.load(request, table, 0, found, **options)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"errno": errno.EIO}, Reason.IO_ERROR),
        ({"flip_bit": 4097}, Reason.CHECKSUM),
    ],
)
def test_a_load_says_which_blocks_to_compute(
    disk_store: Any, device: Any, connect: Any, engine: str, fault: dict[str, int], reason: Reason
) -> None:
    """Some reads fail: no wrong byte is in a block that counts as loaded, and no other block is touched."""
    store = disk_store(engine=engine)
    connector, tensors = connect(store)
    saved(connector, tensors)
    device.inject(Fault(op="read", file="slab", nth=3, count=2, **fault))
    table = blocks(24, seed=1)
    result = started(connector, tensors, table).result(20)
    bad = np.flatnonzero(result.chunks.status != Status.HIT)
    assert 1 <= len(bad) <= 2
    assert set(result.chunks.reason[bad].tolist()) == {reason}
    assert result.invalid_blocks.tolist() == [b for i in bad for b in chunk_of(table, i)]
    assert result.tokens == bad[0] * CHUNK_TOKENS
    expected = kv_of(TOKENS, tensors)
    for i in range(CHUNKS):
        held = tensors.tokens(chunk_of(table, i))
        if i in bad:
            assert (held == -1).all(), "what did not come was not written"
        else:
            assert (held == expected[:, :, i * 64 : i * 64 + 64]).all()
    numbers = connector.stats()
    assert numbers["load.hit"] == CHUNKS - len(bad)
    assert numbers[f"load.{reason.name.lower()}"] == len(bad)


def test_a_device_that_is_gone_costs_a_recompute_only(disk_store: Any, device: Any, connect: Any) -> None:
    connector, tensors = connect(disk_store())
    saved(connector, tensors)
    device.inject(Fault(op="read", errno=errno.ENODEV))
    table = blocks(25, seed=1)
    result = started(connector, tensors, table).result(20)
    assert (result.tokens, result.invalid_blocks.tolist()) == (0, table[:24])
    assert (tensors.plain == -1).all()
    device.clear_faults()
    compute(tensors, TOKENS, table)
    with connector.request(TOKENS) as request:
        again = connector.save(request, table, until="disk", timeout=20.0).result(20)
    assert again.ok, "what could not be read is stored anew"


def test_loads_are_read_one_after_another(
    disk_store: Any, device: Any, connect: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions that come at once and are larger than what is read ahead do not all wait for the last."""
    monkeypatch.setattr(loading, "READ_AHEAD", 2 * 65536)
    store = disk_store(io_window=65536)
    connector, tensors = connect(store)
    prompts = [TOKENS, prompt(len(TOKENS), seed=1)]
    for tokens in prompts:
        saved(connector, tensors, tokens)
    hang = device.inject(Fault(op="read", file="slab", hang=True))
    loads, order = [], []
    for tokens, table in zip(prompts, (blocks(48)[:24], blocks(48)[24:]), strict=True):
        with connector.request(tokens) as request:
            loads.append(connector.load(request, table, 0, connector.match(request)))
            order += request.keys
    waiting = store._core.paths[0].waiting
    eventually(lambda: len(waiting) == 2 * CHUNKS - 1)
    assert [flight.key for flight in waiting] == order[1:]
    hang.remove()
    assert [load.result(20).tokens for load in loads] == [CHUNKS * CHUNK_TOKENS] * 2


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_written_after_release(
    disk_store: Any, device: Any, connect: Any, eventually: Any, engine: str
) -> None:
    """A request is aborted while the device hangs: its blocks are the engine's at once, for good."""
    store = disk_store(engine=engine)
    connector, tensors = connect(store)
    saved(connector, tensors)
    hang = device.inject(Fault(op="read", file="slab", hang=True))
    table = blocks(24, seed=1)
    load = started(connector, tensors, table)
    eventually(lambda: device.stats()[0].hanging)
    assert not load.done()
    assert not load.released
    assert load.cancel()
    assert load.released, "no device is waited for"
    result = load.result(0)
    assert result.tokens == 0
    assert set(result.chunks.reason.tolist()) == {Reason.CANCELLED}
    assert not load.cancel()
    others = prompt(6 * CHUNK_TOKENS, seed=5)
    compute(tensors, others, table)  # preempted: another request's KV is in them now
    hang.remove()
    eventually(lambda: store.stats()["landing.pinned_slots"] == 0)
    assert (tensors.tokens(table) == kv_of(others, tensors)).all()
    retry = started(connector, tensors, blocks(24, seed=2)).result(20)
    assert retry.tokens == CHUNKS * CHUNK_TOKENS


def test_a_load_ends_at_its_deadline(disk_store: Any, device: Any, connect: Any, eventually: Any) -> None:
    store = disk_store()
    connector, tensors = connect(store)
    saved(connector, tensors)
    device.inject(Fault(op="read", file="slab", hang=True))
    before = time.monotonic()
    table = blocks(24, seed=1)
    load = started(connector, tensors, table, timeout=0.3)
    result = load.result(10)
    assert time.monotonic() - before >= 0.3
    assert load.released
    assert (result.tokens, result.invalid_blocks.tolist()) == (0, table)
    assert Reason.DEADLINE in result.chunks.reason
    device.clear_faults()
    eventually(lambda: store.stats()["landing.pinned_slots"] == 0)
    assert (tensors.plain == -1).all()


def test_a_load_that_waits_for_a_disk_holds_up_no_other(
    disk_store: Any, device: Any, connect: Any, eventually: Any
) -> None:
    store = disk_store()
    connector, tensors = connect(store)
    saved(connector, tensors)
    store.close()
    store = disk_store(dram=2 << 20)
    connector, tensors = connect(store)
    recent = prompt(CHUNK_TOKENS * 2, seed=8)
    saved(connector, tensors, recent)
    device.inject(Fault(op="read", file="slab", hang=True))
    slow = started(connector, tensors, blocks(24, seed=1))
    eventually(lambda: device.stats()[0].hanging)
    with connector.request(recent) as request:
        table = blocks(64, seed=1)[24:32]
        fast = connector.load(request, table, 0, connector.match(request)).result(20)
    assert fast.tokens == 2 * CHUNK_TOKENS
    assert not slow.done()
    assert slow.cancel()
    device.clear_faults()


def test_blocks_are_the_callers_when_a_copy_under_way_is_done(open_store: Any, connect: Any) -> None:
    connector, tensors = connect(open_store())
    saved(connector, tensors)
    copier, entered, go_on = connector._copier, threading.Event(), threading.Event()
    scatter = copier.scatter

    def held(*args: Any) -> None:
        entered.set()
        assert go_on.wait(20)
        scatter(*args)

    copier.scatter = held
    table = blocks(24, seed=1)
    load = started(connector, tensors, table)
    assert entered.wait(20)
    assert not load.cancel(), "all of it is being copied"
    assert not load.released
    assert not load.wait_released(0.05)
    fenced = threading.Thread(target=connector.fence, args=(table[:1],))
    fenced.start()
    fenced.join(0.05)
    assert fenced.is_alive()
    go_on.set()
    fenced.join(20)
    assert not fenced.is_alive()
    assert load.released
    result = load.result(20)
    expected = kv_of(TOKENS, tensors)[:, :, : result.tokens]
    assert (tensors.tokens(table)[:, :, : result.tokens] == expected).all()


def test_a_copy_that_fails_is_a_recompute(open_store: Any, connect: Any) -> None:
    connector, tensors = connect(open_store())
    saved(connector, tensors)

    def broken(*_: Any) -> None:
        raise RuntimeError("an error of the device")

    connector._copier.scatter = broken
    result = started(connector, tensors, blocks(24, seed=1)).result(20)
    assert result.tokens == 0
    assert Reason.IO_ERROR in result.chunks.reason
    connector._copier.gather = broken
    with connector.request(prompt(200, seed=3)) as request:
        save = connector.save(request, blocks(13))
        assert set(save.result(20).reason.tolist()) == {Reason.IO_ERROR}
        assert save.copied


def test_chunks_in_dram_are_checked_if_the_store_is_to(open_store: Any, connect: Any) -> None:
    store = open_store(check_dram=True, paths=(), capacity=0)
    connector, tensors = connect(store)
    table = blocks(25, seed=7)
    compute(tensors, TOKENS, table)
    with connector.request(TOKENS) as request:
        assert connector.save(request, table).result(20).ok
        assert connector.load(request, table, 0, 384).result(20).tokens == 384
        dram = store._core.dram
        dram.view(dram.index.offset[dram.find(request.keys[2])], 65536)[1000] ^= 16
        tensors.plain[:] = -1
        result = connector.load(request, table, 0, 384).result(20)
    assert result.tokens == 2 * CHUNK_TOKENS
    assert result.chunks.reason[2] == Reason.CHECKSUM
    assert (tensors.tokens(chunk_of(table, 2)) == -1).all()


def test_a_cancel_at_any_moment_is_the_end_of_writes(
    disk_store: Any, device: Any, connect: Any, eventually: Any
) -> None:
    store = disk_store(dram=4 * 65536)
    connector, tensors = connect(store)
    saved(connector, tensors)
    device.inject(Fault(op="read", file="slab", delay=0.001, probability=0.5))
    draw = np.random.default_rng(0)
    for i in range(60):
        table = blocks(24, seed=i)
        load = started(connector, tensors, table)
        time.sleep(draw.random() * 0.004)
        load.cancel()
        assert load.wait_released(20)
        tensors.plain[:] = i
        time.sleep(draw.random() * 0.002)
        assert (tensors.plain == i).all()
    device.clear_faults()
    eventually(lambda: store.stats()["landing.pinned_slots"] == 0)
    assert (tensors.plain == i).all()


def test_a_store_that_is_full_keeps_no_blocks(
    disk_store: Any, device: Any, connect: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes hang: the engine has its blocks back all the same, and what found no slot has a reason."""
    monkeypatch.setattr(saving, "STAGING", 8 * 65536)
    store = disk_store(dram=4 * 65536, landing=65536)
    connector, tensors = connect(store)
    device.inject(Fault(op="write", file="slab", hang=True))
    table = blocks(25, seed=7)
    compute(tensors, TOKENS, table)
    with connector.request(TOKENS) as request, connector.request([5, *TOKENS]) as second:
        first = connector.save(request, table, timeout=0.5)
        assert first.wait_copied(20)
        assert not first.done()
        shed = connector.save(second, table, timeout=0.5)
        connector.fence(table)
        assert shed.copied
        result = first.result(20)
        assert result.status.tolist()[:4] == [Status.STORED] * 4
        reasons = {Reason.NONE, Reason.DEADLINE, Reason.NO_SPACE, Reason.TIER_DOWN}
        assert set(result.reason.tolist()[4:]) <= reasons
        result = shed.result(20)
        assert result.prefix == 0
        assert result.reason.tolist()[2:] == [Reason.NO_SPACE] * 4, "no memory to wait with"
    device.clear_faults()
    with connector.request(TOKENS) as request:
        eventually(lambda: connector.save(request, table, until="disk").result(20).ok)


def test_a_save_that_is_cancelled_stores_nothing(
    open_store: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_LOT_BYTES", 65536)
    connector, tensors = connect(open_store())
    entered, go_on = threading.Event(), threading.Event()
    gather = connector._copier.gather

    def held(*args: Any) -> None:
        entered.set()
        assert go_on.wait(20)
        gather(*args)

    connector._copier.gather = held
    table = blocks(25, seed=7)
    compute(tensors, TOKENS, table)
    with connector.request(TOKENS) as request:
        save = connector.save(request, table)
        waiting = connector.save(request, table)
        assert entered.wait(20)
        assert save.cancel()
        assert waiting.cancel()
        assert not save.copied, "a copy is under way"
        assert waiting.copied
        go_on.set()
        assert save.wait_copied(20)
        for transfer in (save, waiting):
            assert set(transfer.result(20).reason.tolist()) == {Reason.CANCELLED}
        assert connector.match(request) == 0
        assert connector.save(request, table).result(20).ok


def test_a_quota_keeps_the_head(disk_store: Any, connect: Any) -> None:
    connector, tensors = connect(disk_store(dram=2 << 20, quotas={"acme": 4 * 65536}))
    table = blocks(25, seed=7)
    compute(tensors, TOKENS, table)
    with connector.request(TOKENS, tenant="acme") as request:
        result = connector.save(request, table, until="disk").result(20)
        assert result.status.tolist() == [Status.STORED] * 4 + [Status.REFUSED] * 2
        assert result.reason.tolist() == [Reason.NONE] * 4 + [Reason.QUOTA] * 2
        assert connector.match(request) == 4 * CHUNK_TOKENS
    assert connector.stats()["save.quota"] == 2
    owners = {(usage.tenant, usage.tier): usage.chunks for usage in connector._store.owners()}
    assert owners["acme", "disk"] == 4


def test_a_fence_finishes_saves_and_cancels_loads(
    disk_store: Any, device: Any, connect: Any, eventually: Any
) -> None:
    connector, tensors = connect(disk_store(), engine_tensors(block=128))
    saved(connector, tensors)
    hang = device.inject(Fault(op="read", file="slab", hang=True))
    load = started(connector, tensors, range(24))
    eventually(lambda: device.stats()[0].hanging)
    tokens = prompt(6 * CHUNK_TOKENS, seed=5)
    table = list(range(40, 64))
    compute(tensors, tokens, table)
    with connector.request(tokens) as request:
        save = connector.save(request, table)
        connector.fence(range(100, 110))
        assert not load.done()
        connector.fence(table[:1])
        assert save.copied
        assert not load.done()
        tensors.fill(table, np.zeros_like(kv_of(tokens, tensors)))  # used for something else
        connector.fence([3])
        assert load.released
        assert save.result(20).ok
        hang.remove()
        assert connector.load(request, range(64, 88), 0, connector.match(request)).result(20).tokens == 384
    assert (tensors.tokens(range(64, 88)) == kv_of(tokens, tensors)).all()


def test_too_much_at_once_is_refused(disk_store: Any, device: Any, connect: Any, eventually: Any) -> None:
    connector, tensors = connect(disk_store(max_queued_chunks=10))
    saved(connector, tensors)
    hang = device.inject(Fault(op="read", file="slab", hang=True))
    first = started(connector, tensors, blocks(24, seed=1))
    second = started(connector, tensors, blocks(64, seed=1)[24:48])
    result = second.result(20)
    assert second.released
    assert result.tokens == 0
    assert set(result.chunks.reason.tolist()) == {Reason.QUEUE_FULL}
    with connector.request(TOKENS) as request:
        save = connector.save(request, blocks(24))
        assert set(save.result(20).reason.tolist()) == {Reason.QUEUE_FULL}
        assert save.copied
    hang.remove()
    assert first.result(20).tokens == CHUNKS * CHUNK_TOKENS


def test_a_store_that_closes_in_mid_load(disk_store: Any, device: Any, connect: Any, eventually: Any) -> None:
    store = disk_store(close_timeout=0.5, check_leaks=False)
    connector, tensors = connect(store)
    saved(connector, tensors)
    device.inject(Fault(op="read", file="slab", hang=True))
    load = started(connector, tensors, blocks(24, seed=1))
    eventually(lambda: device.stats()[0].hanging)
    store.close()
    result = load.result(20)
    assert result.tokens == 0
    assert Reason.CLOSED in result.chunks.reason
    assert load.released
    device.clear_faults()
