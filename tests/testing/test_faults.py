"""Every kind of fault, seen through real system calls."""

from __future__ import annotations

import errno
import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import InvalidRequest
from kvtier.testing.faults import Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvtier.testing.emulated import EmulatedDevice

MIB = 1 << 20
OPERATIONS: dict[str, Callable[[int], object]] = {
    "read": lambda fd: os.pread(fd, 10, 0),
    "write": lambda fd: os.pwrite(fd, b"x", 0),
    "fsync": os.fsync,
    "fallocate": lambda fd: os.posix_fallocate(fd, 0, 100),
    "ftruncate": lambda fd: os.ftruncate(fd, 2 * MIB),
}


@pytest.fixture
def fd(file: Path) -> Iterator[int]:
    descriptor = os.open(file, os.O_RDWR)
    yield descriptor
    os.close(descriptor)


def _error(call: Callable[[], object]) -> int:
    try:
        call()
    except OSError as error:
        return error.errno or 0
    return 0


@pytest.mark.parametrize("code", [errno.EIO, errno.EDQUOT, errno.EROFS, errno.ENOLINK, errno.ENOMEM])
@pytest.mark.parametrize("op", OPERATIONS)
def test_any_operation_fails_with_any_error(device: EmulatedDevice, fd: int, op: Any, code: int) -> None:
    fault = device.inject(Fault(op=op, errno=code, count=1))
    failed = {name for name, call in OPERATIONS.items() if _error(partial(call, fd)) == code}
    assert failed == {op}
    assert _error(lambda: OPERATIONS[op](fd)) == 0
    assert fault.hits == 1
    assert device.stats()[0].faults_injected == 1


def test_open_fails(device: EmulatedDevice, file: Path) -> None:
    device.inject(Fault(op="open", errno=errno.EMFILE))
    assert _error(file.read_bytes) == errno.EMFILE


def test_a_fault_is_for_its_file_and_range(device: EmulatedDevice, fd: int) -> None:
    (device.paths[0] / "journal").write_bytes(b"x" * 100)
    device.inject(Fault(op="read", file="sl*", offset=4096, length=10, errno=errno.EIO))
    assert _error(lambda: os.pread(fd, 4096, 0)) == 0
    assert _error(lambda: os.pread(fd, 4097, 0)) == errno.EIO
    assert _error(lambda: os.pread(fd, 10, 4106)) == 0
    assert (device.paths[0] / "journal").read_bytes() == b"x" * 100


def test_a_fault_is_for_opens_with_o_direct(device: EmulatedDevice, file: Path) -> None:
    device.inject(Fault(op="open", direct=True, errno=errno.EINVAL))
    assert _error(file.read_bytes) == 0
    assert _error(lambda: os.close(os.open(file, os.O_RDWR | os.O_DIRECT))) == errno.EINVAL


def test_a_fault_is_for_what_is_not_whole_sectors(device: EmulatedDevice, fd: int) -> None:
    device.inject(Fault(op="write", sector=4096, errno=errno.EINVAL))
    for offset, nbytes, code in [(4096, 4096, 0), (512, 4096, errno.EINVAL), (4096, 512, errno.EINVAL)]:
        assert _error(lambda at=offset, n=nbytes: os.pwrite(fd, bytes(n), at)) == code  # type: ignore[misc]


def test_a_fault_begins_at_the_nth_and_ends_by_count(device: EmulatedDevice, fd: int) -> None:
    device.inject(Fault(op="read", nth=3, count=2, errno=errno.EIO))
    assert [_error(lambda: os.pread(fd, 1, 0)) for _ in range(6)] == [0, 0, errno.EIO, errno.EIO, 0, 0]


def test_probability_is_drawn_from_the_seed(device: EmulatedDevice, fd: int) -> None:
    def failures(seed: int) -> list[int]:
        fault = device.inject(Fault(op="read", probability=0.3, seed=seed, errno=errno.EIO))
        found = [i for i in range(200) if _error(lambda: os.pread(fd, 1, 0))]
        fault.remove()
        return found

    assert failures(7) == failures(7) != failures(8)
    assert 30 < len(failures(7)) < 90


def test_short_read_and_short_write(device: EmulatedDevice, fd: int) -> None:
    device.inject(Fault(op="read", short=100))
    device.inject(Fault(op="write", short=0))
    device.inject(Fault(op="write", short=50))
    assert len(os.pread(fd, 4096, 0)) == 100
    assert os.pwrite(fd, bytes(4096), 0) == 0
    device.clear_faults()
    device.inject(Fault(op="write", short=50))
    assert os.pwrite(fd, bytes(4096), 0) == 50


def test_flipped_bit_in_what_is_returned(device: EmulatedDevice, fd: int) -> None:
    right = os.pread(fd, 4096, 0)
    device.inject(Fault(op="read", offset=1000, length=1, flip_bit=3))
    wrong = os.pread(fd, 4096, 0)
    assert wrong == right[:1000] + bytes([right[1000] ^ 8]) + right[1001:]
    device.clear_faults()
    assert os.pread(fd, 4096, 0) == right


def test_flipped_bit_in_what_is_stored(device: EmulatedDevice, fd: int) -> None:
    device.inject(Fault(op="write", flip_bit=9))
    assert os.pwrite(fd, bytes(4096), 8192) == 4096
    assert os.pread(fd, 4096, 8192) == b"\0\2" + bytes(4094)


@pytest.mark.parametrize("kept", [0, 4096, 8192])
@pytest.mark.parametrize("code", [None, errno.EIO])
def test_torn_write(device: EmulatedDevice, fd: int, kept: int, code: int | None) -> None:
    os.pwrite(fd, b"o" * 12288, 0)
    device.inject(Fault(op="write", torn=kept, errno=code))
    assert _error(lambda: os.pwrite(fd, b"n" * 12288, 0)) == (code or 0)
    assert os.pread(fd, 12288, 0) == b"n" * kept + b"o" * (12288 - kept)


def test_hang_until_released_or_for_a_time(device: EmulatedDevice, fd: int) -> None:
    device.inject(Fault(op="read", hang=True, errno=errno.EIO, count=1))
    codes: list[int] = []
    reader = threading.Thread(target=lambda: codes.append(_error(lambda: os.pread(fd, 1, 0))))
    reader.start()
    while not device.stats()[0].hanging:
        time.sleep(0.01)
    assert reader.is_alive()
    os.pwrite(fd, b"x", 0)  # the rest of the device goes on
    device.release_hangs()
    reader.join(10)
    assert codes == [errno.EIO]
    device.inject(Fault(op="write", hang=0.1))
    start = time.monotonic()
    os.pwrite(fd, b"x", 0)
    assert time.monotonic() - start >= 0.1


def test_latency_spike(device: EmulatedDevice, fd: int) -> None:
    device.inject(Fault(op="read", delay=0.1, nth=2, count=1))
    os.pread(fd, 1, 0)
    start = time.monotonic()
    os.pread(fd, 1, 0)
    assert time.monotonic() - start >= 0.1


def test_a_device_that_is_gone_fails_everything(device: EmulatedDevice, file: Path, fd: int) -> None:
    gone = device.inject(Fault.gone())
    calls = [*OPERATIONS.values(), os.fstat]
    assert {_error(partial(call, fd)) for call in calls} == {errno.ENODEV}
    assert {_error(call) for call in (file.stat, file.unlink, lambda: os.listdir(file.parent))} == {
        errno.ENODEV
    }
    gone.remove()
    assert file.stat().st_size == 2 * MIB


def test_capacity_can_end_earlier(device: EmulatedDevice, fd: int) -> None:
    full = device.inject(Fault(capacity=2 * MIB))
    assert os.pwrite(fd, bytes(MIB), 0) == MIB  # already stored
    assert _error(lambda: os.pwrite(fd, b"x", 2 * MIB)) == errno.ENOSPC
    assert _error(lambda: os.posix_fallocate(fd, 0, 3 * MIB)) == errno.ENOSPC
    assert full.hits == 2
    full.remove()
    assert os.pwrite(fd, b"x", 2 * MIB) == 1


def test_the_first_fault_that_fires_decides_and_all_are_counted(device: EmulatedDevice, fd: int) -> None:
    first = device.inject(Fault(op="read", count=1, errno=errno.EIO))
    second = device.inject(Fault(op="read", errno=errno.ENODEV))
    assert [_error(lambda: os.pread(fd, 1, 0)) for _ in range(3)] == [errno.EIO, errno.ENODEV, errno.ENODEV]
    assert [(rule.id, rule.hits) for rule in device.stats()[0].faults] == [(first.id, 1), (second.id, 2)]


def test_a_vanished_device_stays_away(emulate: Callable[..., EmulatedDevice]) -> None:
    vanishing = emulate()
    path = vanishing.paths[0] / "x"
    path.write_bytes(b"x")
    vanishing.abort()
    assert _error(path.read_bytes) in (errno.ENOTCONN, errno.ECONNABORTED)
    vanishing.close()
    assert not path.parent.exists()


def test_a_device_vanishes_at_once_when_a_forked_child_says_so(
    emulate: Callable[..., EmulatedDevice],
) -> None:
    vanishing = emulate()
    path = vanishing.paths[0] / "x"
    path.write_bytes(b"x")
    if (child := os.fork()) == 0:
        vanishing.abort()
        os._exit(_error(path.read_bytes))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (errno.ENOTCONN, errno.ECONNABORTED)
    vanishing.close()


def test_a_detached_device_serves_what_is_open(emulate: Callable[..., EmulatedDevice]) -> None:
    detached = emulate()
    path = detached.paths[0] / "x"
    path.write_bytes(b"old")
    descriptor = os.open(path, os.O_RDWR)
    detached.detach()
    assert not path.exists()
    os.pwrite(descriptor, b"new", 0)
    assert os.pread(descriptor, 3, 0) == b"new"
    os.close(descriptor)
    detached.close()
    assert not path.parent.exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"short": 1, "torn": 1},
        {"errno": 5, "file": "a\nb"},
        {"errno": 5, "probability": 2},
        {"errno": 5, "direct": True},
        {"errno": 5, "op": "fsync", "sector": 4096},
    ],
)
def test_wrong_faults_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Fault(**wrong)


def test_the_device_refuses_commands_that_it_does_not_know(device: EmulatedDevice) -> None:
    assert _error(lambda: device._tell("explode")) == errno.EINVAL
    assert _error(lambda: device._tell("inject\nop=explode")) == errno.EINVAL
