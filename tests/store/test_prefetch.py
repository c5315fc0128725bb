"""Chunks brought into DRAM ahead of the get that wants them."""

from __future__ import annotations

from typing import Any

from kvtier import Reason
from kvtier.config import MIB
from small_stores import CHUNK
from store_calls import HIT, MISS, REFUSED, got


def test_what_was_prefetched_costs_no_read(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store()
    store.put(keys(8), payloads(8), until="disk").result(20)
    store.close()
    store = open_store()
    assert store.prefetch(keys(8)).result(20).status.tolist() == [HIT] * 8
    assert store.stats()["disk.bytes_read"] == 8 * CHUNK
    assert store.stats()["dram.pinned_slots"] == 0
    result, targets = got(store, keys(8))
    assert result.ok
    assert (targets == payloads(8)).all()
    assert store.stats()["disk.bytes_read"] == 8 * CHUNK
    assert store.stats()["dram.hits"] == 8


def test_more_than_dram_holds_keeps_its_head(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store(dram=0)
    store.put(keys(40), payloads(40), until="disk").result(20)
    store.close()
    store = open_store(dram=MIB)
    result = store.prefetch(keys(40)).result(20)
    assert result.prefix == 16
    assert result.status[16:].tolist() == [REFUSED] * 24
    assert set(result.reason[16:].tolist()) == {Reason.NO_SPACE}
    assert got(store, keys(16))[0].ok
    assert store.stats()["dram.hits"] == 16


def test_a_missing_chunk_is_a_miss(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store()
    store.put(keys(2), payloads(2)).result(20)
    result = store.prefetch(keys(3)).result(20)
    assert result.status.tolist() == [HIT, HIT, MISS]


def test_without_dram_there_is_nowhere_to_bring_it(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store(dram=0)
    store.put(keys(2), payloads(2), until="disk").result(20)
    result = store.prefetch(keys(2)).result(20)
    assert result.status.tolist() == [REFUSED] * 2
    assert store.stats()["disk.bytes_read"] == 0
