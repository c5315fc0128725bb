"""Bytes in flight on one device: a budget that tunes itself by measuring."""

from __future__ import annotations

import math

LEAST_BYTES = 8 << 20
MOST_BYTES = 256 << 20
_START_BYTES = 64 << 20
_GAIN = 0.05
"""A larger window must bring this much more bandwidth: else it only makes every request wait longer."""
_STALE = 32
"""Measurements after which a neighbouring size is tried again: devices change."""
_WEIGHT = 0.5
"""Of a new measurement against the ones before."""


class Tuner:
    """Finds the smallest of several window sizes that gives the device's bandwidth. Pure arithmetic.

    It remembers what each size brought, stays at the smallest one within 5 % of the best, and tries
    the sizes beside that when they are unknown or were last measured long ago.
    """

    def __init__(self, sizes: list[int], start: int) -> None:
        """`sizes` in bytes, rising; `start` is the index to begin with."""
        self._sizes = sizes
        self._rates: list[float] = [0.0] * len(sizes)  # bytes per second; 0: not measured
        self._ages = [_STALE] * len(sizes)
        self._at = start

    @property
    def size(self) -> int:
        """The window to use now, in bytes."""
        return self._sizes[self._at]

    @property
    def rate(self) -> float:
        """The device's bandwidth in bytes per second as last measured; 0 before that."""
        return max(self._rates)

    def measured(self, rate: float) -> None:
        """Take in what the present size brought, in bytes per second, and choose the next."""
        before = self._rates[self._at] if self._ages[self._at] < _STALE else rate
        self._rates[self._at] = before + _WEIGHT * (rate - before)
        self._ages = [age + 1 for age in self._ages]
        self._ages[self._at] = 0
        enough = (1 - _GAIN) * max(self._rates)
        target = next(i for i, known in enumerate(self._rates) if known >= enough)
        beside = [i for i in (target + 1, target - 1) if 0 <= i < len(self._sizes)]
        self._at = next((i for i in beside if self._ages[i] >= _STALE), target)


class Window:
    """How much may be in flight on one device now, and how much is. Used with the store's lock held.

    A measurement needs a device that is kept busy: it runs while requests wait for the window.
    """

    def __init__(self, fixed: int, slot_bytes: int, most_chunks: float = math.inf) -> None:
        """`fixed` bytes, or tuned if that is 0; never below two slots of `slot_bytes`. And no more than
        `most_chunks` requests.
        """
        least = max(LEAST_BYTES, 2 * slot_bytes)
        steps = max(0, math.ceil(2 * math.log2(MOST_BYTES / least)))
        sizes = [fixed] if fixed else [int(least * 2 ** (i / 2)) for i in range(steps + 1)]
        start = max((i for i, size in enumerate(sizes) if size <= _START_BYTES), default=0)
        self._tuner = Tuner(sizes, start)
        self.in_flight = 0
        self._chunks = 0
        self._most_chunks = most_chunks
        self._since = 0.0
        self._moved = 0
        self._is_measuring = False
        self.last_use = -math.inf
        """When something last entered or left, by the caller's clock."""
        self._quiet_since = 0.0

    @property
    def limit(self) -> int:
        """Bytes that may be in flight."""
        return self._tuner.size

    @property
    def rate(self) -> float:
        """The device's bandwidth in bytes per second, as far as it was ever kept busy; 0 before that."""
        return self._tuner.rate

    @property
    def has_room(self) -> bool:
        """Whether another request may start. The last one may overshoot, so that any size can."""
        return self.in_flight < self.limit and self._chunks < self._most_chunks

    def enter(self, nbytes: int, now: float) -> None:
        """A request of `nbytes` starts."""
        if not self.in_flight:
            self._quiet_since = now
        self.in_flight += nbytes
        self._chunks += 1
        self.last_use = now

    def stalled(self, now: float) -> float:
        """Seconds for which something was in flight and nothing came back."""
        return now - self._quiet_since if self.in_flight else 0.0

    def leave(self, nbytes: int, now: float, *, busy: bool, chunks: int = 1) -> None:
        """So many requests of `nbytes` in all are done; `busy` if others wait for their place."""
        was_filled = 2 * self.in_flight >= self.limit  # else something other than the window held them up
        self.in_flight -= nbytes
        self._chunks -= chunks
        self.last_use = self._quiet_since = now
        if not (busy and was_filled):
            self._is_measuring = False
            return
        if not self._is_measuring:
            self._is_measuring, self._since, self._moved = True, now, 0
            return
        self._moved += nbytes
        if self._moved >= 2 * self.limit and now > self._since:
            self._tuner.measured(self._moved / (now - self._since))
            self._since, self._moved = now, 0
