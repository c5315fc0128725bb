"""The journal: an append-only file of fixed-size records, rewritten when it is mostly dead."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

from kvtier.format import RECORD_BYTES, seal
from kvtier.tiers.slab.directory import sync_directory

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from kvtier.format import Header

_CHUNK_RECORDS = 1 << 16


class Journal:
    """Appends records to the file of one slab. `lock` guards every method.

    The file never grows beyond `limit` bytes, its rewritten copy included; at most `max_live`
    records may be alive in it for that.
    """

    def __init__(self, path: Path, header: Header, limit: int, records: int) -> None:
        self.lock = threading.Lock()
        self.header = header
        self.limit = limit
        self.max_live = limit // RECORD_BYTES // 3
        self.records = records
        """Records in the file, dead ones included."""
        self._path = path
        self._torn = False  # there may be bytes behind the last record
        self._renamed = False  # its name may not be durable yet
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return (self.records + 1) * RECORD_BYTES

    def has_room(self, records: int, live: int) -> bool:
        """Whether `records` more fit, and after them still a rewritten copy of `live` ones."""
        return self.nbytes + (records + live + 2) * RECORD_BYTES <= self.limit

    def append(self, records: npt.NDArray[np.void]) -> None:
        """Write records behind the last one. They survive the process, not yet a power cut.

        Raises OSError, and then none of them counts.
        """
        if self._torn:
            self._cut()
        data = memoryview(seal(records, self.header.journal_id, self.records))
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            self._torn = True
            with contextlib.suppress(OSError):
                self._cut()
            raise
        self.records += len(records)

    def rewrite(self, live: npt.NDArray[np.void], next_generation: int) -> None:
        """Replace the file by one that holds just `live`. Raises OSError, and then nothing changed."""
        fd, header = create(self._path, self.header.for_journal(next_generation), live)
        os.close(self._fd)
        self._fd, self.header, self.records = fd, header, len(live)
        self._torn, self._renamed = False, True

    def sync(self) -> None:
        """Have the device confirm all that was appended. Raises OSError."""
        os.fdatasync(self._fd)
        if self._renamed:
            sync_directory(self._path.parent)
            self._renamed = False

    def _cut(self) -> None:
        """Remove what an append that failed left behind the last record."""
        os.ftruncate(self._fd, self.nbytes)
        self._torn = False

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def create(path: Path, header: Header, records: npt.NDArray[np.void]) -> tuple[int, Header]:
    """Put a journal, its content durable, in place of `path`. Returns its descriptor and header.

    The new name is durable once the directory is synced. Raises OSError, and then `path` is as it was.
    """
    temporary = path.with_name(path.name + ".new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        _write_all(fd, header.encode())
        for first in range(0, len(records), _CHUNK_RECORDS):
            _write_all(fd, seal(records[first : first + _CHUNK_RECORDS], header.journal_id, first))
        os.fsync(fd)
        os.rename(temporary, path)
    except OSError:
        os.close(fd)
        temporary.unlink(missing_ok=True)
        raise
    return fd, header


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
