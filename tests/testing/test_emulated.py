"""Emulated devices: contents, counters, timing, and that nothing of them outlives their owner."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvtier
from kvtier.errors import InvalidRequest, TierUnavailable
from kvtier.io import uring_obstacle
from kvtier.testing import build
from kvtier.testing.emulated import EmulatedDevice, device_stats
from kvtier.testing.faults import Fault
from kvtier.testing.mount import is_mounted
from kvtier.testing.profiles import PROFILES, DeviceProfile

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4097, MIB, 2 * MIB + 12345])
def test_contents_round_trip(device: EmulatedDevice, nbytes: int) -> None:
    path = device.paths[0] / "odd"
    wanted = os.urandom(nbytes)
    path.write_bytes(wanted)
    assert path.read_bytes() == wanted
    assert path.stat().st_size == nbytes
    assert (device.backing_path(0) / "odd").read_bytes() == wanted


def test_direct_io_round_trips_at_any_page(
    file: Path, page_buffer: Callable[[int], mmap.mmap], device: EmulatedDevice
) -> None:
    descriptor = os.open(file, os.O_RDWR | os.O_DIRECT)
    there = page_buffer(5 * MIB // 4)
    there[:] = os.urandom(len(there))
    back = page_buffer(len(there))
    assert os.pwritev(descriptor, [there], 8 * KIB) == len(there)
    assert os.preadv(descriptor, [back], 8 * KIB) == len(there)
    os.close(descriptor)
    assert back[:] == there[:]
    assert device.stats()[0].max_outstanding >= 1


def test_holes_read_as_zeros_and_take_no_space(device: EmulatedDevice) -> None:
    path = device.paths[0] / "sparse"
    path.touch()
    os.truncate(path, 8 * MIB)
    assert path.read_bytes() == bytes(8 * MIB)
    assert path.stat().st_blocks == 0
    assert device.stats()[0].used == 0


def test_names_behave_as_on_any_file_system(device: EmulatedDevice) -> None:
    root = device.paths[0]
    (root / "folder").mkdir()
    (root / "folder/a").write_text("a")
    (root / "folder/a").rename(root / "folder/b")
    (root / "link").symlink_to("folder/b")
    assert (root / "link").read_text() == "a"
    assert sorted(entry.name for entry in root.iterdir()) == ["folder", "link"]
    (root / "folder/b").unlink()
    with pytest.raises(FileNotFoundError):
        (root / "link").read_text()
    (root / "link").unlink()
    (root / "folder").rmdir()
    assert list(root.iterdir()) == []


def test_a_deleted_open_file_is_still_readable(file: Path, device: EmulatedDevice) -> None:
    with file.open("rb") as reader:
        wanted = reader.read(KIB)
        file.unlink()
        assert device.stats()[0].used == 2 * MIB
        assert os.pread(reader.fileno(), KIB, 0) == wanted
    deadline = time.monotonic() + 5
    while device.stats()[0].used and time.monotonic() < deadline:  # close tells the device later
        time.sleep(0.01)
    assert device.stats()[0].used == 0


def test_locks_exclude_each_other(file: Path) -> None:
    with file.open() as mine, file.open() as other:
        fcntl.flock(mine, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_counters_are_exact(
    file: Path, device: EmulatedDevice, page_buffer: Callable[[int], mmap.mmap]
) -> None:
    descriptor = os.open(file, os.O_RDWR)
    os.pread(descriptor, 10000, 5)
    os.preadv(descriptor, [page_buffer(2 * MIB)], 0)  # two requests of 1 MiB
    os.pwrite(descriptor, b"x" * 4097, 3)
    os.fsync(descriptor)
    os.close(descriptor)
    stats = device.stats()[0]
    assert (stats.reads, stats.read_bytes) == (3, 10000 + 2 * MIB)
    assert (stats.writes, stats.written_bytes, stats.syncs) == (1, 4097, 1)
    assert stats.outstanding == 0
    assert device_stats(file) == stats
    device.reset_stats()
    assert device.stats()[0].read_bytes == 0


def test_a_path_elsewhere_has_no_counters(tmp_path: Path) -> None:
    assert device_stats(tmp_path) is None


def test_the_capacity_holds_and_is_told(device: EmulatedDevice) -> None:
    path = device.paths[0] / "large"
    with path.open("wb", buffering=0) as writer:
        os.posix_fallocate(writer.fileno(), 0, 63 * MIB)
        assert os.statvfs(path).f_bavail * 4096 == MIB
        os.pwrite(writer.fileno(), bytes(MIB), 5 * MIB)  # already allocated
        os.pwrite(writer.fileno(), bytes(MIB), 63 * MIB)
        with pytest.raises(OSError) as raised:
            os.pwrite(writer.fileno(), b"x", 64 * MIB)
        assert raised.value.errno == errno.ENOSPC
        os.ftruncate(writer.fileno(), MIB)
        assert device.stats()[0].used == MIB
    path.unlink()
    assert device.stats()[0].used == 0


def test_latency_and_places_are_at_least_those_of_the_profile(emulate: Callable[..., EmulatedDevice]) -> None:
    slow = emulate(DeviceProfile(name="slow", read_latency=0.02, write_latency=0.01, max_in_flight=4))
    path = slow.paths[0] / "slab"
    path.write_bytes(bytes(MIB))
    descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
    assert _seconds(lambda: os.pread(descriptor, 4096, 0)) >= 0.02
    assert _seconds(lambda: os.pwrite(descriptor, b"x" * 100, 0)) >= 0.01
    slow.reset_stats()
    with ThreadPoolExecutor(16) as pool:
        taken = _seconds(lambda: list(pool.map(lambda i: os.pread(descriptor, 4096, i * 4096), range(16))))
    os.close(descriptor)
    assert taken >= 4 * 0.02  # 16 requests, 4 at a time
    assert slow.stats()[0].max_in_flight == 4
    assert slow.stats()[0].max_outstanding > 4


def test_the_bandwidth_cap_is_shared_by_all_readers(emulate: Callable[..., EmulatedDevice]) -> None:
    capped = emulate(DeviceProfile(name="capped", read_bandwidth=100 * MIB))
    path = capped.paths[0] / "slab"
    path.write_bytes(bytes(8 * MIB))

    def read(i: int) -> int:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return len(os.pread(descriptor, MIB, i % 8 * MIB))
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(8) as pool:
        taken = _seconds(lambda: list(pool.map(read, range(50))))
    assert 0.5 <= taken < 2.5


def test_several_devices_count_for_themselves(emulate: Callable[..., EmulatedDevice]) -> None:
    four = emulate("nvmeof-4", size="8MiB")
    assert len(four.paths) == 4
    (four.paths[2] / "x").write_bytes(b"x" * 5000)
    assert [stats.written_bytes for stats in four.stats()] == [0, 0, 5000, 0]
    assert len({path.stat().st_dev for path in four.paths}) == 4


@pytest.mark.parametrize("engine", ["uring", "threads"])
def test_a_store_lives_on_it(
    device: EmulatedDevice,
    engine: str,
    keys: Callable[[int], list[kvtier.ChunkKey]],
    payload: Callable[[bytes, int], memoryview],
) -> None:
    if engine == "uring" and (reason := uring_obstacle()):
        pytest.skip(reason)
    chunks = keys(4)
    settings = {"capacity": 16 * MIB, "dram": 4 * MIB, "chunk_bytes": MIB, "engine": engine}
    with kvtier.open(device.paths[0], **settings) as store:
        stored = store.put(chunks, [payload(key, MIB) for key in chunks], until="disk").result(30)
        assert set(stored.status) == {kvtier.Status.STORED}
    device.reset_stats()
    with kvtier.open(device.paths[0], **settings) as store, store.read(chunks[:3]).result(30) as lease:
        assert [bytes(view) for view in lease.views if view is not None] == [
            bytes(payload(key, MIB)) for key in chunks[:3]
        ]
    assert device.stats()[0].read_bytes >= 3 * MIB


def test_an_exception_leaves_nothing_behind(emulate: Callable[..., EmulatedDevice]) -> None:
    emulate()  # skips where there is nothing to leave behind
    with pytest.raises(ZeroDivisionError), EmulatedDevice("nvmeof-4", size="1MiB") as devices:
        raise ZeroDivisionError
    devices.close()
    assert not any(is_mounted(path) for path in devices.paths)
    assert not any(path.parent.exists() for path in devices.paths)


_OWNER = """
import os, signal, sys, threading
from kvtier.testing.emulated import EmulatedDevice
from kvtier.testing.faults import Fault
device = EmulatedDevice(size="1MiB")
path = device.paths[0] / "x"
path.write_bytes(b"x")
device.inject(Fault(op="read", hang=True))
threading.Thread(target=path.read_bytes, daemon=True).start()
while not device.stats()[0].hanging: pass
print(path, flush=True)
if sys.argv[1] == "fork" and os.fork() == 0: sys.exit()
if sys.argv[1] == "fork": os.wait(); device.stats()
if sys.argv[1] == "kill": os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["exit", "fork", "kill"])
def test_a_hanging_device_ends_with_its_owner(emulate: Callable[..., EmulatedDevice], end: str) -> None:
    emulate()
    done = subprocess.run(
        [sys.executable, "-P", "-c", _OWNER, end], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == (-signal.SIGKILL if end == "kill" else 0), done.stderr
    path = Path(done.stdout.strip())
    deadline = time.monotonic() + 10
    folder = path.parents[1]
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_mounted(path.parent)
    assert not folder.exists()


def test_closing_fails_what_hangs(emulate: Callable[..., EmulatedDevice]) -> None:
    hung = emulate()
    path = hung.paths[0] / "x"
    path.write_bytes(b"x")
    hung.inject(Fault(op="read", hang=True))
    errors: list[OSError] = []

    def read() -> None:
        try:
            path.read_bytes()
        except OSError as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    while not hung.stats()[0].hanging:
        time.sleep(0.01)
    hung.close()
    reader.join(10)
    assert [error.errno for error in errors] in ([errno.ECONNABORTED], [errno.ENOTCONN])


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TierUnavailable, match="C compiler"):
        build.build()
    with pytest.raises(TierUnavailable, match="libfuse3-dev"):
        build._compile(["/usr/bin/cc"], [_without_headers(tmp_path)], tmp_path / "out")


def test_wrong_arguments_are_refused() -> None:
    for arguments in ({"profile_or_name": "floppy"}, {"size": "2 parsecs"}, {"size": 0}):
        with pytest.raises(InvalidRequest):
            EmulatedDevice(**arguments)
    with pytest.raises(TierUnavailable, match="smaller size"):
        EmulatedDevice(size="900TiB")
    assert all(name == profile.name for name, profile in PROFILES.items())


def _without_headers(folder: Path) -> Path:
    source = folder / "x.c"
    source.write_text('#include "nowhere/fuse_lowlevel.h"\n')
    return source


def _seconds(call: Callable[[], object]) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start
