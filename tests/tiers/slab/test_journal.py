"""The journal file: appends, rewrites, its limit, and what a failing disk may do to it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import textwrap
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvtier.config import KIB, MIB, StoreConfig
from kvtier.errors import TierUnavailable
from kvtier.format import (
    JOURNAL_HEADER_BYTES,
    RECORD,
    RECORD_BYTES,
    Header,
    StoredChunk,
    put_records,
    tombstone,
)
from kvtier.tiers.slab import journal as journal_module
from kvtier.tiers.slab.journal import Journal, NewJournal, create
from kvtier.tiers.slab.recovery import replay
from kvtier.tiers.slab.tier import SlabTier

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EXTENT = MIB
EXTENTS = 4
PART = 64 * KIB
LIMIT = 512 * RECORD_BYTES


def puts(first: int, count: int, parts: int = 1) -> np.ndarray:
    """PUT records of chunks `first`.. in slots of their own."""
    slot = parts * PART
    per_extent = EXTENT // slot
    return put_records(
        [
            StoredChunk(
                key=i.to_bytes(32, "little"),
                generation=i + 1,
                offset=i // per_extent * EXTENT + i % per_extent * slot,
                slot_bytes=slot,
                payload_bytes=slot - 5,
                stored_bytes=slot,
                sums=np.arange(parts, dtype=np.uint64) + i,
            )
            for i in range(first, first + count)
        ]
    )


def found(path: Path, header: Header) -> list[int]:
    """Numbers of the chunks that a recovery finds, oldest first."""
    recovered = replay(path.read_bytes(), header, EXTENTS)
    assert recovered.damaged == 0
    return [int.from_bytes(chunk["key"].tobytes(), "little") for chunk in recovered.chunks]


def rewrite(journal: Journal, live: np.ndarray, next_generation: int) -> None:
    """Have the next file take the journal's place, with nothing appended meanwhile."""
    new = NewJournal(journal.path, journal.header.for_journal(next_generation))
    try:
        new.write(live)
        new.sync()
        old = journal.replace(new)
    except OSError:
        new.abandon()
        raise
    os.close(old)


@pytest.fixture
def header() -> Header:
    return Header.new(part_bytes=PART, capacity=8 * MIB, extent_bytes=EXTENT, chunk_bytes=PART).for_journal(1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def journal(path: Path, header: Header) -> Any:
    fd, header = create(path, header, np.empty(0, RECORD))
    os.close(fd)
    journal = Journal(path, header, LIMIT, 0)
    yield journal
    journal.close()


def test_appended_records_are_found_in_order(journal: Journal, path: Path) -> None:
    journal.append(puts(0, 2))
    journal.append(puts(2, 2, parts=9))
    journal.append(tombstone(2))
    journal.sync()
    assert found(path, journal.header) == [0, 2, 3]
    assert journal.records == 2 + 2 * 2 + 1
    assert path.stat().st_size == journal.nbytes == JOURNAL_HEADER_BYTES + journal.records * RECORD_BYTES


def test_a_second_opening_continues_the_numbering(journal: Journal, path: Path) -> None:
    journal.append(puts(0, 3))
    second = Journal(path, journal.header, LIMIT, journal.records)
    second.append(puts(3, 3))
    second.close()
    assert found(path, journal.header) == list(range(6))


def test_rewriting_keeps_just_the_live_records(journal: Journal, path: Path) -> None:
    journal.append(puts(0, 20))
    journal.append(tombstone(3))
    former = journal.header
    rewrite(journal, puts(5, 4), next_generation=77)
    assert journal.records == 4
    assert journal.header.journal_id != former.journal_id
    assert journal.header.slab_id == former.slab_id
    assert path.stat().st_size == journal.nbytes
    journal.append(puts(9, 1))
    assert found(path, journal.header) == [5, 6, 7, 8, 9]
    assert replay(path.read_bytes(), journal.header, EXTENTS).next_generation == 77
    assert os.listdir(path.parent) == ["journal"]


def test_records_of_a_former_file_are_not_valid_in_the_next(journal: Journal, path: Path) -> None:
    journal.append(puts(0, 4))
    stale = path.read_bytes()[JOURNAL_HEADER_BYTES:]
    rewrite(journal, puts(4, 1), next_generation=50)
    data = path.read_bytes() + stale[RECORD_BYTES:]
    recovered = replay(data, journal.header, EXTENTS)
    assert (len(recovered.chunks), recovered.damaged) == (1, 3)


@pytest.mark.parametrize("live", [0, 1, 48, 170])
def test_has_room_leaves_space_for_a_rewritten_copy(journal: Journal, path: Path, live: int) -> None:
    kept = np.concatenate([tombstone(i) for i in range(live)]) if live else np.empty(0, RECORD)
    rng = random.Random(live)
    rewrites = 0
    for _ in range(400):
        records = np.concatenate([tombstone(1000 + i) for i in range(rng.randint(1, 8))])
        if not journal.has_room(len(records), live):
            assert journal.nbytes + JOURNAL_HEADER_BYTES + live * RECORD_BYTES <= LIMIT
            rewrite(journal, kept, next_generation=1)
            rewrites += 1
        journal.append(records)
        assert path.stat().st_size == journal.nbytes <= LIMIT
    assert rewrites


class Driver:
    """Puts chunks into a slab tier as the store does, but without payloads."""

    def __init__(self, config: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lock = threading.Lock()
        self.tier = SlabTier(config, self.lock)
        self.peak = 0
        self.number = 0
        real = os.write

        def measured(fd: int, data: Any) -> int:
            written = real(fd, data)
            total = 0
            for name in ("journal", "journal.new"):
                with contextlib.suppress(FileNotFoundError):
                    total += (self.tier.path / name).stat().st_size
            self.peak = max(self.peak, total)
            return written

        monkeypatch.setattr(journal_module.os, "write", measured)

    def put(self, count: int, nbytes: int) -> None:
        writes = []
        with self.lock:
            for _ in range(count):
                offset = self.tier.reserve(nbytes)
                if offset is None:
                    break
                write = self.tier.start_write(self.number.to_bytes(32, "little"), offset, nbytes)
                write.sums = np.ones(-(-nbytes // PART), np.uint64)
                writes.append(write)
                self.number += 1
        self.tier.write_tombstones()
        with self.tier.journal.lock:
            self.tier.journal_puts(writes)
            with self.lock:
                for write in writes:
                    self.tier.index.unpin(self.tier.insert(write))
        self.peak = max(self.peak, self.tier.journal.nbytes)


SIZES = [(8 * MIB, 64 * KIB, 4 * KIB, 100), (8 * MIB, 64 * KIB, 64 * KIB, 20), (8 * MIB, MIB, MIB, 3)]
CROWDED = [(MIB, 64 * KIB, 4 * KIB, 100), (MIB, 4 * KIB, 4 * KIB, 10), (MIB, 4 * KIB, 4 * KIB, 200)]


@pytest.mark.parametrize(
    ("capacity", "chunk", "payload", "batch"),
    [
        *SIZES,
        *CROWDED,
    ],
)
def test_invariant_5_the_journal_and_its_copy_never_exceed_the_limit(
    small_config: Callable[..., StoreConfig],
    monkeypatch: pytest.MonkeyPatch,
    capacity: int,
    chunk: int,
    payload: int,
    batch: int,
) -> None:
    config = small_config(
        capacity=capacity, chunk_bytes=chunk, dram=4 * MIB, landing=4 * MIB, io_window=4 * MIB
    )
    driver = Driver(config, monkeypatch)
    rng = random.Random(1)
    rounds = max(100, 4000 // batch)
    for _ in range(rounds):
        driver.put(rng.randint(1, batch), payload)
    assert driver.tier.compactor.stop(20)
    driver.tier.close()
    assert driver.number > 500
    assert driver.tier.compactor.done
    assert not driver.tier.compactor.failed
    assert driver.peak <= driver.tier.journal.limit


SCRIPT = textwrap.dedent("""
    import json, resource, sys
    from pathlib import Path
    import numpy as np
    from kvtier.format import Header, RECORD, tombstone
    from kvtier.tiers.slab.journal import Journal, create

    path, room = Path(sys.argv[1]), int(sys.argv[2])
    header = Header.new(part_bytes=65536, capacity=1 << 23, extent_bytes=1 << 20, chunk_bytes=65536)
    fd, header = create(path, header.for_journal(1), np.empty(0, RECORD))
    journal = Journal(path, header, 1 << 16, 0)
    journal.append(tombstone(1))
    before = path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + room, resource.RLIM_INFINITY))
    many = np.concatenate([tombstone(i) for i in range(2, 12)])
    failures = []
    for attempt in (lambda: journal.append(many), lambda: create(path, header.for_journal(99), many)):
        try:
            attempt()
        except OSError as error:
            failures.append(error.errno)
    same = path.read_bytes() == before
    left = sorted(entry.name for entry in path.parent.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    journal.append(many)
    print(json.dumps({"failures": failures, "same": same, "left": left, "records": journal.records,
                      "size": path.stat().st_size, "id": journal.header.journal_id}))
""")


@pytest.mark.parametrize("room", [0, 1, 127, 128, 500])
def test_a_full_disk_leaves_the_journal_as_it_was(path: Path, header: Header, room: int) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, str(path), str(room)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["failures"] == [27, 27]  # EFBIG
    assert outcome["same"]
    assert outcome["left"] == ["journal"]
    assert outcome["records"] == 11
    assert outcome["size"] == JOURNAL_HEADER_BYTES + 11 * RECORD_BYTES
    data = path.read_bytes()
    recovered = replay(data, Header(**{**_fields(header), "journal_id": outcome["id"]}), EXTENTS)
    assert (recovered.damaged, recovered.next_generation) == (0, 12)


def _fields(header: Header) -> dict[str, Any]:
    return {name: getattr(header, name) for name in Header.__slots__}


def test_an_append_that_cannot_be_undone_does_not_spoil_the_next(
    journal: Journal, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.append(puts(0, 2))
    real_write = os.write
    calls = []

    def failing_write(fd: int, data: Any) -> int:
        calls.append(fd)
        if len(calls) == 1:
            return real_write(fd, bytes(data)[:50])
        raise OSError(5, "broken")

    def failing_truncate(fd: int, length: int) -> None:
        raise OSError(5, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(journal_module.os, "write", failing_write)
        patch.setattr(journal_module.os, "ftruncate", failing_truncate)
        with pytest.raises(OSError, match="broken"):
            journal.append(puts(2, 2))
    journal.append(puts(4, 2))
    recovered = replay(path.read_bytes(), journal.header, EXTENTS)
    assert [chunk["key"].tobytes()[0] for chunk in recovered.chunks] == [0, 1, 4, 5]


def test_invariant_6_a_rewrite_whose_directory_cannot_be_synced_loses_nothing(
    journal: Journal, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.append(puts(0, 4))

    def broken(path: Path) -> None:
        raise OSError(5, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "sync_directory", broken)
        rewrite(journal, puts(0, 4), next_generation=50)
        journal.append(puts(4, 2))
        with pytest.raises(OSError, match="broken"):
            journal.sync()
    journal.sync()
    assert found(path, journal.header) == list(range(6))


@pytest.mark.parametrize("step", ["write", "fsync", "rename"])
def test_a_rewrite_that_fails_changes_nothing(
    journal: Journal, path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    journal.append(puts(0, 4))
    before = path.read_bytes()
    open_before = len(os.listdir("/proc/self/fd"))

    def broken(*args: Any) -> None:
        raise OSError(28, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(journal_module.os, step, broken)
        with pytest.raises(OSError, match="no space"):
            rewrite(journal, puts(0, 2), next_generation=50)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["journal"]
    assert len(os.listdir("/proc/self/fd")) == open_before
    journal.append(puts(4, 1))
    assert found(path, journal.header) == list(range(5))


def test_a_rewrite_that_a_crash_interrupted_is_deleted_at_open(
    small_config: Callable[..., StoreConfig],
) -> None:
    config = small_config()
    SlabTier(config, threading.Lock()).close()
    assert config.path is not None
    (config.path / "journal.new").write_bytes(bytes(1000))
    SlabTier(config, threading.Lock()).close()
    assert sorted(os.listdir(config.path)) == ["journal", "lock", "slab"]


def test_invariant_8_a_journal_that_cannot_be_opened_leaks_no_descriptor(
    small_config: Callable[..., StoreConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Journal, *args: Any) -> None:
        raise OSError(24, "too many open files")

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "__init__", broken)
        with pytest.raises(TierUnavailable, match="too many open files"):
            SlabTier(small_config(), threading.Lock())
    assert len(os.listdir("/proc/self/fd")) == before
