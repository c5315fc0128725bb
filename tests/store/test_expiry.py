"""Chunks that live for a time: at its end they are absent to everything, and then their room is free."""

from __future__ import annotations

import math
import shutil
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvtier import InvalidRequest, Owner, Reason
from kvtier.config import MIB
from kvtier.tiers.slab.inspection import inspect
from small_stores import CHUNK, WallClock
from store_calls import HIT, KNOWN, MISS, STORED, got, outcome

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

START = 1_000_000_000.0


def eventually(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it did not come to be in time"
        time.sleep(0.01)


def absent(store: Any, keys: list[Any]) -> None:
    """Every call says that there is nothing."""
    assert [store.match([key]) for key in keys] == [0] * len(keys)
    with store.pin(keys) as pinned:
        assert pinned == 0
    result, targets = got(store, keys)
    assert {outcome(result, i) for i in range(len(keys))} == {(MISS, Reason.ABSENT)}
    assert not targets.any()
    with store.read(keys).result(20) as lease:
        assert set(lease.result.reason.tolist()) == {Reason.ABSENT}
    assert set(store.prefetch(keys).result(20).reason.tolist()) == {Reason.ABSENT}
    assert store.delete(keys).result(20) == 0


@pytest.mark.parametrize(
    ("path", "dram"), [(None, 0), (None, 2 * MIB), (False, 2 * MIB)], ids=["disk", "both", "DRAM alone"]
)
def test_a_chunk_is_absent_from_its_second_on(
    open_store: Any, keys: Any, payloads: Any, path: Any, dram: int
) -> None:
    wall = WallClock(START)
    store = open_store(path, dram=dram, wall=wall)
    until = "dram" if path is False else "disk"
    k, p = keys(6), payloads(6)
    assert store.put(k[:3], p[:3], until=until, ttl=10).result(20).ok
    assert store.put(k[3:], p[3:], until=until).result(20).ok
    wall.now = START + 9.99
    assert store.match(k) == 6
    assert (got(store, k)[1] == p).all()
    wall.now = START + 10
    absent(store, k[:3])
    assert store.match(k[3:]) == 3
    assert got(store, k[3:])[0].ok
    again = p[:3] ^ 1
    assert store.put(k[:3], again, until=until).result(20).status.tolist() == [STORED] * 3
    result, targets = got(store, k[:3])
    assert result.status.tolist() == [HIT] * 3
    assert (targets == again).all()
    expired = store.stats()
    assert expired["disk.expired" if path is None else "dram.expired"] == 3
    wall.now = START + 1e6
    assert store.match(k) == 6


def test_a_chunk_in_dram_alone_of_both_tiers_expires_too(open_store: Any, keys: Any, payloads: Any) -> None:
    wall = WallClock(START)
    store = open_store(wall=wall)
    assert store.put(keys(2), payloads(2), until="disk", ttl=10).result(20).ok
    store.close()
    store = open_store(wall=wall)
    assert store.prefetch(keys(2)).result(20).ok, "read into DRAM, it takes its time with it"
    with store._core.lock:
        tier = store._core.paths[0].tier
        for key in keys(2):
            tier.discard(tier.find(key))
    assert store.match(keys(2)) == 2
    wall.now = START + 10
    absent(store, keys(2))


def test_the_time_goes_on_while_the_store_is_closed(open_store: Any, keys: Any, payloads: Any) -> None:
    wall = WallClock(START)
    store = open_store(wall=wall)
    k, p = keys(4), payloads(4)
    assert store.put(k[:2], p[:2], until="disk", ttl=10).result(20).ok
    assert store.put(k[2:], p[2:], until="disk", ttl=20).result(20).ok
    store.close()
    wall.now = START + 15
    store = open_store(wall=wall)
    absent(store, k[:2])
    assert (got(store, k[2:])[1] == p[2:]).all()
    wall.now = START + 20
    absent(store, k)


def test_what_is_known_keeps_its_time(open_store: Any, keys: Any, payloads: Any) -> None:
    wall = WallClock(START)
    store = open_store(wall=wall)
    assert store.put(keys(1), payloads(1), until="disk", ttl=10).result(20).ok
    wall.now = START + 5
    for ttl in (0, 100):
        assert store.put(keys(1), payloads(1), until="disk", ttl=ttl).result(20).status.tolist() == [KNOWN]
    wall.now = START + 10
    absent(store, keys(1))


@pytest.mark.parametrize("kind", ["slab"])  # the other has no journal
def test_the_room_of_what_is_over_is_free_and_its_end_in_the_journal(
    open_store: Any, keys: Any, payloads: Any, tmp_path: Path
) -> None:
    wall = WallClock(START)
    store = open_store(capacity=32 * MIB, dram=16 * MIB, wall=wall)
    k = keys(100)
    p = np.zeros((100, CHUNK), np.uint8)
    assert store.put(k[:80], p[:80], until="disk", ttl=10).result(20).ok
    assert store.put(k[80:], p[80:], until="disk").result(20).ok
    wall.now = START + 10
    eventually(lambda: (store.stats()["disk.chunks"], store.stats()["dram.chunks"]) == (20, 20))
    stats = store.stats()
    assert stats["disk.bytes"] == stats["dram.bytes"] == 20 * CHUNK
    assert stats["disk.expired"] == stats["dram.expired"] == 80

    def journalled() -> bool:
        shutil.rmtree(tmp_path / "left", ignore_errors=True)
        shutil.copytree(tmp_path / "store", tmp_path / "left")  # as `kill -9` leaves it
        return len(inspect(tmp_path / "left").recovered.chunks) == 20

    eventually(journalled)


def test_more_than_one_step_of_the_sweep_is_over(open_store: Any, key: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("kvtier.store.sweeper._STEP", 3)
    wall = WallClock(START)
    store = open_store(False, wall=wall)
    k = [key(i) for i in range(20)]
    assert store.put(k, [b"x" * 100] * 20, ttl=10).result(20).ok
    wall.now = START + 10
    eventually(lambda: store.stats()["dram.chunks"] == 0)
    assert store.stats()["dram.expired"] == 20


def test_what_expired_while_the_store_was_closed_is_swept(open_store: Any, keys: Any, payloads: Any) -> None:
    wall = WallClock(START)
    store = open_store(wall=wall)
    assert store.put(keys(5), payloads(5), until="disk", ttl=10, owner=Owner(tenant="a")).result(20).ok
    store.close()
    wall.now = START + 10
    store = open_store(wall=wall)
    assert [row.expired for row in store.owners()] == [5]
    eventually(lambda: store.stats()["disk.chunks"] == 0)
    assert store.owners() == []


def test_what_is_leased_outlives_its_time(open_store: Any, keys: Any, payloads: Any) -> None:
    wall = WallClock(START)
    store = open_store(wall=wall)
    assert store.put(keys(2), payloads(2), until="disk", ttl=10).result(20).ok
    with store.read(keys(2)).result(20) as lease:
        wall.now = START + 10
        eventually(lambda: store.stats()["dram.chunks"] == 0)
        assert store.put(keys(2), np.zeros((2, CHUNK), np.uint8)).result(20).status.tolist() == [STORED] * 2
        assert (np.stack(lease.views) == payloads(2)).all()


def test_a_clock_that_steps_moves_expiry_and_nothing_else(open_store: Any, keys: Any, payloads: Any) -> None:
    wall = WallClock(START)
    store = open_store(wall=wall)
    k, p = keys(4), payloads(4)
    assert store.put(k[:2], p[:2], until="disk", ttl=10).result(20).ok
    wall.now = START - 1e6
    assert store.match(k[:2]) == 2
    assert store.put(k[2:], p[2:], until="disk", ttl=10).result(20).ok
    wall.now = START - 1e6 + 10
    assert store.match(k[:2]) == 2
    absent(store, k[2:])
    wall.now = 0.0
    assert (got(store, k[:2])[1] == p[:2]).all()
    wall.now = 1e12
    absent(store, k)


def test_the_default_is_the_setting(open_store: Any, keys: Any, payloads: Any) -> None:
    wall = WallClock(START)
    store = open_store(ttl=10.0, wall=wall)
    k, p = keys(4), payloads(4)
    assert store.put(k[:1], p[:1]).result(20).ok
    assert store.put(k[1:2], p[1:2], ttl=0).result(20).ok
    with store.reserve(k[2:3], CHUNK) as reservation:
        assert reservation.commit().result(20).ok
    with store.reserve(k[3:], CHUNK) as reservation:
        wall.now += 5  # the time begins with the commit
        assert reservation.commit(ttl=10).result(20).ok
    wall.now = START + 10
    assert [store.match([key]) for key in k] == [0, 1, 0, 1]
    wall.now = START + 15
    assert [store.match([key]) for key in k] == [0, 1, 0, 0]


def test_a_part_of_a_second_is_a_whole_one(open_store: Any, keys: Any, payloads: Any) -> None:
    wall = WallClock(START)
    store = open_store(wall=wall)
    assert store.put(keys(1), payloads(1), ttl=0.001).result(20).ok
    assert store.match(keys(1)) == 1
    wall.now = START + 1
    assert store.match(keys(1)) == 0


def test_a_time_beyond_what_the_disk_knows_is_its_last_second(
    open_store: Any, keys: Any, payloads: Any
) -> None:
    wall = WallClock(START)
    store = open_store(wall=wall)
    assert store.put(keys(1), payloads(1), until="disk", ttl=1e15).result(20).ok
    wall.now = 2.0**32 - 2
    assert store.match(keys(1)) == 1


@pytest.mark.parametrize("now", [-5.0, 0.0, 2.0**32, 1e12])
def test_a_clock_that_is_far_off_costs_no_more_than_time(
    open_store: Any, keys: Any, payloads: Any, now: float
) -> None:
    store = open_store(wall=WallClock(now))
    assert store.put(keys(1), payloads(1), until="disk").result(20).ok
    assert store.put(keys(2)[1:], payloads(2)[1:], until="disk", ttl=3).result(20).ok
    assert store.match(keys(2)) == (2 if now < 1e9 else 1)
    assert (got(store, keys(1))[1] == payloads(1)).all()


@pytest.mark.parametrize("call", ["get", "read", "prefetch", "put", "reserve", "pin", "delete", "match"])
@pytest.mark.parametrize("dram", [0, 2 * MIB])
def test_the_time_may_end_within_a_call(
    open_store: Any, keys: Any, payloads: Any, call: str, dram: int
) -> None:
    """Of the same key one is found and the next one is not; nothing breaks, nothing stays pinned."""

    class Ticking(WallClock):
        ticks = False

        def __call__(self) -> float:
            self.now += self.ticks
            return self.now

    wall = Ticking(START)
    store = open_store(dram=dram, wall=wall)
    k = keys(2) * 20
    for ttl in (5, 12, 23, 40):
        wall.ticks = False
        assert store.put(keys(2), payloads(2), until="disk", ttl=ttl).result(20).ok
        wall.ticks = True
        if call == "get":
            got(store, k)
        elif call == "put":
            store.put(k, [payloads(2)[0]] * 40, ttl=1).result(20)
        elif call == "reserve":
            store.reserve(k, CHUNK).abort()
        elif call == "pin":
            with store.pin(k):
                pass
        elif call == "read":
            store.read(k).result(20).release()
        elif call in ("prefetch", "delete"):
            getattr(store, call)(k).result(20)
        else:
            store.match(k)
        wall.ticks = False
        wall.now += 100
        absent(store, keys(2))
    assert store.put(keys(2), payloads(2), until="disk").result(20).ok
    assert (got(store, keys(2))[1] == payloads(2)).all()


@pytest.mark.parametrize("ttl", [-1, math.inf, math.nan, "10", True])
def test_what_cannot_be_a_time(open_store: Any, keys: Any, payloads: Any, ttl: Any) -> None:
    store = open_store()
    with pytest.raises(InvalidRequest, match=r"ttl is .*, needs seconds of at least 0"):
        store.put(keys(1), payloads(1), ttl=ttl)
    with store.reserve(keys(1), CHUNK) as reservation, pytest.raises(InvalidRequest, match="ttl is"):
        reservation.commit(ttl=ttl)
