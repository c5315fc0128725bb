"""Whether a path is worth asking, and worth a line in the log."""

from __future__ import annotations

import errno
import math
import threading

_FAILURES = 3
"""Failed batches in a row that take a path out."""
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0
"""Seconds until a path that is out is tried again: the first time, and after many in vain."""
_NOT_THE_DEVICE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.ECANCELED, errno.ENOMEM, errno.ENOSYS, errno.EMFILE, errno.ENFILE}
)


def is_failure(outcome: int) -> bool:
    """Whether the outcome of an operation speaks against its device: not bytes that are wrong or missing."""
    return outcome > 0 and outcome not in _NOT_THE_DEVICE


class Health:
    """Takes a path out when it fails again and again or hangs, and tries it now and then until it works.

    Times are in seconds on the caller's clock. Used with the store's lock held.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._pause = _FIRST_PAUSE
        self._retry_at: float | None = None
        self.outages = 0
        """How often the path was taken out."""

    @property
    def is_down(self) -> bool:
        """Whether the path is out, whoever may be trying it."""
        return self._retry_at is not None

    def may_ask(self, now: float) -> bool:
        """Whether a request may go to the device: always while it works, else one after every pause."""
        if self._retry_at is None:
            return True
        if now < self._retry_at:
            return False
        self._take_out(now)  # the next one waits for what becomes of this one, or for a longer pause
        return True

    def worked(self) -> bool:
        """A batch came back as it should. True if that brings the path back."""
        returns = self.is_down
        self._failures, self._pause, self._retry_at = 0, _FIRST_PAUSE, None
        return returns

    def failed(self, now: float) -> bool:
        """A batch failed. True if that takes the path out."""
        self._failures += 1
        return self._failures >= _FAILURES and self._go_down(now)

    def hung(self, now: float) -> bool:
        """A request passed its deadline on the device. True if that takes the path out."""
        return self._go_down(now)

    def _go_down(self, now: float) -> bool:
        if self.is_down:
            return False
        self.outages += 1
        self._take_out(now)
        return True

    def _take_out(self, now: float) -> None:
        self._retry_at = now + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


class Seldom:
    """Lets one of many alike through every so often, and counts the others. Thread-safe."""

    def __init__(self, every: float = 30.0) -> None:
        """`every` in seconds."""
        self._every = every
        self._next = -math.inf
        self._suppressed = 0
        self._lock = threading.Lock()

    def due(self, now: float) -> int | None:
        """How many were held back since the last one that was let through; None for one to hold back."""
        with self._lock:
            if now < self._next:
                self._suppressed += 1
                return None
            suppressed, self._suppressed = self._suppressed, 0
            self._next = now + self._every
            return suppressed
