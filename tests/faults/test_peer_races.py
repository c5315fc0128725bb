"""Faults that users met in other KV caches: memory that runs out, concurrency, and what a key stands for.

See `test_peer_faults.py`.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import kvtier
from kvtier import Reason, Status
from kvtier.config import MIB
from small_stores import CHUNK, pinned_slots
from store_calls import HIT, MISS, got, outcome, put_and_get


def numbered(key: Any, payload: Any, numbers: range) -> tuple[list[Any], Any]:
    return [key(i) for i in numbers], np.stack([payload(i) for i in numbers])


# Memory that runs out.


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_a_load_larger_than_the_staging_pool(open_store: Any, key: Any, payload: Any, engine: str) -> None:
    """LMCache #2942 (spins for ever), #3855 #4036 (wrong bytes as hits, and the lock never let go): 24 chunks
    through memory for 8, several times at once."""
    store = open_store(dram=0, landing=8 * CHUNK, engine=engine)
    keys, values = numbered(key, payload, range(24))
    assert store.put(keys, values, until="disk").result(20).ok
    targets = [np.zeros((24, CHUNK), np.uint8) for _ in range(4)]
    loads = [store.get(keys, into=target) for target in targets]
    for load, target in zip(loads, targets, strict=True):
        assert load.result(20).ok
        assert (target == values).all()
    leased = store.read(keys).result(20)
    held = [i for i, view in enumerate(leased.views) if view is not None]
    assert held == list(range(len(held))), "the head of it"
    assert {outcome(leased.result, i) for i in range(len(held), 24)} == {(Status.REFUSED, Reason.NO_SPACE)}
    assert all((leased.views[i] == values[i]).all() for i in held)
    leased.release()
    assert (got(store, keys)[1] == values).all()


# Concurrency.


def test_two_who_store_one_key_collide(open_store: Any, key: Any, payload: Any) -> None:
    """LMCache #4991 (60 of 100 rounds failed): both write to one temporary name."""
    store = open_store()
    failed: list[Any] = []

    def work(start: threading.Barrier) -> None:
        for i in range(50):
            start.wait(20)
            result = store.put([key(i)], [payload(i)], until="disk").result(20)
            if not result.ok:
                failed.append(result)

    start = threading.Barrier(4)
    threads = [threading.Thread(target=work, args=(start,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert store.stats()["put.stored"] == 50
    keys, values = numbered(key, payload, range(50))
    assert (got(store, keys)[1] == values).all()


@pytest.mark.parametrize("dram", [0, MIB])
def test_readers_and_writers_race_on_a_shared_prefix(
    open_store: Any, key: Any, payload: Any, dram: int
) -> None:
    """LMCache #207 #2706: whoever reads while others write, delete and write again gets the right bytes."""
    store = open_store(dram=dram, capacity=2 * MIB)
    keys, values = numbered(key, payload, range(40))  # more than the disk holds
    wrong: list[str] = []
    hits = [0]
    stop = threading.Event()

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not stop.is_set():
            first = int(rng.integers(0, 30))
            some = slice(first, first + 8)
            result, targets = got(store, keys[some])
            for status, target, value in zip(result.status, targets, values[some], strict=True):
                if status > MISS:
                    wrong.append(repr(result))
                elif status == HIT:
                    hits[0] += 1
                    if (target != value).any():
                        wrong.append("bytes")

    readers = [threading.Thread(target=read, args=(i,)) for i in range(3)]
    for reader in readers:
        reader.start()
    rng = np.random.default_rng(9)
    for _ in range(60):
        first = int(rng.integers(0, 32))
        assert store.put(keys[first : first + 8], values[first : first + 8], until="disk").result(20).ok
        if rng.random() < 0.5:
            store.delete(keys[first : first + 4]).result(20)
    stop.set()
    for reader in readers:
        reader.join(60)
    assert not wrong
    assert hits[0] > 100


def test_eviction_between_lookup_and_read_raises(open_store: Any, key: Any, payload: Any) -> None:
    """LMCache #4405 #4133 (the engine dies): a miss; and a hit for who pins in between."""
    store = open_store(capacity=MIB)
    prefix, values = numbered(key, payload, range(4))
    assert store.put(prefix, values, until="disk").result(10).ok
    with store.pin(prefix) as count:
        assert count == 4
        others, payloads = numbered(key, payload, range(100, 140))
        for other, value in zip(others, payloads, strict=True):
            assert store.put([other], [value], until="disk").result(10).ok
        assert (got(store, prefix)[1] == values).all()
    assert store.match(prefix) == 4
    for other, value in zip(others, payloads, strict=True):
        store.delete([other]).result(10)
        assert store.put([other], [value], until="disk").result(10).ok
    result, _ = got(store, prefix)
    assert {outcome(result, i) for i in range(4)} == {(MISS, Reason.ABSENT)}


def test_the_pin_count_becomes_negative(open_store: Any, key: Any, payload: Any) -> None:
    """LMCache #3381 #2954 #3650, "double unpin": whatever the order of pins, leases, deletes and releases."""
    store = open_store(dram=MIB)
    keys, values = numbered(key, payload, range(4))

    def pinned() -> int:
        return sum(
            int(v) for n, v in store.stats().items() if n in ("dram.pinned_slots", "disk.pinned_slots")
        )

    for _ in range(3):
        assert store.put(keys, values, until="disk").result(10).ok
        store.flush().result(10)
        lease = store.read(keys).result(10)
        with store.pin(keys), store.pin(keys[:2]):
            lease.release()
            lease.release()
            assert pinned() == 8
            store.delete(keys).result(10)
            assert store.put(keys, values, until="disk").result(10).ok  # beside the pinned ones
        reservation = store.reserve([key(50)], CHUNK)
        reservation.abort()
        reservation.abort()
        assert not pinned_slots(store)
        assert pinned() == 0
        store.delete(keys).result(10)
        store.delete(keys).result(10)
    assert pinned() == 0
    put_and_get(store, key(1), payload(1))


# What a key stands for.


@pytest.mark.parametrize(
    "other",
    [
        {"lora": "b"}, {"salt": "b"}, {"weights": bytes([1]) * 32}, {"model": "b"},
        {"tp_rank": 1, "tp_size": 2}, {"order": "plane,layer,token,head,dim"},
        {"layout": kvtier.KVLayout(layers=2, kv_heads=2, head_dim=8, dtype="float16", chunk_tokens=16)},
    ],
    ids=["LoRA", "salt", "weights", "model", "rank", "order", "dtype"],
)  # fmt: skip
def test_what_differs_is_not_in_the_key(open_store: Any, payload: Any, other: dict[str, Any]) -> None:
    """LMCache #2961 #2960, vLLM #44250 (LoRA id), LMCache #4825 (salt), vLLM #49261 #49438 #49440 (weights'
    revision), SGLang (dtype): one's KV is another's hit."""
    layout = kvtier.KVLayout(layers=2, kv_heads=2, head_dim=8, dtype="bfloat16", chunk_tokens=16)
    mine: dict[str, Any] = {"model": "a", "weights": bytes(32), "layout": layout}
    tokens = list(range(64))
    keys = kvtier.Namespace(**mine).chunk_keys(tokens)
    store = open_store()
    assert store.put(keys, [payload(i) for i in range(4)], until="disk").result(10).ok
    foreign = kvtier.Namespace(**{**mine, **other}).chunk_keys(tokens)
    assert store.match(keys) == 4
    assert store.match(foreign) == 0
    assert {outcome(got(store, foreign)[0], i) for i in range(4)} == {(MISS, Reason.ABSENT)}
