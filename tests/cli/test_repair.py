"""`kvtier verify --repair`: bad chunks go, sound ones stay, and a second run finds nothing."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtier
from devices import instant_device
from kvtier.cli.verify import verify
from kvtier.config import MIB, PAGE
from kvtier.errors import IncompatibleStore, TierUnavailable
from kvtier.format import JOURNAL_HEADER_BYTES, RECORD_BYTES, SLAB_HEADER_BYTES
from kvtier.testing.faults import Fault
from kvtier.tiers.slab import inspection, repair
from kvtier.tiers.slab import journal as journal_module

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvtier.testing.emulated import EmulatedDevice

CHUNK = 64 << 10
COUNT = 12
KEYS = [kvtier.ChunkKey(bytes([i + 1]) * 32) for i in range(COUNT)]
PAYLOADS = np.random.default_rng(0).integers(0, 256, (COUNT, CHUNK), np.uint8)
SETTINGS: dict[str, Any] = {
    "capacity": 4 * MIB, "dram": 0, "landing": MIB, "chunk_bytes": CHUNK, "part_bytes": CHUNK,
    "io_window": MIB,
}  # fmt: skip


def fill(path: Path, payloads: Any = PAYLOADS) -> Path:
    with kvtier.open(path, **SETTINGS) as store:
        assert store.put(KEYS, payloads, until="disk").result(20).ok
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed store of twelve chunks."""
    return fill(tmp_path / "store")


def run(path: Path, *, repair: bool = True) -> int:
    """The exit code."""
    try:
        verify(path, repair=repair)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def flip(file: Path, offset: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)
        opened.seek(offset)
        opened.write(bytes([byte[0] ^ 1]))


def places(path: Path) -> list[int]:
    """Byte offset in the slab's file of each chunk."""
    chunks = inspection.inspect(path).recovered.chunks
    found = {c["key"].tobytes(): SLAB_HEADER_BYTES + int(c["offset"]) for c in chunks}
    return [found[key] for key in KEYS]


def check(path: Path, lost: set[int]) -> None:
    """All but the lost ones are served, and these are plain misses, without a read that finds them bad."""
    with kvtier.open(path, **SETTINGS) as store:
        targets = np.zeros_like(PAYLOADS)
        result = store.get(KEYS, into=targets).result(20)
        hits = {i for i, status in enumerate(result.status.tolist()) if status == kvtier.Status.HIT}
        assert hits == set(range(COUNT)) - lost
        assert all((targets[i] == PAYLOADS[i]).all() for i in hits)
        assert {kvtier.Reason(r) for r in result.reason.tolist()} <= {
            kvtier.Reason.NONE,
            kvtier.Reason.ABSENT,
        }
        assert store.put(KEYS, PAYLOADS, until="disk").result(20).ok


def again(path: Path, capsys: Any) -> None:
    """A second run finds nothing, and changes nothing."""
    capsys.readouterr()
    before = {name: (path / name).read_bytes() for name in ("slab", "journal")}
    assert run(path) == 0
    assert "repair: nothing had to be repaired" in capsys.readouterr().out
    assert run(path, repair=False) == 0
    assert {name: (path / name).read_bytes() for name in before} == before
    assert sorted(os.listdir(path)) == ["journal", "lock", "slab"]


def test_a_sound_store_is_left_alone(path: Path, capsys: Any) -> None:
    again(path, capsys)
    check(path, set())


def test_bad_chunks_are_dropped_and_no_other(path: Path, capsys: Any) -> None:
    where = places(path)
    for i in (2, 7):
        flip(path / "slab", where[i] + 1000 * i)
    assert run(path, repair=False) == 1
    assert len(inspection.inspect(path).recovered.chunks) == COUNT
    assert run(path) == 0
    said = capsys.readouterr().out
    assert "repair: dropped 2 chunks that are not as they were written" in said
    assert "repair: compacted the journal from 12 records to 10" in said
    again(path, capsys)
    check(path, {2, 7})


def test_a_dead_record_is_compacted_away(path: Path, capsys: Any) -> None:
    with kvtier.open(path, **SETTINGS) as store:
        store.delete(KEYS[:3]).result(20)
    assert run(path) == 0
    assert "repair: compacted the journal from 15 records to 9" in capsys.readouterr().out
    again(path, capsys)


def test_damaged_records_cost_their_chunks(path: Path, capsys: Any) -> None:
    place = JOURNAL_HEADER_BYTES + 4 * RECORD_BYTES
    record = (path / "journal").read_bytes()[place : place + RECORD_BYTES]
    lost = {i for i, key in enumerate(KEYS) if key in record}  # chunks are journaled as the disk takes them
    flip(path / "journal", place + 50)
    with (path / "journal").open("ab") as journal:
        journal.write(b"torn")
    assert run(path, repair=False) == 1
    assert run(path) == 0
    assert "bad: 1 journal records fail their check" in capsys.readouterr().out
    again(path, capsys)
    assert len(lost) == 1
    check(path, lost)


@pytest.mark.parametrize("copy", [0, PAGE])
def test_a_damaged_journal_header_is_mended(path: Path, capsys: Any, copy: int) -> None:
    flip(path / "journal", copy + 70)
    assert run(path, repair=False) == 1
    assert run(path) == 0
    assert "repair: wrote both headers of the journal anew" in capsys.readouterr().out
    again(path, capsys)
    check(path, set())


def test_a_damaged_slab_header_is_mended(path: Path, capsys: Any) -> None:
    flip(path / "slab", 20)
    assert run(path, repair=False) == 1
    assert run(path) == 0
    assert "repair: wrote the slab's header anew" in capsys.readouterr().out
    again(path, capsys)
    check(path, set())


@pytest.mark.parametrize("how", ["missing", "cut", "foreign"])
def test_a_lost_slab_costs_what_was_in_it(path: Path, tmp_path: Path, capsys: Any, how: str) -> None:
    lost = set(range(COUNT))
    if how == "missing":
        (path / "slab").unlink()
    elif how == "cut":
        where = places(path)
        os.truncate(path / "slab", where[5])
        lost = {i for i in lost if where[i] >= where[5]}
    else:
        (path / "slab").write_bytes((fill(tmp_path / "other", PAYLOADS ^ 1) / "slab").read_bytes())
    assert run(path, repair=False) == 1
    assert run(path) == 0
    assert f"repair: dropped {len(lost)} chunks" in capsys.readouterr().out
    again(path, capsys)
    check(path, lost)


@pytest.mark.parametrize("how", ["missing", "both headers", "zeros"])
def test_a_lost_journal_is_said_to_cost_everything(path: Path, capsys: Any, how: str) -> None:
    if how == "missing":
        (path / "journal").unlink()
    elif how == "zeros":
        (path / "journal").write_bytes(bytes((path / "journal").stat().st_size))
    else:
        for copy in (0, PAGE):
            flip(path / "journal", copy + 3)
    with pytest.raises(IncompatibleStore, match=r"its chunks are lost: opening .* --repair"):
        verify(path)
    assert run(path) == 0
    said = capsys.readouterr().out
    assert (
        f"its {0 if how == 'missing' else COUNT} records cannot be told from garbage, and all chunks" in said
    )
    assert "repair: wrote an empty journal" in said
    again(path, capsys)
    check(path, set(range(COUNT)))


@pytest.mark.parametrize("content", [b"", b"precious\n" * 4000])
def test_what_is_no_store_is_not_repaired(tmp_path: Path, content: bytes) -> None:
    for name in ("slab", "journal"):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(IncompatibleStore):
        verify(tmp_path, repair=True)
    assert sorted(os.listdir(tmp_path)) == ["journal", "slab"]
    assert (tmp_path / "slab").read_bytes() == content


@pytest.mark.parametrize("seed", range(10))
def test_whatever_is_damaged_a_second_run_finds_nothing(path: Path, capsys: Any, seed: int) -> None:
    rng = random.Random(seed)
    for name in ("slab", "journal"):
        data = bytearray((path / name).read_bytes())
        for _ in range(rng.randrange(4)):
            start = rng.randrange(len(data))
            for at in range(start, min(len(data), start + rng.choice([1, 100, 5000]))):
                data[at] = rng.randrange(256)
        (path / name).write_bytes(data)
    assert run(path) == 0
    again(path, capsys)


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_repair_that_fails_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    flip(path / "slab", places(path)[2])
    before = {name: (path / name).read_bytes() for name in ("slab", "journal")}

    def broken(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(journal_module.os, call, broken)
        with pytest.raises(TierUnavailable, match="cannot repair"):
            verify(path, repair=True)
    assert {name: (path / name).read_bytes() for name in before} == before
    assert sorted(os.listdir(path)) == ["journal", "lock", "slab"]
    assert run(path) == 0
    check(path, {2})


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("call", ["write", "fsync", "rename", "pwrite"])
def test_invariant_6_a_repair_that_is_killed(path: Path, capsys: Any, call: str, moment: str) -> None:
    """At any step: what is sound is still there, and another repair ends what it began."""
    flip(path / "slab", places(path)[2])
    flip(path / "slab", 20)
    command = f"""
import os, signal
from pathlib import Path
from kvtier.cli.verify import verify
from kvtier.tiers.slab import directory
real, lock = os.{call}, directory.lock_directory
def dying(*args, **kwargs):
    if {moment == "before"}:
        os.kill(os.getpid(), signal.SIGKILL)
    real(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)
def armed(path):
    fd = lock(path)
    os.{call} = dying
    return fd
import kvtier.cli.verify as command
command.lock_directory = armed
verify(Path({str(path)!r}), repair=True)
"""
    ended = subprocess.run(
        [sys.executable, "-P", "-c", command], check=False, timeout=60, env={**os.environ, "TERM": "dumb"}
    )
    assert ended.returncode == -signal.SIGKILL
    assert run(path) == 0
    again(path, capsys)
    check(path, {2})


@pytest.fixture(scope="module")
def devices() -> Iterator[EmulatedDevice]:
    yield from instant_device("64MiB")


@pytest.fixture
def device(devices: EmulatedDevice) -> Iterator[EmulatedDevice]:
    yield devices
    devices.clear_faults()


def test_what_cannot_be_read_once_stays(device: EmulatedDevice, capsys: Any) -> None:
    path = fill(device.paths[0] / "once")
    where = places(path)
    device.inject(Fault(op="read", file="slab", errno=errno.EIO, offset=where[3], length=CHUNK, count=1))
    assert run(path) == 0
    assert "12 of 12 chunks" in capsys.readouterr().out
    again(path, capsys)
    check(path, set())


def test_what_cannot_be_read_twice_is_told_apart_from_what_is_wrong(
    device: EmulatedDevice, capsys: Any
) -> None:
    path = fill(device.paths[0] / "twice")
    where = places(path)
    device.inject(Fault(op="read", file="slab", errno=errno.EIO, offset=where[3], length=CHUNK))
    flip(device.backing_path(0) / "twice" / "slab", where[8])
    assert run(path) == 0
    said = capsys.readouterr().out
    assert f"unreadable: chunk {KEYS[3].hex()}" in said
    assert f"bad: chunk {KEYS[8].hex()}" in said
    assert "dropped 1 chunks that are not as they were written" in said
    assert "dropped 1 chunks that cannot be read" in said
    device.clear_faults()
    again(path, capsys)
    check(path, {3, 8})


@pytest.mark.parametrize("page", [0, 1, 2])
def test_a_page_of_the_journal_that_cannot_be_read(
    device: EmulatedDevice, capsys: Any, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    """One of a header costs nothing, one of records costs their chunks."""
    path = fill(device.paths[0] / f"page-{page}")
    fault = device.inject(Fault(op="read", file="journal", errno=errno.EIO, offset=page * PAGE, length=PAGE))
    with pytest.raises(TierUnavailable, match="verify --repair"):
        kvtier.open(path, **SETTINGS)
    assert run(path, repair=False) == 1
    assert "bad: 1 pages of the journal cannot be read" in capsys.readouterr().out
    real = repair._replace_journal

    def elsewhere(*args: Any) -> None:
        real(*args)
        fault.remove()  # the new file lies elsewhere on a device, the emulated one goes by the name

    monkeypatch.setattr(repair, "_replace_journal", elsewhere)
    assert run(path) == 0
    again(path, capsys)
    check(path, set() if page < 2 else set(range(COUNT)))


def test_a_device_that_is_gone_costs_nothing(device: EmulatedDevice, capsys: Any) -> None:
    path = fill(device.paths[0] / "gone")
    before = (path / "journal").read_bytes()
    device.inject(Fault(op="read", file="slab", errno=errno.ENXIO, offset=SLAB_HEADER_BYTES))
    with pytest.raises(TierUnavailable, match="nothing was changed"):
        verify(path, repair=True)
    device.clear_faults()
    assert (path / "journal").read_bytes() == before
    check(path, set())


def test_a_directory_of_files_is_repaired_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "files"
    with kvtier.open(path, kind="files", **SETTINGS) as store:
        assert store.put(KEYS, PAYLOADS, until="disk").result(20).ok
    bad = sorted((path / "chunks").iterdir())[2]
    flip(bad, 77)
    assert run(path, repair=False) == 1
    assert "11 of 12 chunks" in capsys.readouterr().out
    assert bad.exists(), "nothing is changed without --repair"
    assert run(path) == 0
    assert "removed 1 chunks" in capsys.readouterr().out
    assert not bad.exists()
    assert run(path, repair=False) == 0
    with kvtier.open(path, kind="files", **SETTINGS) as store:
        assert sum(store.match([key]) for key in KEYS) == COUNT - 1
        assert store.put(KEYS, PAYLOADS, until="disk").result(20).ok
