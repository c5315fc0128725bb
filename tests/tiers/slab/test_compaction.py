"""Compaction of the journal in the background: nothing is lost, nothing waits, nothing is too large."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvtier.config import KIB, MIB, StoreConfig
from kvtier.tiers.slab import compaction, inspection, snapshot
from kvtier.tiers.slab import journal as journal_module
from kvtier.tiers.slab.journal import NewJournal
from kvtier.tiers.slab.tier import SlabTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PART = 64 * KIB
SIZES = [4 * KIB, 64 * KIB, 64 * KIB, 700 * KIB]  # of up to 11 parts, three records


class Driver:
    """Puts and deletes chunks of a slab tier as the store does, but without payloads."""

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self.lock = threading.Lock()
        self.tier = SlabTier(config, self.lock)
        self.number = 0

    def put(self, count: int, nbytes: int = 64 * KIB, *, owner: int = 0) -> None:
        """Journals `count` chunks. Raises OSError, and then there is none of them."""
        writes = []
        with self.lock:
            for _ in range(count):
                offset = self.tier.reserve(nbytes, owner)
                assert offset is not None
                key = self.number.to_bytes(32, "little")
                write = self.tier.start_write(key, offset, nbytes, expires_at=(1 << 31) + self.number)
                write.sums = np.arange(-(-nbytes // PART), dtype=np.uint64) + self.number
                writes.append(write)
                self.number += 1
        try:
            self.tier.write_tombstones()
            with self.tier.journal.lock:
                self.tier.journal_puts(writes)
                with self.lock:
                    for write in writes:
                        self.tier.index.unpin(self.tier.insert(write))
        except OSError:
            with self.lock:
                for write in writes:
                    self.tier.abandon(write)
            raise

    def fill(self) -> None:
        """Put until the journal takes no more."""
        for _ in range(20_000):
            self.put(1)

    def delete(self, number: int) -> None:
        with self.lock:
            self.tier.discard(self.tier.find(number.to_bytes(32, "little")))
        self.tier.write_tombstones()

    def content(self) -> dict[bytes, tuple[Any, ...]]:
        """All that is known of every chunk."""
        index = self.tier.index
        found = {}
        with self.lock:
            for row in index.table.rows().tolist():
                extent, rest = divmod(index.offset[row], self.tier._header.extent_bytes)
                size = int(index.slots.slot_bytes[extent])
                parts = -(-index.stored_bytes[row] // PART)
                sums = self.tier._sums[extent][rest // size, :parts].tolist()
                columns = [index.offset, index.nbytes, index.generation, index.stored_bytes, index.codec,
                           index.owner, index.stored_at, index.expires_at]  # fmt: skip
                found[index.key(row)] = (*(column[row] for column in columns), size, sums)
        return found

    def order(self) -> list[int]:
        """Numbers of the chunks, least recently used first."""
        rows = self.tier.index.by_age().tolist()
        return [int.from_bytes(self.tier.index.key(row), "little") for row in rows]

    def settle(self) -> None:
        """Let the compaction under way come to its end."""
        thread = self.tier.compactor._thread
        if thread is not None:
            thread.join(20)
            assert not thread.is_alive()

    def reopen(self) -> None:
        self.settle()
        self.close()
        self.tier = SlabTier(self.config, self.lock)

    def close(self) -> None:
        assert self.tier.compactor.stop(20)
        self.tier.close()

    def bytes_on_disk(self) -> int:
        names = ("slab", "journal", "journal.new")
        return sum((self.tier.path / name).stat().st_size for name in names if name in self.files())

    def descriptors(self) -> list[str]:
        """Names of the tier's files that this process has open."""
        found = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = Path(os.readlink(f"/proc/self/fd/{fd}"))
                found += [target.name] if target.parent == self.tier.path else []
        return found

    def files(self) -> list[str]:
        return sorted(os.listdir(self.tier.path))


@pytest.fixture
def driver(small_config: Callable[..., StoreConfig]) -> Iterator[Driver]:
    """On a small tier whose journal holds about four thousand records."""
    made = Driver(small_config(capacity=8 * MIB, chunk_bytes=MIB, landing=2 * MIB, io_window=MIB))
    yield made
    made.settle()
    assert sorted(made.descriptors()) == ["journal", "lock", "slab"]
    made.close()


def test_a_compaction_keeps_all_that_is_known_of_every_chunk(driver: Driver) -> None:
    rng = random.Random(1)
    for i in range(40):
        driver.put(2, rng.choice(SIZES), owner=i)
        if i % 3 == 0:
            driver.delete(rng.choice(driver.order()))
    with driver.lock:
        driver.tier.touch_prefix([i.to_bytes(32, "little") for i in rng.sample(driver.order(), 10)])
    content, order = driver.content(), driver.order()
    before = driver.tier.journal.records
    driver.tier.compactor.compact()
    assert driver.tier.journal.records == sum(max(1, -(-len(c[-1]) // 5)) for c in content.values()) < before
    assert driver.content() == content
    driver.reopen()
    assert driver.content() == content
    assert driver.order() == order
    assert driver.tier.recovery["recovery_damaged"] == 0


def test_generations_go_on_where_they_were(driver: Driver) -> None:
    driver.put(3)
    for number in range(3):
        driver.delete(number)
    driver.tier.compactor.compact()
    assert driver.tier.journal.records == 0
    driver.reopen()
    driver.put(1)
    assert next(iter(driver.content().values()))[2] >= 4


def test_a_journal_is_compacted_before_it_is_full(driver: Driver) -> None:
    full = []
    real = driver.tier.compactor.make_room
    driver.tier.compactor.make_room = lambda has_room: full.append(not has_room()) or real(has_room)  # type: ignore[method-assign, func-returns-value]
    limit = driver.tier.journal.limit
    for _ in range(4000):
        driver.put(1)
        driver.settle()  # as on a machine that is not that slow
        assert driver.tier.journal.nbytes <= limit // 2 + 1024
    assert driver.tier.compactor.done >= 2
    assert not any(full)


def test_a_large_journal_that_is_mostly_dead_is_compacted(driver: Driver) -> None:
    journal = driver.tier.journal
    journal.limit = 1 << 40
    assert not journal.is_due(100)
    journal.records = 70_000
    assert journal.is_due(100)
    assert not journal.is_due(10_000)
    journal.records = 0


@pytest.mark.parametrize("seed", range(6))
def test_what_happens_meanwhile_is_in_the_next_file(
    driver: Driver, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Puts, deletes, evictions and slots used again, between any two steps of a compaction."""
    rng = random.Random(seed)
    monkeypatch.setattr(snapshot, "_BLOCK_ROWS", 7)
    monkeypatch.setattr(compaction, "_STEP", 5)
    monkeypatch.setattr(compaction, "_FEW", rng.choice([0, 3, 1000]))
    monkeypatch.setattr(compaction, "_ROUNDS", rng.choice([0, 1, 8]))
    driver.put(40)
    driver.tier.compactor.start = lambda **how: None  # type: ignore[method-assign]
    steps = 0

    def meddle(self: Any) -> None:
        nonlocal steps
        steps += 1
        if driver.tier.journal.lock.locked() or not driver.tier.journal.has_room(40, 0):
            return
        for _ in range(rng.randrange(3)):
            what = rng.random()
            if what < 0.5:
                driver.put(rng.randint(1, 3), rng.choice(SIZES), owner=9)
            elif what < 0.9:
                driver.delete(rng.choice(driver.order()))
            else:
                driver.tier.sync()

    monkeypatch.setattr(compaction.Compactor, "_check", meddle)
    for _ in range(4):
        driver.tier.compactor.compact()
        assert driver.bytes_on_disk() <= driver.config.capacity
        content = driver.content()
        monkeypatch.setattr(compaction.Compactor, "_check", lambda self: None)
        driver.reopen()
        driver.tier.compactor.start = lambda **how: None  # type: ignore[method-assign]
        assert driver.content() == content
        assert driver.tier.recovery["recovery_dropped"] == 0
        monkeypatch.setattr(compaction.Compactor, "_check", meddle)
    assert steps > 20


def test_what_a_sync_confirmed_is_synced_in_the_next_file(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush during a compaction must not be undone by it: the last records are synced, too."""
    driver.put(10)
    syncs: list[int] = []
    real = NewJournal.sync
    monkeypatch.setattr(NewJournal, "sync", lambda self: syncs.append(self.records) or real(self))  # type: ignore[func-returns-value]
    driver.tier.compactor.compact()
    assert syncs == [10]
    written = NewJournal.write

    def flush_once(self: NewJournal, records: np.ndarray) -> None:
        written(self, records)
        if driver.number == 10:
            driver.put(5)
            driver.tier.sync()

    monkeypatch.setattr(NewJournal, "write", flush_once)
    syncs.clear()
    driver.tier.compactor.compact()
    assert syncs == [10, 15]


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "open"])
def test_a_compaction_that_fails_leaves_the_old_journal_in_force(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    driver.put(20)
    before = (driver.tier.path / "journal").read_bytes()

    def broken(*args: Any) -> None:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(journal_module.os, call, broken)
        with pytest.raises(OSError, match="broken"):
            driver.tier.compactor.compact()
    assert (driver.tier.path / "journal").read_bytes() == before
    assert "journal.new" not in driver.files()
    driver.put(5)
    content = driver.content()
    driver.tier.compactor.compact()
    driver.reopen()
    assert driver.content() == content


def test_a_failed_compaction_is_not_tried_again_at_once_unless_the_journal_is_full(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    compactor = driver.tier.compactor

    def broken(self: NewJournal) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(NewJournal, "sync", broken)
        with pytest.raises(OSError, match="cannot be compacted") as failure:
            driver.fill()
        assert failure.value.errno == errno.ENOSPC
        assert 2 <= compactor.failed <= 10
        assert driver.tier.journal.nbytes <= driver.tier.journal.limit
    content = driver.content()
    driver.put(1)
    assert compactor.done == 1
    assert set(content) - set(driver.content()) == set()
    driver.reopen()
    assert len(driver.content()) >= len(content)


def test_a_full_journal_waits_for_the_compaction_under_way(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And until then no put is held up by it: a device that takes long costs nothing but room."""
    held, going, full, ending = (threading.Event() for _ in range(4))
    sync, make_room = NewJournal.sync, driver.tier.compactor.make_room

    def slow(self: NewJournal) -> None:
        going.set()
        assert held.wait(20)
        sync(self)

    def noted(has_room: Callable[[], bool]) -> None:
        if not has_room():
            full.set()
        make_room(has_room)

    def put_on() -> None:
        while not ending.is_set():
            driver.put(1)

    monkeypatch.setattr(NewJournal, "sync", slow)
    monkeypatch.setattr(driver.tier.compactor, "make_room", noted)
    putting = threading.Thread(target=put_on)
    putting.start()
    assert going.wait(20)
    assert full.wait(20)
    ending.set()
    putting.join(0.3)
    assert putting.is_alive()
    assert driver.bytes_on_disk() <= driver.config.capacity
    held.set()
    putting.join(20)
    assert not putting.is_alive()
    assert driver.bytes_on_disk() <= driver.config.capacity


def test_a_compaction_that_hangs_fails_what_waits_for_it(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    monkeypatch.setattr(compaction, "_PATIENCE", 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(NewJournal, "sync", lambda self: held.wait(20))
        with pytest.raises(OSError, match="its compaction hangs") as failure:
            driver.fill()
        assert failure.value.errno == errno.ETIMEDOUT
        assert not driver.tier.compactor.stop(0.1)
        held.set()
    assert driver.tier.compactor.stop(20)
    assert "journal.new" not in driver.files()


def test_stopping_gives_up_what_is_under_way(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "_STEP", 1)
    driver.put(50)
    compactor = driver.tier.compactor
    at, go = threading.Event(), threading.Event()
    real = NewJournal.write

    def slow(self: NewJournal, records: np.ndarray) -> None:
        at.set()
        assert go.wait(20)
        real(self, records)

    monkeypatch.setattr(NewJournal, "write", slow)
    before = (driver.tier.path / "journal").read_bytes()
    with driver.tier.journal.lock:
        compactor.start()
    assert at.wait(20)
    assert not compactor.stop(0.05)
    go.set()
    assert compactor.stop(20)
    assert (compactor.done, compactor.failed) == (0, 0)
    assert (driver.tier.path / "journal").read_bytes() == before
    assert "journal.new" not in driver.files()
    with driver.tier.journal.lock:
        compactor.start()
    assert compactor._thread is None


def test_inspecting_a_store_in_use_sees_one_file(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if a compaction ends between the look at the headers and that at the records."""
    driver.put(10)
    real = inspection._read_journal

    def late(*what: Any, **how: Any) -> Any:
        driver.tier.compactor.compact()
        return real(*what, **how)

    monkeypatch.setattr(inspection, "_read_journal", late)
    found = inspection.inspect(driver.tier.path)
    assert (len(found.recovered.chunks), found.faults) == (10, [])


def test_without_a_thread_a_full_journal_refuses(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        with pytest.raises(OSError, match="cannot be compacted"):
            driver.fill()
    driver.put(1)
    assert driver.tier.compactor.done == 1
