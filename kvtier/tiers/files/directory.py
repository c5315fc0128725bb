"""The directory of a tier of kind `files`: its layout, its listing, and the temporaries in it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from kvtier.errors import IncompatibleStore, TierUnavailable
from kvtier.tiers.access import make_directory
from kvtier.tiers.files.format import ChunkFile, owner_file, parse_name, parse_owner

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from kvtier.owner import OwnerName

LEDGER, CHUNKS, INCOMING, OWNERS = "ledger", "chunks", "incoming", "owners"
_OURS = (LEDGER, CHUNKS, INCOMING, OWNERS, "lost+found")
_OF_A_SLAB = ("slab", "journal")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_CLOEXEC | os.O_NOFOLLOW
_MANY = 64
"""Files that are quicker synced with all else on the file system: each one takes milliseconds."""
_FUSE = 0x65735546
_libc = ctypes.CDLL(None, use_errno=True)


class Listed(NamedTuple):
    """A file among the chunks: what its name says, None if nothing, and what the file system says."""

    name: str
    file: ChunkFile | None
    part_bytes: int
    nbytes: int
    mtime: int

    def is_whole(self, part_bytes: int) -> bool:
        """Whether its name is that of a chunk with such parts, and its size what the name says."""
        file = self.file
        return file is not None and (file.stored_bytes, part_bytes) == (self.nbytes, self.part_bytes)


class Directory:
    """Descriptors of the directory and the three in it: nothing is reached but through them, and no symbolic
    link is followed. Raises OSError from everything.
    """

    def __init__(self, path: Path, file_mode: int = 0o600, directory_mode: int = 0o700) -> None:
        """Open, or create, the directories; what is made gets these modes.

        Raises TierUnavailable if that cannot be done, IncompatibleStore if something else is in there.
        """
        self.path = path
        self._file_mode, self._directory_mode = file_mode, directory_mode
        self.direct = True
        """Whether reads and writes bypass the page cache, as far as that was tried."""
        self.open_files: set[int] = set()
        """Descriptors of chunks and temporaries."""
        self._temporaries: set[str] = set()  # names of those that are being written
        self._prefix = f"{os.getpid()}-{os.urandom(8).hex()}-"
        self._numbers = itertools.count()
        self.owners_noted = 0
        """Owners that were new to the directory when this process named them."""
        self._owners_synced = 0
        check_kind(path)
        with contextlib.ExitStack() as undo:
            try:
                make_directory(path, directory_mode)
                self.root = os.open(path, _FOLDER)
                undo.callback(os.close, self.root)
                self.chunks = self._folder(CHUNKS)
                undo.callback(os.close, self.chunks)
                self.incoming = self._folder(INCOMING)
                undo.callback(os.close, self.incoming)
                self.owners = self._folder(OWNERS)
            except OSError as error:
                raise TierUnavailable(
                    f"cannot use the store directory {path}: {error.strerror}; choose another directory or "
                    "mend its permissions"
                ) from error
            undo.pop_all()

    def _folder(self, name: str) -> int:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self.root)
            os.chmod(name, self._directory_mode, dir_fd=self.root)  # whatever the umask
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=self.root)

    def open_ledger(self) -> int:
        """Descriptor of the ledger, an empty file if there was none."""
        with contextlib.suppress(FileExistsError):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE
            fd = os.open(LEDGER, flags, 0o600, dir_fd=self.root)
            os.fchmod(fd, self._file_mode)
            return fd
        return os.open(LEDGER, os.O_RDWR | _FILE, dir_fd=self.root)

    def is_ledger(self, fd: int) -> bool:
        """Whether the descriptor is of the file that is the ledger now."""
        try:
            return os.path.samestat(os.fstat(fd), os.stat(LEDGER, dir_fd=self.root, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def list_chunks(self) -> Iterator[Listed]:
        """Every file among the chunks, in no order."""
        for name, status in self._list(self.chunks):
            file, part_bytes = parse_name(name) or (None, 0)
            yield Listed(name, file, part_bytes, status.st_size, status.st_mtime_ns)

    def _list(self, folder: int) -> Iterator[tuple[str, os.stat_result]]:
        fd = os.open(".", _FOLDER, dir_fd=folder)  # a position of its own
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            yield entry.name, status
        finally:
            os.close(fd)

    def list_owners(self) -> dict[int, OwnerName]:
        """The owners that the directory knows, by id."""
        names = (parse_owner(name) for name, _ in self._list(self.owners))
        return {owner.id: owner for owner in names if owner is not None}

    def note_owner(self, owner: OwnerName) -> None:
        """Have the directory know an owner."""
        flags = os.O_RDONLY | os.O_CREAT | os.O_EXCL | _FILE
        try:
            fd = os.open(owner_file(owner), flags, 0o600, dir_fd=self.owners)
        except FileExistsError:
            return
        try:
            os.fchmod(fd, self._file_mode)
        finally:
            os.close(fd)
        self.owners_noted += 1

    def forget_owners(self, owners: Iterable[OwnerName]) -> None:
        """Have the directory forget owners, of whom there must be no chunk in it."""
        for owner in owners:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(owner_file(owner), dir_fd=self.owners)

    def open_chunk(self, name: str) -> int:
        """Descriptor of a chunk's file, for reading. Counted in `open_files` until `close`."""
        fd = self._open(name, os.O_RDONLY, self.chunks)
        if not self.direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return fd

    def create(self, nbytes: int) -> tuple[str, int]:
        """A temporary of that size, locked for as long as it is open. Returns its name and descriptor.

        If it fails, what there is of it is for `sweep` to remove.
        """
        name = f"{self._prefix}{next(self._numbers)}"
        fd = self._open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, self.incoming)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._file_mode != 0o600:
                os.fchmod(fd, self._file_mode)
            _reserve(fd, nbytes)
        except OSError:
            self.close(fd)
            raise
        self._temporaries.add(name)
        return name, fd

    def _open(self, name: str, flags: int, folder: int) -> int:
        """With O_DIRECT where the file system has it."""
        if self.direct:
            try:
                fd = os.open(name, flags | _FILE | os.O_DIRECT, 0o600, dir_fd=folder)
                self.open_files.add(fd)
                return fd
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
            # Where O_DIRECT is refused, the file may have been created all the same.
            flags &= ~os.O_EXCL
        fd = os.open(name, flags | _FILE, 0o600, dir_fd=folder)
        self.direct = False
        self.open_files.add(fd)
        return fd

    def close(self, fd: int) -> None:
        """Close a chunk or a temporary. What the device says to that changes nothing any more."""
        self.open_files.discard(fd)
        with contextlib.suppress(OSError):
            os.close(fd)

    def publish(self, temporary: str, name: str) -> None:
        """Make a temporary a chunk."""
        os.rename(temporary, name, src_dir_fd=self.incoming, dst_dir_fd=self.chunks)
        self._temporaries.discard(temporary)

    def drop(self, temporary: str) -> int:
        """Remove a temporary. Returns the bytes that it took. If it fails, `sweep` removes it."""
        self._temporaries.discard(temporary)
        nbytes = os.stat(temporary, dir_fd=self.incoming, follow_symlinks=False).st_size
        os.unlink(temporary, dir_fd=self.incoming)
        return nbytes

    def status(self, name: str) -> os.stat_result | None:
        """What the file system says of a chunk's file; None if there is none."""
        try:
            return os.stat(name, dir_fd=self.chunks, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def touch(self, name: str) -> int | None:
        """Mark a chunk as used now. Returns its new time of change, None if it is gone."""
        try:
            os.utime(name, dir_fd=self.chunks, follow_symlinks=False)
        except FileNotFoundError:
            return None
        status = self.status(name)
        return None if status is None else status.st_mtime_ns

    def remove(self, name: str) -> None:
        """Remove a chunk, or what somebody put in its place; not a directory."""
        with contextlib.suppress(IsADirectoryError):
            os.unlink(name, dir_fd=self.chunks)

    def stamp(self, fd: int, when: int) -> int:
        """Give an open file its time of change, in nanoseconds. Returns that as the file system has it."""
        os.utime(fd, ns=(when, when))
        return os.fstat(fd).st_mtime_ns

    def strangers(self) -> set[str]:
        """Names of temporaries that nobody here is writing."""
        return set(os.listdir(self.incoming)) - self._temporaries

    def sweep(self) -> tuple[int, int]:
        """Remove the temporaries that nobody is writing. Returns the bytes of those that remain, and of those
        that were removed.
        """
        kept = removed = 0
        for name, status in self._list(self.incoming):
            if name in self._temporaries or (not name.startswith(self._prefix) and self._is_held(name)):
                kept += status.st_size
            else:
                os.unlink(name, dir_fd=self.incoming)
                removed += status.st_size
        return kept, removed

    def _is_held(self, temporary: str) -> bool:
        """Whether a process lives that writes this temporary."""
        try:
            fd = os.open(temporary, os.O_RDONLY | _FILE, dir_fd=self.incoming)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(fd)

    def sync(self, names: list[str]) -> None:
        """Have the device confirm these chunks, and their names. What is gone needs no confirmation."""
        noted = self.owners_noted
        if len(names) > _MANY and self._sync_all():
            self._owners_synced = noted
            return
        for name in names:
            try:
                fd = os.open(name, os.O_RDONLY | _FILE, dir_fd=self.chunks)
            except FileNotFoundError:
                continue
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)
        if noted != self._owners_synced:
            os.fsync(self.owners)
            self._owners_synced = noted
        os.fsync(self.chunks)
        os.fsync(self.root)

    def _sync_all(self) -> bool:
        """Have the device confirm everything on the file system; False where it would not know of that."""
        state = (ctypes.c_long * 32)()
        if _libc.fstatfs(self.chunks, state) or state[0] == _FUSE:
            return False
        if _libc.syncfs(self.chunks):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        return True

    def check_free_space(self, wanted: int, held: int) -> None:
        """Raise TierUnavailable unless files that take `held` bytes can grow to `wanted`."""
        disk = os.fstatvfs(self.root)
        free = disk.f_bavail * disk.f_frsize
        if wanted > free + held:
            raise TierUnavailable(
                f"capacity is {wanted} bytes, but the file system of {self.path} has {free + held} left for "
                "it: lower capacity, free space, or choose another directory"
            )

    def empty(self) -> None:
        """Remove everything but the ledger."""
        for folder in (self.chunks, self.incoming, self.owners):
            for name, _ in self._list(folder):
                os.unlink(name, dir_fd=folder)

    def shut(self) -> None:
        """Close every descriptor, of files too that are still open."""
        for fd in (*self.open_files, self.chunks, self.incoming, self.owners, self.root):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.open_files.clear()


def check_kind(path: Path) -> None:
    """Raise IncompatibleStore if the directory holds a store of kind `slab`, or files of somebody else."""
    if path.exists() and not path.is_dir():
        raise TierUnavailable(f"{path} is a file, and a store needs a directory: choose another path")
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise TierUnavailable(f"cannot read the store directory {path}: {error.strerror}") from error
    if any(name in names for name in _OF_A_SLAB):
        raise IncompatibleStore(
            f"{path} holds a store of kind 'slab': open it with kind='slab', or choose another directory"
        )
    strange = sorted(name for name in names if name not in _OURS and name[0] != ".")
    if strange:
        raise IncompatibleStore(
            f"{path} holds {strange[0]!r}, which is not of a store of kind 'files': choose a directory of "
            "its own"
        )


def _reserve(fd: int, nbytes: int) -> None:
    """Give a file its size, and blocks where the file system can. (os.posix_fallocate would write them.)"""
    if _libc.fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(nbytes)) == 0:
        return
    error = ctypes.get_errno()
    if error not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
        raise OSError(error, os.strerror(error))
    os.ftruncate(fd, nbytes)
