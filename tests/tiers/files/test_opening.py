"""Opening a directory of kind `files`: what is refused, what is mended, and what of it is kept."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

import kvtier
from kvtier import IncompatibleStore, InvalidRequest, TierUnavailable
from kvtier.config import KIB, MIB
from kvtier.tiers.files import inspection
from small_stores import CHUNK, SMALL, bytes_on_disk
from store_calls import HIT, got

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

FILES = {**SMALL, "kind": "files", "dram": 0}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def filled(
    path: Path, keys: Callable[..., list[Any]], payload: Callable[[bytes, int], npt.NDArray[np.uint8]]
) -> Path:
    """A directory with ten chunks."""
    with kvtier.open(path, **FILES) as store:
        names = keys(10)
        assert store.put(names, [payload(key, CHUNK) for key in names], until="disk").result(20).ok
    return path


def chunks(path: Path) -> list[Path]:
    return sorted((path / "chunks").iterdir())


def check(path: Path, keys: Any, payload: Any, expected: int) -> None:
    """So many of the ten chunks are there, right to the byte, the others are put, and the count is right."""
    names = keys(10)
    with kvtier.open(path, **FILES) as store:
        result, targets = got(store, names)
        assert (result.status == HIT).sum() == expected
        for key, target, status in zip(names, targets, result.status, strict=True):
            assert status != HIT or (target == payload(key, CHUNK)).all()
        assert store.put(names, [payload(key, CHUNK) for key in names], until="disk").result(20).ok
        assert got(store, names)[0].ok
    with kvtier.open(path, **FILES) as store:
        assert got(store, names)[0].ok
        assert store.stats()["disk.bytes_in_directory"] == bytes_on_disk(path)
    found = inspection.inspect(path)
    assert found.header is not None
    assert found.header.used == found.bytes_on_disk


def test_nobody_else_may_read_it(filled: Path) -> None:
    for file in (filled, *filled.glob("**/*")):
        assert file.stat().st_mode & 0o777 == (0o700 if file.is_dir() else 0o600)


def test_a_slab_is_refused(path: Path) -> None:
    kvtier.open(path, **SMALL).close()
    for how in ("error", "discard"):
        with pytest.raises(IncompatibleStore, match="store of kind 'slab': open it with kind='slab'"):
            kvtier.open(path, **FILES, on_incompatible=how)
    kvtier.open(path, **SMALL).close()


def test_a_slab_refuses_files(filled: Path, keys: Any, payload: Any) -> None:
    for how in ("error", "discard"):
        with pytest.raises(IncompatibleStore, match="store of kind 'files': open it with kind='files'"):
            kvtier.open(filled, **SMALL, on_incompatible=how)
    check(filled, keys, payload, 10)


def test_the_files_of_others_are_refused(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("mine")
    with pytest.raises(IncompatibleStore, match=r"holds 'thesis\.tex', which is not of a store"):
        kvtier.open(path, **FILES)
    assert os.listdir(path) == ["thesis.tex"]


def test_a_file_is_no_directory(path: Path) -> None:
    path.write_text("mine")
    with pytest.raises(TierUnavailable, match="is a file, and a store needs a directory"):
        kvtier.open(path, **FILES)


def test_capacity_must_be_given_once(path: Path, keys: Any) -> None:
    with pytest.raises(InvalidRequest, match="capacity is not given"):
        kvtier.open(path, **{**FILES, "capacity": 0})
    assert not path.exists()
    kvtier.open(path, **FILES).close()
    with kvtier.open(path, **{**FILES, "capacity": 0}) as store:
        assert store.stats()["disk.capacity"] == FILES["capacity"]


def test_a_capacity_below_a_chunk_is_refused(path: Path) -> None:
    with pytest.raises(InvalidRequest, match="below one chunk of 65536 and the ledger"):
        kvtier.open(path, **{**FILES, "capacity": 80 * KIB})
    kvtier.open(path, **{**FILES, "capacity": 512 * MIB}).close()  # its ledger is as large as it gets
    with pytest.raises(InvalidRequest, match=r"below one chunk and the ledger of .* which take 397312"):
        kvtier.open(path, **{**FILES, "capacity": MIB // 4})


def test_a_capacity_beyond_the_file_system_is_refused(path: Path) -> None:
    with pytest.raises(TierUnavailable, match="but the file system of"):
        kvtier.open(path, **{**FILES, "capacity": 1 << 60})


def test_what_the_smaller_capacity_has_no_room_for_goes_oldest_first(
    path: Path, keys: Any, payload: Any
) -> None:
    names = keys(40)
    with kvtier.open(path, **FILES) as store:
        for key in names:
            assert store.put([key], [payload(key, CHUNK)], until="disk").result(20).ok
    with kvtier.open(path, **{**FILES, "capacity": 2 * MIB}) as store:
        assert bytes_on_disk(path) <= 2 * MIB
        there = [bool(store.match([key])) for key in names]
        assert there == sorted(there)
        assert sum(there) == 31


def test_the_head_of_a_prefix_is_used_last(path: Path, keys: Any, payload: Any) -> None:
    names = keys(10)  # few enough for one batch
    with kvtier.open(path, **FILES) as store:
        assert store.put(names, [payload(key, CHUNK) for key in names], until="disk").result(20).ok
    with kvtier.open(path, **{**FILES, "capacity": MIB // 2}) as store:
        there = [bool(store.match([key])) for key in names]
        assert there == sorted(there, reverse=True)
        assert 0 < sum(there) < 10


@pytest.mark.parametrize("how", ["deleted", "emptied", "cut", "garbled", "zeroed", "grown"])
def test_a_ledger_is_made_anew_from_the_files(filled: Path, keys: Any, payload: Any, how: str) -> None:
    damage_ledger(filled / "ledger", how)
    check(filled, keys, payload, 10)


def damage_ledger(ledger: Path, how: str) -> None:
    size = ledger.stat().st_size
    if how == "deleted":
        ledger.unlink()
    elif how == "grown":
        os.truncate(ledger, 2 * size)
    else:
        data = {"emptied": b"", "cut": ledger.read_bytes()[:100]}.get(how)
        ledger.write_bytes(
            data if data is not None else (os.urandom(size) if how == "garbled" else bytes(size))
        )


@pytest.mark.parametrize("how", ["deleted", "emptied", "cut", "garbled", "zeroed"])
def test_a_ledger_that_is_damaged_while_the_store_is_open(
    filled: Path, keys: Any, payload: Any, how: str
) -> None:
    with kvtier.open(filled, **FILES) as one, kvtier.open(filled, **FILES) as two:
        damage_ledger(filled / "ledger", how)
        names = keys(30)[10:]
        for store, some in ((one, names[:10]), (two, names[10:])):
            assert store.put(some, [payload(key, CHUNK) for key in some], until="disk").result(20).ok
        for store in (one, two):
            assert store.delete(names[:1]).result(20) in (0, 1)
            assert got(store, keys(10))[0].ok
    with kvtier.open(filled, **FILES) as store:
        assert store.stats()["disk.chunks"] == 29
    check(filled, keys, payload, 10)


def test_the_size_of_parts_survives_the_ledger(path: Path, keys: Any, payload: Any) -> None:
    key = keys(1)[0]
    settings = {**FILES, "chunk_bytes": 200 * KIB}
    with kvtier.open(path, **{**settings, "part_bytes": 128 * KIB}) as store:
        assert store.put([key], [payload(key, 200 * KIB)], until="disk").result(20).ok
    (path / "ledger").unlink()
    with kvtier.open(path, **settings) as store:
        target = bytearray(200 * KIB)
        assert store.get([key], into=[target]).result(20).ok
        assert target == payload(key, 200 * KIB).tobytes()


@pytest.mark.parametrize("how", ["cut", "grown", "flipped", "swapped", "renamed", "linked", "deleted"])
@pytest.mark.parametrize("is_open", [False, True])
def test_invariant_1_a_file_that_is_not_as_it_was_written(
    filled: Path, keys: Any, payload: Any, how: str, is_open: bool, tmp_path: Path
) -> None:
    store = kvtier.open(filled, **FILES) if is_open else None
    first, second = chunks(filled)[:2]
    expected = 9
    if how in ("cut", "grown"):
        os.truncate(first, CHUNK // 2 if how == "cut" else 2 * CHUNK)
        expected = 10 if how == "grown" and is_open else 9  # its chunk is whole
    elif how == "flipped":
        with first.open("r+b") as file:
            file.seek(5000)
            byte = file.read(1)[0]
            file.seek(5000)
            file.write(bytes([byte ^ 1]))
    elif how == "swapped":
        first.rename(tmp_path / "first")
        second.rename(first)
        (tmp_path / "first").rename(second)
        expected = 8
    elif how == "renamed":
        first.rename(first.with_name(first.name.replace(".00000000.10.", ".00000000.11.")))
    elif how == "linked":
        first.rename(tmp_path / "elsewhere")
        first.symlink_to(tmp_path / "elsewhere")
    else:
        first.unlink()
    if store is not None:
        result, targets = got(store, keys(10))
        for key, target, status in zip(keys(10), targets, result.status, strict=True):
            assert status != HIT or (target == payload(key, CHUNK)).all()
        assert (result.status == HIT).sum() == expected
        assert set(result.status.tolist()) <= {kvtier.Status.HIT, kvtier.Status.MISS}
        names = keys(10)
        assert store.put(names, [payload(key, CHUNK) for key in names], until="disk").result(20).ok
        assert got(store, names)[0].ok
        store.close()
        expected = 9 if how == "grown" else 10
    check(filled, keys, payload, expected)


def test_what_is_no_chunk_is_left_alone_and_counted(filled: Path, keys: Any, payload: Any) -> None:
    (filled / "chunks" / "notes.txt").write_bytes(bytes(5000))
    (filled / "chunks" / "folder").mkdir()
    check(filled, keys, payload, 10)
    assert (filled / "chunks" / "notes.txt").stat().st_size == 5000
    assert inspection.inspect(filled).misfits == ["notes.txt"]


def test_temporaries_of_the_dead_are_removed_and_those_of_the_living_kept(
    filled: Path, keys: Any, payload: Any
) -> None:
    dead, living = filled / "incoming" / "1-dead-0", filled / "incoming" / "1-living-0"
    for file in (dead, living):
        file.write_bytes(bytes(CHUNK))
    with living.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with kvtier.open(filled, **FILES) as store:
            assert not dead.exists()
            assert living.exists()
            assert store.stats()["disk.bytes_in_directory"] == bytes_on_disk(filled)
    check(filled, keys, payload, 10)
    assert not living.exists()


def test_room_that_the_dead_hold_is_taken_when_it_is_needed(filled: Path, keys: Any, payload: Any) -> None:
    with kvtier.open(filled, **{**FILES, "capacity": MIB}) as store:
        (filled / "incoming" / "1-dead-0").write_bytes(bytes(CHUNK))
        tier = store._core.paths[0].tier
        with tier._section() as section:
            section.is_sure = False
        names = keys(15)
        assert store.put(names, [payload(key, CHUNK) for key in names], until="disk").result(20).ok
        assert store.match(names) == 15
        assert bytes_on_disk(filled) <= MIB
    assert not list((filled / "incoming").iterdir())


HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def test_a_process_that_is_stopped_with_the_lock_is_not_waited_for_for_ever(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tiers.files.ledger._PATIENCE", 0.2)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(filled / "ledger")], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(TierUnavailable, match="another process has held its ledger"):
            kvtier.open(filled, **FILES)
        holder.kill()
    kvtier.open(filled, **FILES).close()


def test_another_version_is_refused_or_discarded(filled: Path, keys: Any) -> None:
    import xxhash

    ledger = filled / "ledger"
    data = bytearray(ledger.read_bytes())
    data[8] = 2
    data[120:128] = xxhash.xxh3_64_intdigest(bytes(data[:120])).to_bytes(8, "little")
    with kvtier.open(filled, **FILES) as store:  # which another version takes over
        ledger.write_bytes(data)
        result = store.put([bytes(32)], [bytes(CHUNK)], until="disk").result(20)
        assert result.reason[0] == kvtier.Reason.IO_ERROR
        assert got(store, keys(10))[0].ok
    with pytest.raises(IncompatibleStore, match="format version 2"):
        kvtier.open(filled, **FILES)
    assert len(chunks(filled)) == 10
    with kvtier.open(filled, **FILES, on_incompatible="discard") as store:
        assert store.match(keys(1)) == 0
    assert not chunks(filled)


def test_temporaries_of_the_dead_are_removed_while_the_store_is_open(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tiers.files.tier._SWEEP_EVERY", 1)
    with kvtier.open(filled, **FILES) as store:
        tier = store._core.paths[0].tier
        dead = filled / "incoming" / "1-dead-0"
        dead.write_bytes(bytes(CHUNK))
        with tier._section() as section:
            section.used += CHUNK  # as its owner had done
        end = time.monotonic() + 20
        while dead.exists():
            assert time.monotonic() < end
            time.sleep(0.05)
        with tier._section():
            pass
        assert store.stats()["disk.bytes_in_directory"] == bytes_on_disk(filled)
