"""The directory of a slab: its files, the lock that makes it one process's, and their reservation."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.config import page_up
from kvtier.errors import StoreInUse, TierUnavailable
from kvtier.format import JOURNAL_MAGIC, RECORD_BYTES, SLAB_MAGIC, DamagedHeader, Header, decode_header

if TYPE_CHECKING:
    from pathlib import Path

SLAB, JOURNAL, LOCK = "slab", "journal", "lock"


def lock_directory(path: Path) -> int:
    """Create `path` if need be and lock it for this process. Returns the lock's descriptor.

    Raises StoreInUse with the owner's pid, TierUnavailable if the directory cannot be written.
    """
    if path.exists() and not path.is_dir():
        raise TierUnavailable(f"{path} is a file, and a store needs a directory: choose another path")
    try:
        path.mkdir(parents=True, exist_ok=True)
        fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise TierUnavailable(
            f"cannot write to the store directory {path}: {error.strerror}; choose another directory "
            "or mend its permissions"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        if not isinstance(error, BlockingIOError):
            raise TierUnavailable(f"cannot lock the store directory {path}: {error.strerror}") from error
        raise StoreInUse(
            f"the store directory {path} is in use by process {owner}: close that store first, "
            "or give each process a directory of its own"
        ) from None
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        os.close(fd)
        raise TierUnavailable(f"cannot write {path / LOCK}: {error.strerror}") from error
    return fd


@dataclass(frozen=True, slots=True)
class Found:
    """The headers found in a directory; None where a file is absent or its header damaged."""

    slab: Header | None = None
    journal: Header | None = None


def read_headers(path: Path) -> Found:
    """Look at the slab and the journal in a directory.

    Raises IncompatibleStore for another format version, or if no header can be read although there
    are files; OSError if a file cannot be read.
    """
    headers: dict[str, Header | None] = {}
    doubts: list[DamagedHeader] = []
    for name, magic in ((SLAB, SLAB_MAGIC), (JOURNAL, JOURNAL_MAGIC)):
        headers[name] = None
        try:
            fd = os.open(path / name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # or it reads ahead into the slots
            data = os.pread(fd, RECORD_BYTES, 0)
        finally:
            os.close(fd)
        if not data:
            continue
        try:
            headers[name] = decode_header(data, magic, str(path / name))
        except DamagedHeader as error:
            doubts.append(error)
    if doubts and headers[SLAB] is None and headers[JOURNAL] is None:
        raise doubts[0]
    return Found(headers[SLAB], headers[JOURNAL])


def check_free_space(path: Path, wanted: int) -> None:
    """Raise TierUnavailable unless the slab and journal at `path` can grow to `wanted` bytes in all."""
    existing = path
    while not existing.exists():
        existing = existing.parent
    disk = os.statvfs(existing)
    free = disk.f_bavail * disk.f_frsize
    held = sum((path / name).stat().st_blocks * 512 for name in (SLAB, JOURNAL) if (path / name).exists())
    if wanted > free + held:
        raise TierUnavailable(
            f"capacity is {wanted} bytes, but the file system of {path} has {free + held} left for it: "
            "lower capacity, free space, or choose another directory"
        )


def open_slab(path: Path, nbytes: int) -> tuple[int, bool, bool]:
    """Open the slab with `nbytes` reserved. Returns its descriptor, whether reads bypass the page
    cache, and whether the file system holds the space for it.

    Raises OSError.
    """
    name = path / SLAB
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    direct = True
    try:
        fd = os.open(name, flags | os.O_DIRECT, 0o644)
    except OSError:
        fd, direct = os.open(name, flags, 0o644), False
    try:
        os.ftruncate(fd, page_up(nbytes))
        reserved = _reserve(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd, direct, reserved


def _reserve(fd: int, nbytes: int) -> bool:
    """Allocate blocks; False where the file system cannot. (os.posix_fallocate would write them.)"""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(nbytes)) == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(error, os.strerror(error))


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
