"""The journal: an append-only file of fixed-size records, and the next one that takes its place."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from typing import TYPE_CHECKING

import numpy as np

from kvtier.format import JOURNAL_HEADER_BYTES, PUT, RECORD, RECORD_BYTES, journal_head, seal
from kvtier.tiers.access import open_file, replace_file
from kvtier.tiers.slab.directory import sync_directory

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from kvtier.format import Header

_SEAL_RECORDS = 1 << 12
_SYNC_RECORDS = 1 << 15
"""Records that a new file may be ahead of the device: 4 MiB, so that no sync has to wait for more."""
_FEW_DEAD = 1 << 16
"""Dead records that are not worth a new file: 8 MiB, read in a moment at the next opening."""


class NewJournal:
    """A journal on its way into place: a file of another name until `Journal.replace` or `put_in_place`."""

    def __init__(self, path: Path, header: Header, mode: int = 0o600) -> None:
        """Begin the file that is to replace `path`, with its permissions, or `mode` for a first one.

        Raises OSError, and then there is none.
        """
        self.path = path
        self.header = header
        self.records = 0
        self._temporary = path.with_name(path.name + ".new")
        with contextlib.suppress(FileNotFoundError):
            mode = stat.S_IMODE(path.lstat().st_mode)
        self.fd = replace_file(self._temporary, os.O_WRONLY | os.O_APPEND, mode)
        try:
            _write_all(self.fd, journal_head(header))
        except OSError:
            self.abandon()
            raise

    def write(self, records: npt.NDArray[np.void]) -> None:
        """Write records behind the last one. Raises OSError."""
        for first in range(0, len(records), _SEAL_RECORDS):
            some = records[first : first + _SEAL_RECORDS]
            _write_all(self.fd, seal(some, self.header.journal_id, self.records))
            self.records += len(some)
            if self.records // _SYNC_RECORDS != (self.records - len(some)) // _SYNC_RECORDS:
                os.fdatasync(self.fd)

    def sync(self) -> None:
        """Have the device confirm all that was written. Raises OSError."""
        os.fsync(self.fd)

    def put_in_place(self) -> None:
        """Give the file its name; that is durable once the directory is synced. Raises OSError."""
        os.rename(self._temporary, self.path)

    def abandon(self) -> None:
        """Close the file, and remove it unless it has got its name."""
        try:
            self._temporary.unlink(missing_ok=True)
        except OSError:
            with contextlib.suppress(OSError):  # at least it takes up no space
                os.ftruncate(self.fd, 0)
        os.close(self.fd)


class Tail:
    """What is appended to a journal while the next file is written. Guarded by the journal's lock."""

    def __init__(self, planned: int) -> None:
        self.planned = planned
        """Records of the next file but for the tail: the most it can be, then what it is."""
        self.total = 0
        """Records appended so far."""
        self.taken = 0
        """Of them, those that were handed out by `take`."""
        self.promised = 0
        """Of them, those that the device confirmed in the old file."""
        self._records: list[npt.NDArray[np.void]] = []

    def add(self, records: npt.NDArray[np.void]) -> None:
        """Note what was appended."""
        self._records.append(records)
        self.total += len(records)

    def take(self) -> npt.NDArray[np.void]:
        """What was appended since the last call."""
        records = np.concatenate([np.empty(0, RECORD), *self._records])
        self._records.clear()
        self.taken = self.total
        return records

    def put_generations(self) -> npt.NDArray[np.uint64]:
        """Of the chunks in what was not taken yet."""
        records = np.concatenate([np.empty(0, RECORD), *self._records])
        generations: npt.NDArray[np.uint64] = records["generation"][records["kind"] == PUT]
        return generations


class Journal:
    """Appends records to the file of one slab. `lock` guards every method.

    The file never grows beyond `limit` bytes, the next one included while both are there; at most
    `max_live` records may be alive in it for that.
    """

    def __init__(self, path: Path, header: Header, limit: int, records: int) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        """Notified when there may be room again."""
        self.path = path
        self.header = header
        self.limit = limit
        self.max_live = (limit - 2 * JOURNAL_HEADER_BYTES) // RECORD_BYTES // 3
        self.records = records
        """Records in the file, dead ones included."""
        self._tail: Tail | None = None
        self._torn = False  # there may be bytes behind the last record
        self._renamed = False  # its name may not be durable yet
        self._fd = open_file(path, os.O_WRONLY | os.O_APPEND)

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return JOURNAL_HEADER_BYTES + self.records * RECORD_BYTES

    def has_room(self, records: int, live: int) -> bool:
        """Whether `records` more fit beside the next file: of `live` ones, or the one being written."""
        tail = self._tail
        copied = live if tail is None else tail.planned + tail.total + records
        copy = JOURNAL_HEADER_BYTES + copied * RECORD_BYTES
        return self.nbytes + records * RECORD_BYTES + copy <= self.limit

    def is_due(self, live: int) -> bool:
        """Whether a new file is worth its while, with `live` of the records alive."""
        return self.records >= compaction_due(self.limit, live)

    def append(self, records: npt.NDArray[np.void]) -> None:
        """Write records behind the last one. They survive the process, not yet a power cut.

        Raises OSError, and then none of them counts.
        """
        if self._torn:
            self._cut()
        try:
            _write_all(self._fd, seal(records, self.header.journal_id, self.records))
        except OSError:
            self._torn = True
            with contextlib.suppress(OSError):
                self._cut()
            raise
        self.records += len(records)
        if self._tail is not None:
            self._tail.add(records)

    def follow(self, planned: int) -> Tail:
        """Collect what is appended from now on, for a next file of at most `planned` records before it."""
        assert self._tail is None
        self._tail = Tail(planned)
        return self._tail

    def unfollow(self) -> None:
        """Collect no more: the next file is in place, or given up."""
        self._tail = None

    def replace(self, new: NewJournal) -> int:
        """Go on in `new`, which holds all that counts. Returns the old file's descriptor, to be closed.

        Raises OSError, and then nothing changed.
        """
        new.put_in_place()
        old = self._fd
        self._fd, self.header, self.records = new.fd, new.header, new.records
        self._torn, self._renamed = False, True
        return old

    def sync(self) -> None:
        """Have the device confirm all that was appended. Raises OSError."""
        os.fdatasync(self._fd)
        if self._tail is not None:
            self._tail.promised = self._tail.total
        if self._renamed:
            sync_directory(self.path.parent)
            self._renamed = False

    def _cut(self) -> None:
        """Remove what an append that failed left behind the last record."""
        os.ftruncate(self._fd, self.nbytes)
        self._torn = False

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def compaction_due(limit: int, live: int) -> int:
    """Records from which on a journal is to be compacted: half of the limit used, or little of it alive.

    Two thirds of what half of the limit holds may be alive, so a new file always gains something.
    """
    return min((limit // 2 - JOURNAL_HEADER_BYTES) // RECORD_BYTES, 2 * live + _FEW_DEAD) + 1


def create(
    path: Path, header: Header, records: npt.NDArray[np.void], mode: int = 0o600
) -> tuple[int, Header]:
    """Put a journal, its content durable, in place of `path`. Returns its descriptor and header.

    It keeps the permissions of the one that is there; a first one gets `mode`.

    The new name is durable once the directory is synced. Raises OSError, and then `path` is as it was.
    """
    new = NewJournal(path, header, mode)
    try:
        new.write(records)
        new.sync()
        new.put_in_place()
    except OSError:
        new.abandon()
        raise
    return new.fd, header


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        written = os.write(fd, view)
        if not written:
            raise OSError(errno.EIO, "the device takes nothing and says nothing")
        view = view[written:]
