"""What goes when a tier is full: tails before heads, old before young, and never what is pinned."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from kvtier import Reason
from kvtier.config import MIB
from small_stores import CHUNK
from store_calls import KNOWN, REFUSED, STORED, got, idle

if TYPE_CHECKING:
    import kvtier


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
    in_tier = store._core.dram if tier == "dram" else store._core.paths[0].tier
    rows = [in_tier.find(k) for k in keys(8)]
    assert -1 not in rows, "KNOWN, and evicted by what comes behind it"


def test_a_get_larger_than_dram_keeps_its_head_there_for_the_next(
    open_store: Any, keys: Any, payloads: Any
) -> None:
    store = open_store(dram=MIB, io_window=CHUNK)
    store.put(keys(40), payloads(40), until="disk").result(20)
    engine = store._core.paths[0].engine
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
    monkeypatch.setattr("kvtier.store.paths._MAX_BATCH_BYTES", CHUNK)
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
