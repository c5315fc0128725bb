"""Clock: the deadlines of everything that is under way."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)
_FEW = 64  # cancelled alarms that are not worth clearing out


class Alarm:
    """A call to be made at a time, unless it is cancelled."""

    __slots__ = ("_clock", "call", "when")

    def __init__(self, clock: Clock, when: float, call: Callable[[], None]) -> None:
        self._clock = clock
        self.when = when
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Forget the call, and all that it refers to. Idempotent."""
        self._clock.cancel(self)


class Clock:
    """One thread that makes calls when their time has come."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._alarms: list[tuple[float, int, Alarm]] = []  # a heap
        self._cancelled = 0  # of them
        self._order = itertools.count()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvtier-clock", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Alarms that are held, some of them cancelled."""
        return len(self._alarms)

    def call_at(self, when: float, call: Callable[[], None]) -> Alarm:
        """Run `call`, which must be brief, at `when` in monotonic seconds; infinity is never."""
        alarm = Alarm(self, when, call)
        if when < math.inf:
            with self._changed:
                heapq.heappush(self._alarms, (when, next(self._order), alarm))
                if self._alarms[0][2] is alarm:
                    self._changed.notify()
        return alarm

    def cancel(self, alarm: Alarm) -> None:
        """Forget an alarm's call; most of the heap is alive at any time, or it is small."""
        with self._changed:
            if alarm.call is None or alarm.when == math.inf:
                return
            alarm.call = None
            self._cancelled += 1
            if self._cancelled > max(_FEW, len(self._alarms) // 2):
                self._alarms = [entry for entry in self._alarms if entry[2].call is not None]
                heapq.heapify(self._alarms)
                self._cancelled = 0

    def stop(self) -> None:
        """End the thread; calls whose time has not come are dropped."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._stopping and (wait := self._wait()) > 0:
                    self._changed.wait(wait)
                if self._stopping:
                    return
                alarm = heapq.heappop(self._alarms)[2]
                call, alarm.call = alarm.call, None
                self._cancelled -= call is None
            if call is not None:
                try:
                    call()
                except Exception:
                    _log.exception("a deadline's call failed")
            del alarm, call

    def _wait(self) -> float:
        wait = self._alarms[0][0] - time.monotonic() if self._alarms else threading.TIMEOUT_MAX
        return min(wait, threading.TIMEOUT_MAX)
