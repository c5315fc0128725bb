"""What is not written to disk on purpose: refused with a reason, counted, heads before tails."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvtier import Reason, Status
from kvtier.config import KIB, MIB
from small_stores import CHUNK
from store_calls import got, outcome

if TYPE_CHECKING:
    from pathlib import Path


HOUR = 16 * CHUNK
BUDGET = 24 * HOUR
REFUSED = (Status.REFUSED, Reason.ADMISSION)


@pytest.fixture
def kind() -> str:
    """Only slabs have it."""
    return "slab"


def statuses(result: Any) -> list[Any]:
    return [outcome(result, i) for i in range(len(result.status))]


def test_a_budget_is_spent_on_heads(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store(dram=0, endurance=BUDGET)
    result = store.put(keys(40), payloads(40), until="disk").result(20)
    stored = result.prefix
    assert stored == 8, "half of what is left"
    assert statuses(result)[stored:] == [REFUSED] * (40 - stored)
    assert store.match(keys(40)) == stored
    stats = store.stats()
    assert stats["put.admission"] == stats["disk.admission_refused"] == 40 - stored
    assert stats["disk.0.endurance_budget"] == BUDGET
    assert stored * CHUNK <= stats["disk.0.endurance_spent"] <= stored * (CHUNK + 4 * KIB)
    flushed = store.flush().result(20)
    assert flushed.synced
    assert flushed.failed == 40 - stored


def test_the_next_puts_find_something_for_their_heads(open_store: Any, key: Any, payload: Any) -> None:
    store = open_store(dram=0, endurance=BUDGET)
    lengths = []
    for start in range(0, 200, 20):
        some = range(start, start + 20)
        result = store.put([key(i) for i in some], [payload(i) for i in some], until="disk").result(20)
        lengths.append(result.prefix)
        assert all(status == REFUSED for status in statuses(result)[result.prefix :])
    assert lengths[:3] == [8, 3, 2], "half of what is left behind the journal's records"
    assert sum(lengths) <= 17
    assert store.stats()["disk.0.endurance_spent"] <= HOUR + CHUNK + 4 * KIB


def test_dram_takes_what_disk_refuses(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store(dram=4 * MIB, endurance=BUDGET)
    assert statuses(store.put(keys(40), payloads(40)).result(20)) == [(Status.STORED, Reason.NONE)] * 40
    store.flush().result(20)
    stats = store.stats()
    assert stats["put.stored"] == 40
    assert stats["put.admission"] == 0
    assert stats["disk.admission_refused"] == 32
    result, targets = got(store, keys(40))
    assert result.ok
    assert (targets == payloads(40)).all()


def test_what_was_refused_is_offered_again_when_it_is_put_again(
    open_store: Any, keys: Any, payloads: Any
) -> None:
    store = open_store(dram=4 * MIB, endurance=BUDGET)
    store.put(keys(20), payloads(20)).result(20)
    store.flush().result(20)
    assert store.stats()["disk.chunks"] == 8
    again = store.put(keys(20), payloads(20)).result(20)
    assert statuses(again) == [(Status.KNOWN, Reason.NONE)] * 20
    store.flush().result(20)
    assert store.stats()["disk.chunks"] == 11


def test_a_budget_survives_restarts(open_store: Any, keys: Any, payloads: Any, tmp_path: Path) -> None:
    spent = 0
    for i in range(6):
        store = open_store(dram=0, endurance=BUDGET)
        assert store.stats()["disk.0.endurance_spent"] >= spent
        store.put(keys(40)[6 * i :], payloads(40)[6 * i :], until="disk").result(20)
        spent = store.stats()["disk.0.endurance_spent"]
        if i % 2:  # what a process that dies now leaves behind
            shutil.copytree(tmp_path / "store", tmp_path / "copy")
        store.close()
        if i % 2:
            shutil.rmtree(tmp_path / "store")
            (tmp_path / "copy").rename(tmp_path / "store")
    assert spent <= HOUR + 2 * CHUNK
    assert sum(file.stat().st_blocks * 512 for file in (tmp_path / "store").iterdir()) <= 8 * MIB


def test_a_put_that_is_refused_can_be_put_when_there_is_budget(
    open_store: Any, key: Any, payload: Any
) -> None:
    store = open_store(dram=0, endurance=BUDGET)
    store._core.paths[0].tier.endurance.spend(HOUR + CHUNK)
    assert statuses(store.put([key(0)], [payload(0)], until="disk").result(20)) == [REFUSED]
    store._core.paths[0].tier.endurance.spend(-HOUR // 2 - CHUNK)
    for _ in range(2):
        assert store.put([key(0)], [payload(0)], until="disk").result(20).ok
    assert got(store, [key(0)])[0].ok


def test_a_path_without_budget_leaves_the_work_to_the_others(
    open_store: Any, tmp_path: Path, keys: Any, payloads: Any
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    store = open_store(dram=0, paths=paths, path=None, capacity=16 * MIB, endurance=BUDGET)
    first, second = (path.tier for path in store._core.paths)
    first.endurance.spend(2 * HOUR)
    assert store.put(keys(8), payloads(8), until="disk").result(20).prefix == 8
    assert (len(first.index), len(second.index)) == (0, 8)
    second.endurance.spend(2 * HOUR)
    assert statuses(store.put(keys(9)[8:], payloads(9)[8:], until="disk").result(20)) == [REFUSED]


def test_a_reservation_is_admitted_like_a_put(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store(dram=0, endurance=BUDGET)
    with store.reserve(keys(12), CHUNK) as reservation:
        for view, payload in zip(reservation.views, payloads(12), strict=True):
            view[:] = payload
        result = reservation.commit(until="disk").result(20)
    assert statuses(result)[8:] == [REFUSED] * 4
    assert result.prefix == 8


def test_reads_go_on_while_writes_are_refused(open_store: Any, keys: Any, payloads: Any) -> None:
    """A refused write gives its landing slot to whoever waits for one."""
    store = open_store(dram=0, landing=2 * CHUNK, endurance=BUDGET)
    assert store.put(keys(8), payloads(8), until="disk").result(20).ok
    store._core.paths[0].tier.endurance.spend(2 * HOUR)
    targets = np.zeros((8, CHUNK), np.uint8)
    for start in range(1, 60, 6):
        put = store.put([bytes([start + i]) * 32 for i in range(6)], payloads(6), until="disk", timeout=20)
        assert store.get(keys(8), into=targets, timeout=20).result(30).ok
        assert statuses(put.result(30)) == [REFUSED] * 6
    assert (targets == payloads(8)).all()


def test_second_touch_writes_what_comes_again(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store(dram=0, admission="second-touch")
    assert statuses(store.put(keys(5), payloads(5), until="disk").result(20)) == [REFUSED] * 5
    assert store.match(keys(5)) == 0
    assert store.put(keys(3), payloads(3), until="disk").result(20).ok
    assert store.match(keys(5)) == 3
    assert store.stats()["put.admission"] == 5
    assert statuses(store.put(keys(6), payloads(6), until="disk").result(20)) == [
        *[(Status.KNOWN, Reason.NONE)] * 3, *[(Status.STORED, Reason.NONE)] * 2, REFUSED
    ]  # fmt: skip


def test_second_touch_of_what_is_in_dram(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store(dram=4 * MIB, admission="second-touch")
    assert store.put(keys(5), payloads(5)).result(20).ok
    store.flush().result(20)
    assert store.stats()["disk.chunks"] == 0
    assert statuses(store.put(keys(5), payloads(5)).result(20)) == [(Status.KNOWN, Reason.NONE)] * 5
    store.flush().result(20)
    assert store.stats()["disk.chunks"] == 5


def test_without_a_budget_all_is_written(open_store: Any, keys: Any, payloads: Any, tmp_path: Path) -> None:
    store = open_store(dram=0)
    assert store.put(keys(60), payloads(60), until="disk").result(20).ok
    stats = store.stats()
    assert stats["disk.admission_refused"] == 0
    assert stats["disk.0.endurance_budget"] == 0
    assert stats["disk.0.endurance_spent"] >= 60 * CHUNK
    assert not (tmp_path / "store" / "endurance").exists()


def test_a_journal_rewritten_at_open_is_spent_too(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store(dram=0, endurance=BUDGET)
    assert store.put(keys(8), payloads(8), until="disk").result(20).ok
    spent = store.stats()["disk.0.endurance_spent"]
    store.close()
    store = open_store(dram=0, endurance=BUDGET)
    assert store.stats()["disk.0.endurance_spent"] == spent
    store.close()
    store = open_store(dram=0, endurance=BUDGET, capacity=9 * MIB)
    assert store.stats()["disk.0.endurance_spent"] == spent + store._core.paths[0].tier.journal.nbytes


def test_a_path_that_is_out_is_not_called_a_budget(open_store: Any, key: Any, payload: Any) -> None:
    store = open_store(dram=0, endurance=BUDGET)
    with store._core.lock:
        assert store._core.paths[0].health.hung(time.monotonic())
    result = store.put([key(0)], [payload(0)], until="disk").result(20)
    assert outcome(result) == (Status.REFUSED, Reason.TIER_DOWN)
