"""What prefill and loads take: what `Economy` decides by."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.connector import Economy

_LEAST_TOKENS = 64
"""Tokens of prefill that a step has to compute to say anything about their cost."""
_SHARE = 0.9
"""What part of a step's tokens that has to be."""


class PrefillPace:
    """Tells an economy of prefill, in the scheduler: by the time from one step to the next."""

    def __init__(self, economy: Economy, clock: Callable[[], float] = time.monotonic) -> None:
        self._economy = economy
        self._clock = clock
        self._tokens = 0  # of prefill, in the step under way; 0 if it is no measure
        self._began = 0.0

    def step(self, prefill: int, tokens: int, *, was_idle: bool) -> None:
        """A step begins that computes so many tokens, `prefill` of them of prompts; so the one before is
        over. `was_idle`: the engine may have had nothing to do in between.
        """
        now = self._clock()
        if self._tokens and not was_idle:
            self._economy.observe_prefill(self._tokens, now - self._began)
        self._tokens = prefill if prefill >= max(_LEAST_TOKENS, _SHARE * tokens) else 0
        self._began = now


class LoadClock:
    """Measures loads in a worker. Thread-safe.

    Of loads that are under way together each is charged its share of the time: what they cost, as prefill
    is measured, and not how long one in a crowd waits.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._loads: dict[str, float] = {}  # what had been charged when it began
        self._charged = 0.0
        self._charged_at = 0.0

    def begin(self, name: str) -> None:
        """A load begins."""
        with self._lock:
            self._charge()
            self._loads[name] = self._charged

    def end(self, name: str) -> float:
        """It is over; the seconds that it is charged."""
        with self._lock:
            self._charge()
            return self._charged - self._loads.pop(name)

    def _charge(self) -> None:
        now = self._clock()
        if self._loads:
            self._charged += (now - self._charged_at) / len(self._loads)
        self._charged_at = now
