"""Files and directories of a store: whose they are, and that they are what they seem."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from kvtier.errors import TierUnavailable

if TYPE_CHECKING:
    from pathlib import Path


def make_directory(path: Path, mode: int) -> None:
    """Make a directory and the parents it lacks with just this `mode`, whatever the umask.

    What is there keeps its mode. Raises OSError.
    """
    if path.is_dir():
        return
    if path.parent != path:
        make_directory(path.parent, mode)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    if stat.S_IMODE(os.lstat(path).st_mode) != mode:
        os.chmod(path, mode)


def open_file(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open a file of a store. One that O_CREAT makes gets just this `mode`, whatever the umask; one
    that is there keeps its own. Returns the descriptor.

    Raises TierUnavailable if it is a symbolic link or anything else than a file, OSError.
    """
    refuse_links(path)  # before opening it: a pipe would wait for its other end
    if flags & os.O_CREAT:
        try:
            return _create(path, flags, mode)
        except FileExistsError:
            flags &= ~os.O_CREAT
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


def replace_file(path: Path, flags: int, mode: int) -> int:
    """Make a new file in the place of what is left over there. Returns its descriptor. Raises OSError."""
    path.unlink(missing_ok=True)
    return _create(path, flags, mode)


def read_file(path: Path, limit: int) -> bytes:
    """The first `limit` bytes of a file of a store. Raises what open_file raises."""
    with open(open_file(path, os.O_RDONLY), "rb") as file:
        return file.read(min(limit, os.fstat(file.fileno()).st_size))


def refuse_links(path: Path) -> None:
    """Raise TierUnavailable if there is something at `path` that is not a file of our own."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        what = "a symbolic link" if stat.S_ISLNK(mode) else "not a file"
        raise TierUnavailable(
            f"{path} is {what}, and a store opens only files in its own directory: remove it, or choose "
            "another directory (which may be a link itself)"
        )


def _create(path: Path, flags: int, mode: int) -> int:
    fd = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if stat.S_IMODE(os.fstat(fd).st_mode) != mode:
            os.fchmod(fd, mode)
    except OSError:
        os.close(fd)
        raise
    return fd
