"""FreeSpace: what a file system must keep free for others, where a slab could not reserve its own."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_EVERY = 1.0
"""Seconds between two looks at the file system."""


class FreeSpace:
    """Compares the free space below `path` to a floor in bytes; 0 is none. Thread-safe.

    Between two looks it takes all that is written for space newly used, so that the floor holds; where
    old slots are written again that is too much, until the next look.
    """

    def __init__(self, path: Path, floor: int) -> None:
        self._path = path
        self._floor = floor
        self._lock = threading.Lock()
        self._next = 0.0
        self._above = float("inf")  # bytes above the floor
        if floor:
            self.look()

    def has(self, nbytes: int) -> bool:
        """Whether so many bytes may be written."""
        return self._above >= nbytes

    def take(self, nbytes: int) -> None:
        """Count bytes that are about to be written."""
        with self._lock:
            self._above -= nbytes

    def is_due(self, now: float) -> bool:
        """True once for every time that somebody should `look`; `now` in monotonic seconds."""
        with self._lock:
            due = bool(self._floor) and now >= self._next
            if due:
                self._next = now + _EVERY
            return due

    def look(self) -> None:
        """Ask the file system. May wait for the device, so nobody's lock is held. Raises OSError."""
        disk = os.statvfs(self._path)
        with self._lock:
            self._above = disk.f_bavail * disk.f_frsize - self._floor
