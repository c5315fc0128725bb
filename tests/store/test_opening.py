"""Opening: other sizes than before, without one of the tiers, and without changing the process."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from kvtier import InvalidRequest, Reason
from kvtier.config import MIB
from small_stores import CHUNK, bytes_on_disk
from store_calls import HIT, got


@pytest.mark.parametrize(("before", "after"), [(8, 24), (24, 8), (24, 2), (2, 3)])
def test_a_store_reopened_larger_or_smaller(
    open_store: Any, keys: Any, payloads: Any, before: int, after: int
) -> None:
    store = open_store(capacity=before * MIB, dram=0)
    head = store.put(keys(100), payloads(100), until="disk").result(20).prefix
    store.close()
    for _ in range(2):
        store = open_store(capacity=after * MIB, dram=0)
        assert bytes_on_disk(store.config.path) <= store.config.capacity
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
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
