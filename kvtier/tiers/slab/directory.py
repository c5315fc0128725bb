"""The directory of a slab: its files, the lock that makes it one process's, and their reservation."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.config import PAGE, journal_limit, page_up
from kvtier.errors import StoreInUse, TierUnavailable
from kvtier.format import (
    JOURNAL_HEADER_BYTES,
    RECORD_BYTES,
    SLAB_HEADER_BYTES,
    SLAB_MAGIC,
    DamagedHeader,
    Header,
    decode_header,
    decode_journal_head,
)
from kvtier.tiers.access import make_directory, open_file, read_file

if TYPE_CHECKING:
    from pathlib import Path

SLAB, JOURNAL, LOCK = "slab", "journal", "lock"


def lock_directory(path: Path, file_mode: int = 0o600, directory_mode: int = 0o700) -> int:
    """Create `path` if need be and lock it for this process. Returns the lock's descriptor.

    Raises StoreInUse with the owner's pid, TierUnavailable if the directory cannot be written.
    """
    if path.exists() and not path.is_dir():
        raise TierUnavailable(f"{path} is a file, and a store needs a directory: choose another path")
    try:
        make_directory(path, directory_mode)
        fd = open_file(path / LOCK, os.O_RDWR | os.O_CREAT, file_mode)
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
    journal_head_whole: bool = True
    """Whether both copies of the journal's header are as they were written."""


def read_headers(path: Path, *, salvage: bool = False) -> Found:
    """Look at the slab and the journal in a directory.

    Raises IncompatibleStore for another format version, or if no header can be read although there
    are files; TierUnavailable if one is a link; OSError if one cannot be read, or with `salvage` more of
    it than some pages.
    """
    headers: dict[str, Header | None] = {}
    doubts: list[DamagedHeader] = []
    whole = True
    for name in (SLAB, JOURNAL):
        headers[name] = None
        try:
            fd = open_file(path / name, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # or it reads ahead into the slots
            nbytes = SLAB_HEADER_BYTES if name == SLAB else JOURNAL_HEADER_BYTES
            data = read_pages(fd, nbytes)[0] if salvage else os.pread(fd, nbytes, 0)
        finally:
            os.close(fd)
        if not data:
            continue
        try:
            if name == SLAB:
                headers[name] = decode_header(data, SLAB_MAGIC, str(path / name))
            else:
                headers[name], whole = decode_journal_head(data, str(path / name))
        except DamagedHeader as error:
            doubts.append(error)
    if doubts and headers[SLAB] is None and headers[JOURNAL] is None:
        raise doubts[0]
    return Found(headers[SLAB], headers[JOURNAL], whole)


def read_journal(path: Path, header: Header) -> bytes:
    """The whole journal in a directory, whose header is `header`, but no more than `longest_journal`.

    Raises TierUnavailable if it is a link, OSError.
    """
    return read_file(path / JOURNAL, longest_journal(header))


def longest_journal(header: Header) -> int:
    """Most bytes that the tier's journal can have had: a record per page after its capacity was lowered."""
    capacity = header.capacity
    most = JOURNAL_HEADER_BYTES + capacity // PAGE * RECORD_BYTES
    return max(journal_limit(capacity, header.chunk_bytes), most)


def read_pages(fd: int, nbytes: int) -> tuple[bytes, int]:
    """The first `nbytes` of a file, as far as it goes, with zeros for every page that the device twice
    fails to read, and how many these are. Raises OSError for a failure of another kind.
    """
    end = min(nbytes, os.fstat(fd).st_size)
    data, bad = bytearray(), 0
    for offset in range(0, end, PAGE):
        page = _read_page(fd, offset) or _read_page(fd, offset)
        bad += page is None
        data += page or bytes(PAGE)
    return bytes(data[:end]), bad


def _read_page(fd: int, offset: int) -> bytes | None:
    try:
        return os.pread(fd, PAGE, offset)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return None


def check_free_space(path: Path, wanted: int, floor: int) -> None:
    """Raise TierUnavailable unless the slab and journal at `path` can grow to `wanted` bytes in all, and
    leave `floor` bytes free."""
    existing = path
    while not existing.exists():
        existing = existing.parent
    disk = os.statvfs(existing)
    free = disk.f_bavail * disk.f_frsize - floor
    held = sum((path / name).lstat().st_blocks * 512 for name in (SLAB, JOURNAL) if (path / name).exists())
    if wanted > free + held:
        kept = f" beside the {floor} of free_space" if floor else ""
        raise TierUnavailable(
            f"capacity is {wanted} bytes, but the file system of {path} has {max(0, free + held)} left for "
            f"it{kept}: lower capacity, free space, or choose another directory"
        )


def open_slab(path: Path, nbytes: int, mode: int = 0o600) -> tuple[int, bool, bool]:
    """Open the slab with `nbytes` reserved. Returns its descriptor, whether reads bypass the page
    cache, and whether the file system holds the space for it.

    Raises OSError.
    """
    name = path / SLAB
    flags = os.O_RDWR | os.O_CREAT
    direct = True
    try:
        fd = open_file(name, flags | os.O_DIRECT, mode)
    except OSError:
        fd, direct = open_file(name, flags, mode), False
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
