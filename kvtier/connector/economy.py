"""Load or recompute: whether a prefix is there sooner if it is read, or if the model computes it anew."""

from __future__ import annotations

import math
import threading

from kvtier.errors import InvalidRequest

_HALF_LIFE = 8192
"""Tokens of prefill after which what was measured before counts half."""
_KEEP = 0.8
"""What a load leaves of the weight of those before it."""
_PULL = 0.01
"""How strongly a latency is held to be 0, as a part of the weight of all loads: with loads of one size it
could be anything.
"""
_PROBE_EVERY = 16
"""So many times in a row loading is held not to be worth it: then it is tried all the same."""


class Economy:
    """Compares the seconds that a load takes, a latency and a time per token, with those that prefill takes
    per token. Both are measured by whoever uses it, on any clock; what is old counts ever less.

    Prefill is taken to cost the same at every position: that attention grows with the context is left out.
    So is the tier, which nobody knows before the load: loads are measured as they come. Thread-safe.
    """

    def __init__(self) -> None:
        self.loaded = 0
        """Decisions to load, probes included."""
        self.recomputed = 0
        """Decisions to recompute all."""
        self.probes = 0
        """Decisions to load for no other reason than to measure."""
        self._lock = threading.Lock()
        self._prefill_tokens = self._prefill_seconds = 0.0
        # Weighted sums over loads of 1, tokens, seconds, tokens * tokens, tokens * seconds.
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._in_a_row = 0

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Take in that computing so many tokens of prompts took so long: in a step, say, of little else.

        Raises InvalidRequest for what cannot be.
        """
        _check(tokens, seconds)
        with self._lock:
            keep = 0.5 ** (tokens / _HALF_LIFE)
            self._prefill_tokens = keep * self._prefill_tokens + tokens
            self._prefill_seconds = keep * self._prefill_seconds + seconds

    def observe_load(self, tokens: int, seconds: float) -> None:
        """Take in that a load of so many tokens took so long, from its call to its end; 0 tokens of one that
        its deadline ended.

        Raises InvalidRequest for what cannot be.
        """
        _check(tokens, seconds)
        with self._lock:
            self._n = _KEEP * self._n + 1
            self._x = _KEEP * self._x + tokens
            self._y = _KEEP * self._y + seconds
            self._xx = _KEEP * self._xx + tokens * tokens
            self._xy = _KEEP * self._xy + tokens * seconds

    def worth(self, tokens: int) -> int:
        """How many of `tokens` that are stored are there sooner by a load: all of them or 0. Counts the
        decision: ask once for each request.

        Until both are measured that is all of them, and now and then also if it seems not to be worth it, so
        that one slow spell does not end it for ever.
        """
        if tokens < 1:
            return 0
        with self._lock:
            prefill, load = self._prefill_time(tokens), self._load_time(tokens)
            pays = prefill is None or load is None or load < prefill
            self._in_a_row = 0 if pays else self._in_a_row + 1
            if not pays and self._in_a_row < _PROBE_EVERY:
                self.recomputed += 1
                return 0
            self.probes += not pays
            self.loaded += 1
            self._in_a_row = 0
            return tokens

    def prefill_time(self, tokens: int) -> float | None:
        """Seconds that computing so many tokens should take; None until that was measured."""
        with self._lock:
            return self._prefill_time(tokens)

    def load_time(self, tokens: int) -> float | None:
        """Seconds that loading so many tokens should take; None until that was measured."""
        with self._lock:
            return self._load_time(tokens)

    def stats(self) -> dict[str, int | float]:
        """Decisions, and both estimates: seconds per token, and of a load's latency; 0.0 until measured."""
        with self._lock:
            latency, per_token = self._line()
            return {
                "loaded": self.loaded,
                "recomputed": self.recomputed,
                "probes": self.probes,
                "prefill_seconds_per_token": self._prefill_time(1) or 0.0,
                "load_seconds_per_token": per_token,
                "load_latency_seconds": latency,
            }

    def _prefill_time(self, tokens: int) -> float | None:
        return tokens * self._prefill_seconds / self._prefill_tokens if self._prefill_tokens else None

    def _load_time(self, tokens: int) -> float | None:
        if not self._n:
            return None
        latency, per_token = self._line()
        return latency + tokens * per_token

    def _line(self) -> tuple[float, float]:
        """Latency and seconds per token, neither negative: the line with the least squares of errors, and of
        a latency.
        """
        n, x, y, xx, xy = self._n * (1 + _PULL), self._x, self._y, self._xx, self._xy
        if not xx:
            return (y / n if n else 0.0), 0.0
        determinant = n * xx - x * x
        latency, per_token = (y * xx - x * xy) / determinant, (n * xy - x * y) / determinant
        if latency < 0:
            return 0.0, xy / xx
        return (latency, per_token) if per_token >= 0 else (y / n, 0.0)


def _check(tokens: int, seconds: float) -> None:
    if tokens < 0 or not 0 <= seconds < math.inf:
        raise InvalidRequest(f"{tokens} tokens in {seconds} s: needs at least 0 of both")
