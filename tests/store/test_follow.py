"""Followers: what they are told is what a match finds."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import kvtier
from devices import instant_device
from kvtier.errors import StoreClosed
from kvtier.store import follow
from kvtier.testing.faults import Fault
from small_stores import CHUNK, WallClock, numbered_key, random_payload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvtier.store.follow import Follower, KeyChanges
    from kvtier.testing.emulated import EmulatedDevice


def put(store: kvtier.Store, numbers: Any, **options: Any) -> list[kvtier.ChunkKey]:
    """Store the chunks of these numbers, on disk if there is one. Returns their keys."""
    keys = [numbered_key(i) for i in numbers]
    if store.config.paths:
        options.setdefault("until", "disk")
    store.put(keys, [random_payload(i) for i in numbers], **options).result(20)
    return keys


def told(changes: KeyChanges) -> tuple[set[bytes], set[bytes]]:
    """What was added and what removed; nothing twice, and nothing in both."""
    added, removed = set(changes.added), set(changes.removed)
    assert len(added) + len(removed) == len(changes.added) + len(changes.removed)
    assert not added & removed
    assert bool(changes) == bool(added or removed)
    return added, removed


def listens(store: kvtier.Store) -> list[bool]:
    return [tier.index.on_change is not None for tier in store._core.tiers]


def test_the_first_take_tells_all_and_later_ones_what_changed(open_store: Any) -> None:
    store = open_store()
    old = put(store, range(4))
    with store.follow() as follower:
        assert told(follower.take()) == (set(old), set())
        assert told(follower.take()) == (set(), set())
        new = put(store, range(4, 6))
        store.delete(old[:1]).result(20)
        assert told(follower.take()) == (set(new), set(old[:1]))
        assert told(follower.take()) == (set(), set())


def test_what_was_undone_is_not_told(open_store: Any) -> None:
    store = open_store()
    (kept,) = put(store, [0])
    with store.follow() as follower:
        follower.take()
        store.delete(put(store, [1])).result(20)  # came and went
        store.delete([kept]).result(20)
        put(store, [0])  # went and came
        assert told(follower.take()) == (set(), set())


def test_a_chunk_that_is_in_another_tier_yet_is_not_gone(open_store: Any) -> None:
    store = open_store(dram=2 * CHUNK)
    keys = put(store, range(2))
    with store.follow() as follower:
        assert told(follower.take()) == (set(keys), set())
        more = put(store, range(2, 8))  # which evicts the first ones from DRAM
        assert store.stats()["dram.evictions"]
        assert told(follower.take()) == (set(more), set())


def test_an_eviction_from_the_last_tier_is_told(open_store: Any) -> None:
    store = open_store(False, dram=4 * CHUNK)
    keys = put(store, range(4))
    with store.follow() as follower:
        follower.take()
        put(store, range(4, 6))
        added, removed = told(follower.take())
        assert added == {numbered_key(4), numbered_key(5)}
        assert removed == {key for key in keys if not store.match([key])}
        assert len(removed) == 2


def test_what_expires_is_gone_at_the_next_take(open_store: Any) -> None:
    wall = WallClock()
    store = open_store(wall=wall)
    kept = put(store, [0])
    short = put(store, [1], ttl=10)
    with store.follow() as follower:
        assert told(follower.take()) == ({*kept, *short}, set())
        wall.now += 11
        assert told(follower.take()) == (set(), set(short))
    late = put(store, [2], ttl=10)
    wall.now += 11
    with store.follow() as follower:
        added, _ = told(follower.take())
        assert added == set(kept), f"told as stored, though over: {late}"


def test_taking_writes_no_tombstones_of_its_own(open_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be called a thousand times a second; those of evictions are written together, before a write."""
    wall = WallClock()
    store = open_store(wall=wall)
    put(store, [0], ttl=10)
    with store.follow() as follower:
        follower.take()
        wall.now += 11
        follower.take()
        monkeypatch.setattr(type(store._core.sweeper), "step", None)
        follower.take()


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    yield from instant_device("64MiB")


def test_what_cannot_be_read_is_gone_and_a_put_brings_it_back(
    device: EmulatedDevice, open_store: Any
) -> None:
    store = open_store(device.paths[0] / "store", dram=0)
    keys = put(store, range(3))
    with store.follow() as follower:
        follower.take()
        fault = device.inject(Fault(op="read", errno=errno.EIO))
        result = store.get(keys[:1], into=[bytearray(CHUNK)]).result(20)
        assert result.reason.tolist() == [kvtier.Reason.IO_ERROR]
        fault.remove()
        assert told(follower.take()) == (set(), set(keys[:1]))
        put(store, [0])
        assert told(follower.take()) == (set(keys[:1]), set())
    store.close()


@pytest.mark.parametrize("kind", ["files"])
def test_what_other_processes_write_and_delete_is_told(tmp_path: Path, open_store: Any) -> None:
    one, other = open_store(tmp_path / "shared"), open_store(tmp_path / "shared")
    with one.follow() as follower:
        assert told(follower.take()) == (set(), set())
        keys = put(other, range(3))
        assert set(wait_for(follower, 3).added) == set(keys)
        other.delete(keys[:2]).result(20)
        assert set(wait_for(follower, 2).removed) == set(keys[:2])


def wait_for(follower: Follower, count: int) -> KeyChanges:
    """All changes until there are `count`."""
    seen = kvtier.KeyChanges([], [])
    end = time.monotonic() + 20
    while len(seen.added) + len(seen.removed) < count and time.monotonic() < end:
        changes = follower.take()
        seen.added.extend(changes.added)
        seen.removed.extend(changes.removed)
        time.sleep(0.02)
    return seen


def test_several_paths_are_followed(tmp_path: Path, open_store: Any) -> None:
    store = open_store([tmp_path / "a", tmp_path / "b"], dram=0)
    keys = put(store, range(6))
    with store.follow() as follower:
        assert told(follower.take()) == (set(keys), set())
        store.delete(keys[::2]).result(20)
        assert told(follower.take()) == (set(), set(keys[::2]))


def test_chunks_of_a_path_that_is_out_stay_in_the_picture(tmp_path: Path, open_store: Any) -> None:
    """Only a get can tell whether it works again, and nobody gets what he thinks is gone."""
    store = open_store([tmp_path / "a", tmp_path / "b"], dram=0)
    keys = put(store, range(6))
    with store.follow() as follower:
        follower.take()
        with store._core.lock:
            store._core.paths[0].health.hung(time.monotonic())
        assert store.match(keys) < len(keys)
        assert told(follower.take()) == (set(), set())
        time.sleep(1.1)  # a first pause
        assert store.get(keys, into=[bytearray(CHUNK) for _ in keys]).result(20).status.any()
        store._core.paths[0].health.worked()
        assert store.match(keys) == len(keys)
        assert told(follower.take()) == (set(), set())


@pytest.mark.parametrize("dram", [0, 3 * CHUNK])
def test_what_changes_during_the_first_take_is_not_lost(
    dram: int, open_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "_ROWS", 1)
    store = open_store(dram=dram)
    keys = put(store, range(12))
    steps = iter([
        lambda: store.delete(keys[-1:]).result(20),  # still to be listed
        lambda: store.delete(keys[:1]).result(20),  # listed already: its row is the next to be used
        lambda: put(store, [11]),  # which may be in a row that was listed
        lambda: put(store, [20]),
        lambda: store.delete([numbered_key(20)]).result(20),
        lambda: store.prefetch(keys[5:8]).result(20),
        lambda: put(store, [0]),
        lambda: store.delete(keys[3:4]).result(20),
    ])  # fmt: skip
    listed = follow.Follower._list

    def interrupted(self: Any) -> Iterator[Any]:
        for key in listed(self):
            yield key
            next(steps, lambda: None)()

    monkeypatch.setattr(follow.Follower, "_list", interrupted)
    with store.follow() as follower:
        added, removed = told(follower.take())
        assert added == {key for key in [*keys, numbered_key(20)] if store.match([key])}
        assert not removed
        assert next(steps, None) is None
        store.delete(keys).result(20)
        assert told(follower.take()) == (set(), added)


def test_a_first_take_that_breaks_off_begins_anew(open_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()
    keys = put(store, range(3))

    def broken(self: Any) -> Iterator[Any]:
        yield keys[0]
        raise KeyboardInterrupt

    with store.follow() as follower:
        with monkeypatch.context() as patch:
            patch.setattr(follow.Follower, "_list", broken)
            with pytest.raises(KeyboardInterrupt):
                follower.take()
        assert not any(listens(store))
        assert told(follower.take()) == (set(keys), set())


def test_followers_do_not_know_each_other(open_store: Any) -> None:
    store = open_store()
    with store.follow() as one, store.follow() as other:
        one.take()
        keys = put(store, range(2))
        assert told(other.take()) == (set(keys), set())
        assert told(one.take()) == (set(keys), set())
        one.close()
        store.delete(keys).result(20)
        assert told(other.take()) == (set(), set(keys))


def test_nothing_is_noted_while_nobody_follows(open_store: Any) -> None:
    store = open_store()
    follower = store.follow()
    assert not any(listens(store)), "before the first take"
    follower.take()
    assert all(listens(store))
    follower.close()
    follower.close()
    assert not any(listens(store))
    dropped = store.follow()
    dropped.take()
    del dropped
    gc.collect()
    end = time.monotonic() + 20
    while any(listens(store)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(listens(store)), "it was dropped"


def test_what_comes_and_goes_untold_takes_no_memory(open_store: Any) -> None:
    store = open_store(False, dram=4 * CHUNK)
    with store.follow() as follower:
        follower.take()
        for i in range(0, 40, 2):
            put(store, [i, i + 1])
        assert follower._changes is not None
        assert len(follower._changes._by_key) == 4


def test_takers_and_putters_side_by_side_lose_nothing(open_store: Any) -> None:
    store = open_store(dram=4 * CHUNK)
    picture: set[bytes] = set()
    stop = threading.Event()

    def churn(first: int) -> None:
        i = first
        while not stop.is_set():
            keys = put(store, range(i, i + 3), until="dram")
            store.delete(keys[:1]).result(20)
            i = first + (i - first + 3) % 60

    threads = [threading.Thread(target=churn, args=(first,)) for first in (0, 100)]
    for thread in threads:
        thread.start()
    with store.follow() as follower:
        for _ in range(100):
            added, removed = told(follower.take())
            assert removed <= picture
            assert not added & picture
            picture = picture - removed | added
            time.sleep(0.005)
        stop.set()
        for thread in threads:
            thread.join()
        store.flush().result(20)
        added, removed = told(follower.take())
        picture = picture - removed | added
    every = [numbered_key(i) for first in (0, 100) for i in range(first, first + 66)]
    assert picture == {key for key in every if store.match([key])}


def test_a_closed_follower_or_store_says_so(open_store: Any) -> None:
    store = open_store()
    follower = store.follow()
    follower.close()
    with pytest.raises(StoreClosed, match="the follower is closed"):
        follower.take()
    left = store.follow()
    left.take()
    store.close()
    with pytest.raises(StoreClosed, match="the store is closed"):
        left.take()
    left.close()
    with pytest.raises(StoreClosed):
        store.follow()


def test_a_forked_child_cannot_follow(open_store: Any) -> None:
    store = open_store()
    follower = store.follow()
    follower.take()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            follower.take()
        except StoreClosed:
            follower.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    keys = put(store, [0])
    assert told(follower.take()) == (set(keys), set())
    follower.close()
