"""The ledger: who may take how much room, and what was done last. Changed only under its lock."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtier.config import PAGE, ledger_events, page_up
from kvtier.errors import IncompatibleStore
from kvtier.tiers.files.directory import LEDGER
from kvtier.tiers.files.format import (
    EVENT_BYTES,
    HEADER_BYTES,
    Event,
    LedgerHeader,
    decode_events,
    decode_ledger,
    encode_events,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtier.tiers.files.directory import Directory

_PATIENCE = 10.0
"""Seconds that opening waits for a process that holds the lock: it may be stopped."""


class Section:
    """A time in which nobody else changes the directory. `used` and `capacity` are in bytes."""

    def __init__(self, header: LedgerHeader) -> None:
        self.used = header.used
        self.capacity = header.capacity
        self.events: list[Event] = []
        """What is done in it, for the others to learn."""
        self.is_sure = True
        """Whether `used` is right: False when a file was not as this directory's processes leave it."""

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes more would not exceed the capacity."""
        return self.used + nbytes <= self.capacity


class Ledger:
    """One opening of the ledger. A regular file that is read and written, not mapped: a device that dies
    is an error then, and no signal. Everything raises OSError.

    A process that dies in a section leaves the mark `dirty`: the next section counts the files anew.
    """

    def __init__(self, directory: Directory, count: Callable[[], int]) -> None:
        """`count` gives the bytes of all files but the ledger, and is called in a section."""
        self._directory = directory
        self._count = count
        self._mutex = threading.RLock()  # of this opening: the file's lock holds off other openings only
        self._fd = directory.open_ledger()
        self.header: LedgerHeader | None = None
        """As last read or written; None before the first section."""
        self.seen = 0
        """Events that were taken in."""
        self._dirty_at: int | None = None  # events when the last look found somebody in a section
        self.is_waiting = False
        """Whether the lock is being waited for, which another process holds."""
        self.must_count = False
        """Set when files were changed outside of a section: the next one counts them anew."""

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        assert self.header is not None
        return self.size(self.header)

    @staticmethod
    def size(header: LedgerHeader) -> int:
        """Bytes of a ledger with this header: whole pages."""
        return page_up(PAGE + header.ring * EVENT_BYTES)

    @contextlib.contextmanager
    def open(
        self, settle: Callable[[LedgerHeader | None], LedgerHeader], *, discard: bool
    ) -> Iterator[Section]:
        """The first section, in which all events so far count as seen, and whose `used` the caller counts.
        `settle` is given the header that is there, if any, and returns the one to be: it may raise what it
        will.

        Raises IncompatibleStore for a ledger of another version, unless its directory is to be emptied
        then (`discard`).
        """
        with self._mutex, self._locked(_PATIENCE):
            try:
                found = self._read()
            except IncompatibleStore:
                if not discard:
                    raise
                self._directory.empty()
                found = None
            header = settle(found)
            if os.fstat(self._fd).st_size != self.size(header):
                os.ftruncate(self._fd, self.size(header))
            header = replace(header, dirty=False)
            if found is None or found.dirty:
                header = replace(header, events=header.events + header.ring + 1)
            self.header, self.seen = header, header.events
            with self._changing(header) as section:
                yield section

    @contextlib.contextmanager
    def section(self, learn: Callable[[list[Event] | None], None]) -> Iterator[Section]:
        """Hold the lock. First `learn` is told what others did since, None if only a listing would tell."""
        with self._mutex, self._locked():
            header = self._reread()
            if header is None or header.dirty or self.must_count:
                header = self._recover(header)
            self._take_in(header, learn)
            with self._changing(header) as section:
                yield section

    def look(self, learn: Callable[[list[Event] | None], None]) -> bool:
        """As the beginning of a section, but without the lock. False if that takes a section."""
        with self._mutex:
            if not self._directory.is_ledger(self._fd):
                return False
            header = self._reread()
            if header is None or self.header is None:
                return False
            if header.dirty and self._dirty_at == header.events:
                return False  # still in the same section, or whoever was in it died
            self._dirty_at = header.events if header.dirty else None
            news = self._news(header)
            if news is None:
                return False
            self._take_in(header, learn, news)
            return True

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _take_in(
        self,
        header: LedgerHeader,
        learn: Callable[[list[Event] | None], None],
        news: list[Event] | None = None,
    ) -> None:
        news = self._news(header) if news is None else news
        changed = self.header is None or self.header.capacity != header.capacity
        self.header = header
        if changed or news is None or news:
            learn(news)
        self.seen = header.events

    @contextlib.contextmanager
    def _locked(self, patience: float | None = None) -> Iterator[None]:
        """Hold the lock of the file that is the ledger now."""
        self._lock(patience)
        try:
            while not self._directory.is_ledger(self._fd):
                fd = self._directory.open_ledger()
                os.close(self._fd)
                self._fd = fd
                self._lock(patience)
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _lock(self, patience: float | None) -> None:
        """Without `patience`, in seconds, in the order in which all ask for it; with it, as luck has it."""
        self.is_waiting = True
        try:
            if patience is None:
                fcntl.flock(self._fd, fcntl.LOCK_EX)
                return
            end = time.monotonic() + patience
            while True:
                try:
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                except BlockingIOError:
                    if time.monotonic() > end:
                        what = f"another process has held its ledger for {patience:g} s: is it stopped?"
                        raise OSError(errno.EBUSY, what) from None
                    time.sleep(0.005)
        finally:
            self.is_waiting = False

    def _read(self) -> LedgerHeader | None:
        return decode_ledger(self._pread(HEADER_BYTES, 0), str(self._directory.path / LEDGER))

    def _reread(self) -> LedgerHeader | None:
        """As `_read`, but a ledger that another version has taken over meanwhile is an OSError, too."""
        try:
            return self._read()
        except IncompatibleStore as error:
            raise OSError(errno.ESTALE, str(error)) from error

    def _recover(self, found: LedgerHeader | None) -> LedgerHeader:
        """After somebody died in a section, or the ledger was damaged: count, and have all others list."""
        assert self.header is not None
        header = found or replace(self.header, directory_id=os.urandom(16))
        if os.fstat(self._fd).st_size != self.size(header):
            os.ftruncate(self._fd, self.size(header))
        self.must_count = False
        return replace(
            header,
            used=self.size(header) + self._count(),
            events=header.events + header.ring + 1,
            dirty=False,
        )

    def _news(self, header: LedgerHeader) -> list[Event] | None:
        """The events since the last look; None if they are not all there, or of another ledger."""
        if self.header is None or header.directory_id != self.header.directory_id:
            return None
        count = header.events - self.seen
        if not 0 <= count <= header.ring:
            return None
        data = b""
        number = self.seen
        while number < header.events:
            place = number % header.ring
            step = min(header.events - number, header.ring - place)
            data += self._pread(step * EVENT_BYTES, PAGE + place * EVENT_BYTES)
            number += step
        if len(data) != count * EVENT_BYTES:
            return None
        return decode_events(data, header.directory_id, self.seen)

    @contextlib.contextmanager
    def _changing(self, header: LedgerHeader) -> Iterator[Section]:
        """Mark the ledger dirty, and enter what was done in the end; not if it fails."""
        section = Section(header)
        self._write(replace(header, dirty=True))
        yield section
        if not section.is_sure or section.used < 0:
            section.used = self.size(header) + self._count()
        first = header.events
        for number, data in enumerate(encode_events(section.events, header.directory_id, first), first):
            self._pwrite(data, PAGE + number % header.ring * EVENT_BYTES)
        self._write(header.updated(used=section.used, events=first + len(section.events), dirty=False))
        self.seen = first + len(section.events)

    def _write(self, header: LedgerHeader) -> None:
        self._pwrite(header.encode(), 0)
        self.header = header

    def _pread(self, nbytes: int, offset: int) -> bytes:
        """So many bytes, fewer at the file's end."""
        data = b""
        while len(data) < nbytes and (more := os.pread(self._fd, nbytes - len(data), offset + len(data))):
            data += more
        return data

    def _pwrite(self, data: bytes, offset: int) -> None:
        while data:
            count = os.pwrite(self._fd, data, offset)
            if count == 0:
                raise OSError(errno.EIO, "the ledger takes no bytes")
            data, offset = data[count:], offset + count


def new_header(capacity: int, part_bytes: int) -> LedgerHeader:
    """The header of a new ledger. It takes `ledger_bytes(capacity)`."""
    return LedgerHeader(part_bytes, os.urandom(16), capacity, 0, 0, ledger_events(capacity))
