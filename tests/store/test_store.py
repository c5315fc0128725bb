"""Put, get, delete, match and pin when all is well, with the right values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvtier import Reason
from kvtier.config import MIB
from small_stores import CHUNK
from store_calls import HIT, KNOWN, MISS, STORED, got, idle


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
    for name in ("disk.journal_bytes", "disk.bytes_in_directory"):
        assert after.get(name) == before.get(name)
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
