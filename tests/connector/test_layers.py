"""Loads layer by layer: what a wait for a layer says is in the blocks is there, and never a wrong byte."""

from __future__ import annotations

import errno
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from engine_kv import KNOWN
from engine_sim import CHUNK_TOKENS, blocks, compute, engine_tensors, kv_of, prompt
from kvtier import Reason, Status
from kvtier.config import KIB, MIB
from kvtier.store import flight
from kvtier.testing.faults import Fault

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS = 8
CHUNKS = 6
CHUNK_BYTES = 256 * KIB
PIECES = 4  # of a chunk, so of two layers each
TOKENS = prompt(CHUNKS * CHUNK_TOKENS + 20)
ALL = CHUNKS * CHUNK_TOKENS

IN_ORDER: dict[str, Any] = {"engine": "threads", "io_threads": 1}  # so that a read's number tells its place


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "PIECE_BYTES", CHUNK_BYTES // PIECES)


@pytest.fixture
def stored(disk_store: Any, connect: Any) -> Callable[..., Any]:
    """`stored(layout, **settings)`: connector and tensors of a store that has TOKENS on the device only."""

    def make(layout: str = "NHD, keys and values apart", codec: str = "raw", **settings: Any) -> Any:
        settings = {"chunk_bytes": CHUNK_BYTES, "dram": 8 * MIB, "io_window": CHUNK_BYTES, **settings}
        tensors = engine_tensors(layout, layer=LAYERS)
        store = disk_store(**settings)
        connector, _ = connect(store, tensors, codec=codec)
        table = blocks(25, seed=7)
        compute(tensors, TOKENS, table)
        with connector.request(TOKENS) as request:
            assert connector.save(request, table, until="disk", timeout=20.0).result(20).ok
        connector.close()
        store.close()
        tensors.plain[:] = -1
        return connect(disk_store(**settings), tensors)

    return make


def started(connector: Any, table: Any, **options: Any) -> Any:
    with connector.request(TOKENS) as request:
        assert connector.match(request) == ALL
        return connector.load(request, table, 0, ALL, by_layer=True, **options)


def assert_holds(tensors: Any, table: Any, tokens: int, layers: int = LAYERS) -> None:
    held = tensors.tokens(table)[:layers, :, :tokens]
    assert (held == kv_of(TOKENS, tensors)[:layers, :, :tokens]).all()


@pytest.mark.parametrize("layout", sorted(KNOWN))
def test_each_layer_is_there_when_it_is_waited_for(stored: Any, layout: str) -> None:
    connector, tensors = stored(layout)
    table = blocks(24, seed=1)
    load = started(connector, table)
    for layer in range(LAYERS):
        assert load.wait_layer(layer, 20) == ALL
        assert_holds(tensors, table, ALL, layer + 1)
    result = load.result(20)
    assert (result.tokens, result.invalid_blocks.size) == (ALL, 0)
    others = np.setdiff1d(np.arange(64), table)
    assert (tensors.tokens(others) == -1).all()
    assert load.wait_layer(LAYERS - 1) == ALL


def test_the_first_layer_does_not_wait_for_the_last(stored: Any, device: Any) -> None:
    connector, tensors = stored(**IN_ORDER)
    hang = device.inject(Fault(op="read", file="slab", nth=CHUNKS * 2 + 1, hang=True))
    table = blocks(24, seed=1)
    load = started(connector, table)
    assert load.wait_layer(1, 20) == ALL
    assert_holds(tensors, table, ALL, 2)
    assert not load.done()
    with pytest.raises(TimeoutError, match="layer 7"):
        load.wait_layer(LAYERS - 1, 0.05)
    assert (tensors.tokens(table)[LAYERS - 1] == -1).all()
    hang.remove()
    assert load.wait_layer(LAYERS - 1, 20) == ALL
    assert load.result(20).tokens == ALL


@pytest.mark.parametrize(
    ("fault", "reason"),
    [({"errno": errno.EIO}, Reason.IO_ERROR), ({"flip_bit": 4097}, Reason.CHECKSUM)],
)
@pytest.mark.parametrize("piece", range(PIECES))
def test_a_bad_part_is_told_before_its_layer_is_used(
    stored: Any, device: Any, fault: dict[str, int], reason: Reason, piece: int
) -> None:
    """The chunk's earlier layers were released; from the bad one on it, and all behind it, do not count."""
    connector, tensors = stored(**IN_ORDER)
    device.inject(Fault(op="read", file="slab", nth=CHUNKS * piece + 3, count=1, **fault))
    table = blocks(24, seed=1)
    load = started(connector, table)
    told = []
    for layer in range(LAYERS):
        told.append(load.wait_layer(layer, 20))
        assert_holds(tensors, table, told[-1], layer + 1)
    assert told == sorted(told, reverse=True)
    result = load.result(20)
    assert told[-1] == result.tokens < ALL
    bad = result.tokens // CHUNK_TOKENS
    assert result.chunks.reason[bad] == reason
    assert all(tokens <= result.tokens for tokens in told[piece * 2 :])
    valid = np.flatnonzero(result.chunks.status == Status.HIT)
    assert_holds(tensors, table, result.tokens)
    missing = [b for i in range(CHUNKS) if i not in valid for b in table[i * 4 : i * 4 + 4]]
    assert result.invalid_blocks.tolist() == missing


def test_a_deadline_in_mid_load_says_that_nothing_counts(stored: Any, device: Any, eventually: Any) -> None:
    connector, _ = stored(**IN_ORDER)
    device.inject(Fault(op="read", file="slab", nth=CHUNKS * 2 + 1, hang=True))
    load = started(connector, blocks(24, seed=1), timeout=3.0)
    assert load.wait_layer(0, 20) == ALL
    before = time.monotonic()
    assert load.wait_layer(LAYERS - 1, 20) == 0
    assert time.monotonic() - before < 15
    result = load.result(20)
    assert result.tokens == 0
    assert result.chunks.reason[0] == Reason.DEADLINE
    assert load.released
    device.clear_faults()
    eventually(lambda: connector._store.stats()["dram.pinned_slots"] == 0)


def test_a_cancel_wakes_who_waits_and_ends_all_writes(stored: Any, device: Any, eventually: Any) -> None:
    connector, tensors = stored(**IN_ORDER)
    hang = device.inject(Fault(op="read", file="slab", nth=CHUNKS * 2 + 1, hang=True))
    table = blocks(24, seed=1)
    load = started(connector, table)
    assert load.wait_layer(0, 20) == ALL
    woken: list[int] = []
    waiter = threading.Thread(target=lambda: woken.append(load.wait_layer(LAYERS - 1)))
    waiter.start()
    assert load.cancel()
    waiter.join(20)
    assert woken == [0]
    assert load.wait_released(20)
    tensors.plain[:] = 5
    hang.remove()
    eventually(lambda: connector._store.stats()["dram.pinned_slots"] == 0)
    assert (tensors.plain == 5).all()


def test_a_fence_ends_a_load_in_mid_layer(stored: Any, device: Any) -> None:
    connector, tensors = stored(**IN_ORDER)
    device.inject(Fault(op="read", file="slab", nth=CHUNKS + 1, hang=True))
    table = blocks(24, seed=1)
    load = started(connector, table)
    assert load.wait_layer(0, 20) == ALL
    connector.fence(table[:1])
    assert load.released
    tensors.plain[:] = 5
    device.clear_faults()
    assert load.result(20).tokens == 0
    assert (tensors.plain == 5).all()


def test_a_cancel_at_any_moment_is_the_end_of_writes(stored: Any, device: Any, eventually: Any) -> None:
    connector, tensors = stored(dram=0, landing=16 * CHUNK_BYTES)
    device.inject(Fault(op="read", file="slab", delay=0.001, probability=0.5))
    draw = np.random.default_rng(0)
    for i in range(30):
        table = blocks(24, seed=i)
        load = started(connector, table)
        time.sleep(draw.random() * 0.01)
        load.cancel()
        assert load.wait_released(20)
        result = load.result(20)
        assert_holds(tensors, table, result.tokens)
        tensors.plain[:] = i
        time.sleep(draw.random() * 0.002)
        assert (tensors.plain == i).all()
    eventually(lambda: connector._store.stats()["landing.pinned_slots"] == 0)
    assert (tensors.plain == i).all()


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "files"},
        {"codec": "lz4"},
        {"check_dram": True},
        {"dram": 8 * CHUNK_BYTES},
        {"dram": 0, "landing": 4 * CHUNK_BYTES},
        {"dram": 0, "landing": 16 * CHUNK_BYTES},
        {"engine": "threads"},
        {"engine": "aio"},
    ],
    ids=str,
)
def test_whatever_the_store_is_like(stored: Any, settings: dict[str, Any]) -> None:
    connector, tensors = stored(**settings)
    table = blocks(24, seed=1)
    load = started(connector, table)
    for layer in range(LAYERS):
        assert load.wait_layer(layer, 20) == ALL
        assert_holds(tensors, table, ALL, layer + 1)
    assert load.result(20).tokens == ALL


def test_chunks_in_dram_come_layer_by_layer(stored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.connector import layers as module

    connector, tensors = stored()
    assert started(connector, blocks(24, seed=1)).result(20).tokens == ALL
    monkeypatch.setattr(module, "_STEP_BYTES", 1)
    steps = []
    scatter = connector._copier.scatter
    connector._copier.scatter = lambda *args: (steps.append(args[3]), scatter(*args))
    tensors.plain[:] = -1
    table = blocks(24, seed=2)
    load = started(connector, table)
    assert load.wait_layer(0, 20) == ALL
    result = load.result(20)
    assert result.by_tier[1] == ALL
    assert steps == [range(2 * layer, 2 * layer + 2) for layer in range(LAYERS)]
    assert_holds(tensors, table, ALL)


def test_a_part_of_the_chunks_from_dram_and_the_rest_from_disk(stored: Any) -> None:
    connector, tensors = stored()
    with connector.request(TOKENS) as request:
        connector.load(request, blocks(24), 0, 2 * CHUNK_TOKENS).result(20)
        start, end = 16, ALL - 32
        connector.match(request, computed=start)
        tensors.plain[:] = -1
        table = blocks(24, seed=3)
        load = connector.load(request, table, start, end, by_layer=True)
        assert load.wait_layer(LAYERS - 1, 20) == end - start
        result = load.result(20)
    assert result.tokens == sum(result.by_tier.values()) == end - start
    wanted = table[1:22]
    assert (tensors.tokens(wanted) == kv_of(TOKENS, tensors)[:, :, start:end]).all()
    assert (tensors.tokens(np.setdiff1d(np.arange(64), wanted)) == -1).all()


def test_a_copy_that_fails_in_mid_load(stored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kvtier.connector.layers._STEP_BYTES", 1
    )  # a layer at a time, however quick the reads
    connector, _ = stored()
    scatter, count = connector._copier.scatter, [0]

    def breaks(*args: Any) -> None:
        count[0] += 1
        if count[0] > 3:
            raise RuntimeError("an error of the device")
        scatter(*args)

    connector._copier.scatter = breaks
    load = started(connector, blocks(24, seed=1))
    assert load.wait_layer(LAYERS - 1, 20) < ALL
    result = load.result(20)
    assert Reason.IO_ERROR in result.chunks.reason
    assert result.tokens < ALL


def test_nothing_to_load_is_over_at_once(stored: Any) -> None:
    connector, _ = stored()
    with connector.request(TOKENS) as request:
        load = connector.load(request, [], 0, 0, by_layer=True)
    assert load.wait_layer(3, 1) == 0


def test_a_load_in_the_usual_order_waits_for_all_of_it(stored: Any) -> None:
    connector, tensors = stored()
    table = blocks(24, seed=1)
    with connector.request(TOKENS) as request:
        load = connector.load(request, table, 0, ALL)
        assert load.wait_layer(0, 20) == ALL
        assert_holds(tensors, table, ALL)


def test_a_store_that_closes_in_mid_load(stored: Any, device: Any) -> None:
    connector, _ = stored(close_timeout=0.5, check_leaks=False, **IN_ORDER)
    device.inject(Fault(op="read", file="slab", nth=CHUNKS * 2 + 1, hang=True))
    load = started(connector, blocks(24, seed=1))
    assert load.wait_layer(0, 20) == ALL
    connector._store.close()
    assert load.wait_layer(LAYERS - 1, 20) == 0
    assert Reason.CLOSED in load.result(20).chunks.reason
    device.clear_faults()


def test_a_connector_that_closes_in_mid_load(stored: Any, device: Any, eventually: Any) -> None:
    connector, _ = stored(**IN_ORDER)
    device.inject(Fault(op="read", file="slab", nth=CHUNKS * 2 + 1, hang=True))
    load = started(connector, blocks(24, seed=1))
    assert load.wait_layer(0, 20) == ALL
    connector.close()
    assert load.wait_layer(LAYERS - 1, 20) == 0
    device.clear_faults()
    eventually(lambda: connector._store.stats()["dram.pinned_slots"] == 0)
