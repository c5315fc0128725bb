"""Endurance: the bytes that a path may still write, out of a budget per day that outlives the process."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from kvtier.tiers.access import open_file

if TYPE_CHECKING:
    from pathlib import Path

ENDURANCE = "endurance"
DAY = 86400.0
_MAGIC = b"KVTENDU\0"
_RECORD = struct.Struct("<8s4Q")  # magic, left + bias, spent, nanoseconds since 1970, check
_BIAS = 1 << 62
_SAVED = 24.0
"""Of a day's budget one part in so many may be saved up, and spent at once: an hour's worth. So any day
keeps to its budget within 1/24, and a day of more writes than that is served all day long."""


class Kept(NamedTuple):
    """What the last process left. Sizes in bytes."""

    left: int
    """What might still be written then; below 0 what was written too much."""
    spent: int
    """Written while there was a budget."""
    at: int
    """When that was, in nanoseconds since 1970."""


def kept(path: Path) -> Kept | None:
    """The state in the file of `path`, None if there is no sound one. Raises OSError."""
    try:
        fd = os.open(path / ENDURANCE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        return _parse(os.pread(fd, _RECORD.size + 1, 0))
    finally:
        os.close(fd)


def _parse(data: bytes) -> Kept | None:
    body = data[: _RECORD.size - 8]
    if len(data) != _RECORD.size or xxhash.xxh3_64_intdigest(body).to_bytes(8, "little") != data[-8:]:
        return None
    magic, left, spent, then, _ = _RECORD.unpack(data)
    if magic != _MAGIC or spent >= 1 << 63:
        return None
    return Kept(left - _BIAS, spent, then)


class Endurance:
    """A token bucket over what a path really writes: payloads and journal. Thread-safe.

    What is left is kept in a file of `path`, written after each batch without a sync: it survives the
    process. Time is monotonic while the process runs; between two it is the wall clock's, but never
    less than none, and never worth more than the bucket holds.
    """

    def __init__(self, path: Path, per_day: int, mode: int) -> None:
        """`per_day` in bytes, 0 for no limit; then there is no file. Raises OSError, TierUnavailable."""
        self.per_day = per_day
        self.spent = 0
        """Bytes written, also by earlier processes while there was a budget."""
        self._most = per_day / _SAVED
        self._left = self._most
        self._then = time.monotonic()
        self._lock = threading.Lock()
        self._fd = -1
        if per_day:
            self._fd = open_file(path / ENDURANCE, os.O_RDWR | os.O_CREAT, mode)
            self._load(os.pread(self._fd, _RECORD.size + 1, 0))

    def spend(self, nbytes: int) -> None:
        """Count bytes that go to the device."""
        with self._lock:
            self.spent += nbytes
            self._left -= nbytes

    @property
    def left(self) -> float:
        """Bytes that may be written now; below 0 what was written too much. Infinite without a limit."""
        if not self.per_day:
            return float("inf")
        with self._lock:
            self._fill()
            return self._left

    def save(self) -> None:
        """Keep the state for the next process, if the device lets it. May wait for the device."""
        if self._fd < 0:
            return
        with self._lock:
            self._fill()
            left = int(self._left) + _BIAS
            body = _RECORD.pack(_MAGIC, left, self.spent, time.time_ns(), 0)[:-8]
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little"), 0)

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _load(self, data: bytes) -> None:
        """Go on where an earlier process ended. A file that says nothing sound leaves nothing to spend."""
        if not data:
            return
        self._left = 0.0
        if (kept := _parse(data)) is None:
            return
        elapsed = max(0, time.time_ns() - kept.at) / 1e9
        self.spent = kept.spent
        owed = max(kept.left, -self.per_day)  # a day without writes at most, whatever the limit was
        self._left = min(self._most, owed + elapsed * self.per_day / DAY)

    def _fill(self) -> None:
        now = time.monotonic()
        self._left = min(self._most, self._left + (now - self._then) * self.per_day / DAY)
        self._then = now
