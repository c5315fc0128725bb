"""Where a benchmark runs: directories on the devices to measure, and counters that prove a read cold."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.cli.sizes import size
from kvtier.errors import InvalidRequest, TierUnavailable
from kvtier.testing.emulated import EmulatedDevice, device_stats
from kvtier.testing.profiles import profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_PROBE_BYTES = 1 << 20
_SPARE = 64 << 20  # bytes for directories, journals and rounding


@dataclass(frozen=True, slots=True)
class Place:
    """Directories of this run alone, one per device or given path, empty at first."""

    directories: tuple[Path, ...]
    description: str
    counter: ReadCounter


@contextmanager
def open_place(paths: Sequence[Path], device: str | None, needed: Callable[[int], int]) -> Iterator[Place]:
    """Make the directories, and remove them afterwards; an emulated `device` is mounted meanwhile.

    `needed(count)` is the bytes that each of `count` directories will take. Raises InvalidRequest for
    paths that are no directories, TierUnavailable for too little space or no FUSE.
    """
    if device is not None and paths:
        raise InvalidRequest("--device mounts its own directories: give either --device or --path")
    with ExitStack() as stack:
        if device is not None:
            count = profile(device).devices
            emulated = EmulatedDevice(device, size=needed(count) + _SPARE)
            parents = stack.enter_context(emulated).paths
            description = f"emulated {device}" + (f" ({count} devices)" if count > 1 else "")
        else:
            parents = list(paths) or [Path(stack.enter_context(tempfile.TemporaryDirectory()))]
            for parent in parents:
                _check(parent, needed(len(parents)) + _SPARE)
            description = ", ".join(f"{parent} ({mount_of(parent)[2]})" for parent in parents)
        directories = tuple(
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".kvtier-bench-", dir=parent)))
            for parent in parents
        )
        yield Place(directories, description, ReadCounter(directories))


class ReadCounter:
    """Bytes that the devices delivered, by their own counters or by this process's.

    The process's include its ended children, and are those of block devices: `read` is None on a file
    system that they do not cover (tmpfs, network and FUSE mounts).
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        by_device = {directory.stat().st_dev: directory for directory in directories}
        self._emulated = list(by_device.values())
        if any(device_stats(directory) is None for directory in self._emulated):
            self._emulated = []
        self._counts = bool(self._emulated) or all(_is_counted(path) for path in by_device.values())
        self.slack = 0.0 if self._emulated else 0.02
        """What may be counted on top, as a fraction: a block device's metadata."""

    def read(self) -> int | None:
        """Bytes so far."""
        if not self._counts:
            return None
        if self._emulated:
            found = (device_stats(directory) for directory in self._emulated)
            return sum(stats.read_bytes for stats in found if stats is not None)
        return _process_read_bytes()


def drop_cache(file: Path) -> None:
    """Write back a file's pages and forget them, so that the next read goes to the device."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _check(path: Path, needed: int) -> None:
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        raise InvalidRequest(f"--path {path} is not a directory that can be written")
    disk = os.statvfs(path)
    free = disk.f_bavail * disk.f_frsize
    if free < needed:
        raise TierUnavailable(
            f"{path} has {size(free)} free, the benchmark takes {size(needed)}: lower --gib"
        )


def mount_of(path: Path) -> tuple[str, str, str, str]:
    """Source, mount point, type and options of the file system that holds `path`, as the kernel has them."""
    best = ("", "", "unknown", "")
    resolved = path.resolve()
    for line in Path("/proc/self/mounts").read_text().splitlines():
        source, mount, kind, options, *_ = line.split(" ")
        if resolved.is_relative_to(mount) and len(mount) >= len(best[1]):
            best = source, mount, kind, options
    return best


def _process_read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def _is_counted(directory: Path) -> bool:
    """Whether the process's counter sees a cold read there."""
    probe = directory / "probe"
    probe.write_bytes(os.urandom(_PROBE_BYTES))
    drop_cache(probe)
    try:
        before = _process_read_bytes()
        probe.read_bytes()
        return _process_read_bytes() - before >= _PROBE_BYTES
    except OSError:
        return False
    finally:
        probe.unlink()
