"""File systems that are small, full, read-only or another user's: clear errors at open, outcomes after it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtier
from kvtier import Reason, Status
from kvtier.config import KIB, MIB
from small_stores import CHUNK
from store_calls import outcome, put_and_get
from store_scripts import run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system takes root")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """`mount(*arguments, **kw)`: what mount(8) makes of them, in a new directory; skips where it cannot."""
    points: list[Path] = []

    def make(*arguments: str) -> Path:
        point = tmp_path / f"mnt{len(points)}"
        point.mkdir()
        done = subprocess.run(["mount", *arguments, str(point)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount here: {done.stderr.strip()}")
        points.append(point)
        return point

    yield make
    for point in points:
        subprocess.run(["umount", str(point)], check=True)


@pytest.fixture
def small_fs(mount: Callable[..., Path], tmp_path: Path) -> Callable[[str, int], Path]:
    """`small_fs(kind, nbytes)`: a small tmpfs, or an ext2 or ext4 in a file."""

    def make(kind: str, nbytes: int) -> Path:
        if kind == "tmpfs":
            return mount("-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs")
        if shutil.which(f"mkfs.{kind}") is None:
            pytest.skip(f"no mkfs.{kind}")
        image = tmp_path / "image"
        image.write_bytes(b"")
        os.truncate(image, nbytes)
        subprocess.run([f"mkfs.{kind}", "-q", "-F", "-m0", str(image)], check=True, capture_output=True)
        return mount("-o", "loop", str(image))

    return make


def test_a_capacity_above_the_free_space_says_so(open_store: Any, tmp_path: Path) -> None:
    with pytest.raises(kvtier.TierUnavailable, match=r"capacity is \d+ bytes.*left for it: lower capacity"):
        open_store(capacity=1 << 60)
    open_store().close()


@needs_root
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_capacity_above_a_small_file_system(open_store: Any, small_fs: Any, kind: str) -> None:
    path = small_fs(kind, 16 * MIB) / "store"
    with pytest.raises(kvtier.TierUnavailable, match="lower capacity"):
        open_store(path, capacity=32 * MIB)
    assert not (path / "slab").exists()
    store = open_store(path, capacity=8 * MIB)
    with pytest.raises(kvtier.StoreInUse):
        open_store(path, capacity=8 * MIB)
    store.close()
    with pytest.raises(kvtier.TierUnavailable, match="lower capacity"):
        open_store(path, capacity=32 * MIB)
    open_store(path, capacity=8 * MIB).close()


@pytest.mark.parametrize("inside", ["store", "a/b"])
def test_a_directory_below_a_file(open_store: Any, tmp_path: Path, inside: str) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(kvtier.TierUnavailable, match="cannot write to the store directory"):
        open_store(tmp_path / "file" / inside)


@needs_root
def test_a_read_only_file_system(open_store: Any, mount: Callable[..., Path]) -> None:
    point = mount("-t", "tmpfs", "-o", "ro", "tmpfs")
    for path in (point, point / "store"):
        with pytest.raises(kvtier.TierUnavailable, match=r"Read-only.*another directory"):
            open_store(path)


UNPRIVILEGED = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


def readable_by_all() -> bool:
    """Whether an unprivileged user can run this Python with this package."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return False
    probe = [*UNPRIVILEGED, sys.executable, "-P", "-c", "import numpy, kvtier"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@needs_root
def test_a_directory_of_another_user(open_store: Any, tmp_path: Path) -> None:
    if not readable_by_all():
        pytest.skip("an unprivileged user cannot run this Python")
    open_store(tmp_path / "store").close()
    os.chmod(tmp_path, 0o755)
    body = """
    try: open()
    except kvtier.TierUnavailable as error: print(error)
    """
    with mode_of_parents(tmp_path):
        out = run(body, tmp_path / "store", wrapper=UNPRIVILEGED)
    assert "Permission denied" in out
    assert "mend its permissions" in out


@needs_root
def test_a_small_locked_memory_limit(tmp_path: Path) -> None:
    if not readable_by_all():
        pytest.skip("an unprivileged user cannot run this Python")
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    body = """
    import resource
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    store = open(dram="64MiB")
    assert store._core.wait_until_populated(20)
    for i in range(20):
        assert store.put([key(i)], [payload(i)], until="disk").result(20).ok
    store.close()
    store = open(dram="64MiB")
    target = np.empty((20, 65536), np.uint8)
    assert store.get([key(i) for i in range(20)], into=target).result(20).ok
    assert (target == np.arange(20)[:, None]).all()
    print(store.stats()["disk.hits"])
    store.close()
    """
    with mode_of_parents(tmp_path):
        assert run(body, home / "store", wrapper=UNPRIVILEGED) == "20\n"


@contextlib.contextmanager
def mode_of_parents(path: Path) -> Iterator[None]:
    """Let everybody pass through the directories above, which pytest makes private."""
    closed = [
        p for p in (path, *path.parents) if p.stat().st_uid == os.geteuid() and not p.stat().st_mode & 1
    ]
    modes = {p: p.stat().st_mode for p in closed}
    for p in closed:
        p.chmod(modes[p] | 0o011)
    try:
        yield
    finally:
        for p, mode in modes.items():
            p.chmod(mode)


def eat(path: Path) -> None:
    """Take all that is free on the file system."""
    with (path / "eaten").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(64 * KIB))
    with (path / "crumbs").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(512))


@needs_root
@pytest.mark.parametrize("kind", ["tmpfs", "ext2"])
def test_a_full_disk_refuses_and_recovers(
    open_store: Any, small_fs: Any, kind: str, monkeypatch: pytest.MonkeyPatch, payload: Any, key: Any
) -> None:
    """Space that could not be reserved is gone when it is wanted: ENOSPC, from the kernel."""
    if kind == "tmpfs":  # which can reserve; make it one that cannot
        monkeypatch.setattr("kvtier.tiers.slab.directory._reserve", lambda fd, nbytes: False)
    point = small_fs(kind, 16 * MIB)
    store = open_store(point / "store", capacity=12 * MIB)
    assert store.stats()["disk.reserved"] is False
    put_and_get(store, key(0), payload(0))
    eat(point)
    keys = [key(i) for i in range(1, 21)]
    result = store.put(keys, [payload(i) for i in range(1, 21)], until="disk").result(10)
    refused = [i for i in range(20) if result.status[i] == Status.REFUSED]
    assert refused, "where did it write to?"
    assert all(outcome(result, i) == (Status.REFUSED, Reason.NO_SPACE) for i in refused)
    assert store.stats()["disk.write_failures"] >= len(refused)
    assert store.stats()["put.no_space"] == len(refused)
    target = np.empty(CHUNK, np.uint8)
    assert store.get([key(0)], into=[target]).result(10).ok
    assert (target == payload(0)).all()
    (point / "eaten").unlink()
    (point / "crumbs").unlink()
    assert store.put(keys, [payload(i) for i in range(1, 21)], until="disk").result(10).ok
    targets = np.empty((20, CHUNK), np.uint8)
    assert store.get(keys, into=targets).result(10).ok
    assert all((targets[i] == payload(i + 1)).all() for i in range(20))
    store.close()


@needs_root
def test_a_journal_without_space(open_store: Any, small_fs: Any, payload: Any, key: Any) -> None:
    """The slab is reserved, the journal grows: when it cannot, puts are refused, and found again later."""
    point = small_fs("tmpfs", 16 * MIB)
    store = open_store(point / "store", capacity=8 * MIB)
    assert store.stats()["disk.reserved"] is True
    put_and_get(store, key(0), payload(0))
    eat(point)
    count = 0
    while count < 60:  # until the journal's last page is full
        count += 1
        result = store.put([key(count)], [payload(count)], until="disk").result(10)
        if not result.ok:
            break
    assert outcome(result) == (Status.REFUSED, Reason.NO_SPACE)
    assert store.stats()["disk.journal_failures"] == 1
    assert store.match([key(i) for i in range(count + 1)]) == count
    store.close()
    (point / "eaten").unlink()
    (point / "crumbs").unlink()
    store = open_store(point / "store", capacity=8 * MIB)
    assert store.match([key(i) for i in range(count + 1)]) == count
    put_and_get(store, key(count), payload(count))
    store.close()


@needs_root
@pytest.mark.parametrize("kind", ["tmpfs", "ext2"])
def test_a_floor_of_free_space_holds_where_none_is_reserved(
    open_store: Any, small_fs: Any, kind: str, monkeypatch: pytest.MonkeyPatch, payload: Any, key: Any
) -> None:
    if kind == "tmpfs":  # which can reserve; make it one that cannot
        monkeypatch.setattr("kvtier.tiers.slab.directory._reserve", lambda fd, nbytes: False)
    point = small_fs(kind, 20 * MIB)
    floor = 3 * MIB
    with pytest.raises(kvtier.TierUnavailable, match=f"beside the {floor} of free_space: lower capacity"):
        open_store(point / "store", capacity=18 * MIB, free_space=floor)
    store = open_store(point / "store", capacity=12 * MIB, free_space=floor)
    put_and_get(store, key(0), payload(0))
    (point / "others").write_bytes(bytes(12 * MIB))  # what others use since: now the floor comes first
    time.sleep(1.1)  # or the last look is not old enough for another
    put_and_get(store, key(300), payload(300))
    time.sleep(0.1)
    keys = [key(i) for i in range(1, 101)]
    result = store.put(keys, [payload(i) for i in range(1, 101)], until="disk").result(10)
    refused = [i for i in range(100) if result.status[i] == Status.REFUSED]
    assert 10 < len(refused) < 60
    assert all(outcome(result, i) == (Status.REFUSED, Reason.NO_SPACE) for i in refused)
    disk = os.statvfs(point)
    assert disk.f_bavail * disk.f_frsize >= floor - 128 * KIB  # journal and metadata
    assert store.stats()["disk.low_space"] is True
    assert store.stats()["disk.write_failures"] == 0, "it was asked for, not run into"
    target = np.empty(CHUNK, np.uint8)
    assert store.get([key(0)], into=[target]).result(10).ok
    (point / "others").unlink()
    eventually_stored(store, key(1), payload(1))
    assert store.put(keys[:40], [payload(i) for i in range(1, 41)], until="disk").result(10).ok
    store.close()


def eventually_stored(store: kvtier.Store, key: kvtier.ChunkKey, value: Any) -> None:
    """A full file system is looked at again when a put comes, at most every second."""
    end = time.monotonic() + 20
    while not store.put([key], [value], until="disk").result(10).ok:
        assert time.monotonic() < end, "still no space"
        time.sleep(0.1)


@needs_root
def test_a_floor_does_not_bind_a_slab_that_has_its_space(
    open_store: Any, small_fs: Any, payload: Any, key: Any
) -> None:
    point = small_fs("tmpfs", 16 * MIB)
    store = open_store(point / "store", capacity=12 * MIB, free_space=2 * MIB)
    assert store.stats()["disk.reserved"] is True
    (point / "others").write_bytes(bytes(3 * MIB))
    for start in (0, 20):
        for i in range(start, start + 20):
            put_and_get(store, key(i), payload(i))
        store.close()
        store = open_store(point / "store", capacity=12 * MIB, free_space=2 * MIB)
    store.close()


def test_no_floor_asks_nothing(open_store: Any, payload: Any, key: Any, monkeypatch: Any) -> None:
    store = open_store()
    monkeypatch.setattr(os, "statvfs", lambda path: pytest.fail("asked"))
    for i in range(3):
        put_and_get(store, key(i), payload(i))


def test_gets_do_not_ask_for_free_space(open_store: Any, payload: Any, key: Any, monkeypatch: Any) -> None:
    """Nor is it asked more than once a second, nor with the store's lock held."""
    monkeypatch.setattr("kvtier.tiers.slab.directory._reserve", lambda fd, nbytes: False)
    store = open_store(free_space=1)
    asked: list[bool] = []
    statvfs = os.statvfs

    def counted(path: Any) -> Any:
        asked.append(store._core.lock.locked())
        return statvfs(path)

    monkeypatch.setattr("kvtier.tiers.slab.space.os.statvfs", counted)
    start = time.monotonic()
    for i in range(60):
        put_and_get(store, key(i), payload(i))
    assert len(asked) <= 1 + time.monotonic() - start
    time.sleep(1.1)
    asked.clear()
    target = np.empty(CHUNK, np.uint8)
    for i in range(60):
        store.get([key(i)], into=[target]).result(10)
    assert not asked


def test_a_device_that_does_not_tell_its_free_space_is_no_reason_to_refuse(
    open_store: Any, payload: Any, key: Any, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr("kvtier.tiers.slab.directory._reserve", lambda fd, nbytes: False)
    store = open_store(free_space=1)

    def fail(path: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("kvtier.tiers.slab.space.os.statvfs", fail)
    time.sleep(1.1)
    for i in range(3):
        put_and_get(store, key(i), payload(i))
    store.close()
    assert not caplog.records
