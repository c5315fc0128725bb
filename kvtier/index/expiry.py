"""Expiry: which entries of an index end at a time, and the sweep that finds those whose time is over."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

LAST_SECOND = (1 << 32) - 1
"""The latest time that indexes and records can name."""
NEVER = LAST_SECOND + 1
"""Seconds since 1970 that no entry ends at."""
_STRETCH = 1 << 16  # rows that one step of the sweep looks at


class Expiry:
    """Ends are whole seconds since 1970, 0 for none. The wall clock decides, whichever way it steps."""

    def __init__(self, wall: Callable[[], float]) -> None:
        """`wall` tells the seconds since 1970."""
        self.count = 0
        """Entries that have an end."""
        self.wall = wall
        self._next = NEVER  # the next end, or earlier
        self._swept = 0  # rows that the sweep under way has looked at
        self._next_seen = NEVER  # the next end of those that it left, and of those that came in since

    def now(self) -> int:
        """Seconds since 1970 as columns and records have them, whatever the clock says."""
        return min(max(int(self.wall()), 0), LAST_SECOND)

    def end(self, seconds: float) -> int:
        """When the time of an entry is over that lives for `seconds` from now; 0, never, for 0."""
        return min(max(math.ceil(self.wall() + seconds), 1), LAST_SECOND) if seconds else 0

    def add(self, end: int) -> None:
        """Note that an entry with an end came in."""
        self.count += 1
        self._next = min(self._next, end)
        self._next_seen = min(self._next_seen, end)

    def load(self, ends: npt.NDArray[np.uint32]) -> None:
        """Note the ends of all entries of an index that was empty."""
        self.count = int(np.count_nonzero(ends))
        self._next = int(ends[ends > 0].astype(np.int64).min(initial=NEVER))

    def is_over(self, end: int) -> bool:
        """Whether the time of an entry is over."""
        return 0 < end <= self.wall()

    def is_due(self) -> bool:
        """Whether there may be entries whose time is over."""
        return self._next <= self.wall()

    def step(
        self, ends: npt.NDArray[np.uint32], flags: npt.NDArray[np.uint8], gone: int, most: int
    ) -> list[int]:
        """Rows whose time is over, at most `most`, of a bounded stretch; the next step goes on behind it.

        `ends` and `flags` are columns; rows with the flag `gone` are no entries.
        """
        now, start = int(self.wall()), self._swept
        if start == 0:
            self._next_seen = NEVER
        stretch = slice(start, start + _STRETCH)
        there = (ends[stretch] > 0) & (flags[stretch] & gone == 0)
        left = np.where(there, ends[stretch].astype(np.int64), NEVER)
        due = np.flatnonzero(left <= now)[:most]
        if len(due) == most:
            left = left[: due[-1] + 1]
        self._next_seen = min(self._next_seen, int(left[left > now].min(initial=NEVER)))
        self._swept += len(left)
        if self._swept >= len(ends):
            self._next, self._swept = self._next_seen, 0
        rows: list[int] = (start + due).tolist()
        return rows
