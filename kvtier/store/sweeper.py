"""Sweeper: gives back the room of chunks whose time is over, a few at a time."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.store.core import Core
    from kvtier.store.paths import DiskPath

_PERIOD = 1.0
"""Seconds between looks while nothing is over."""
_PAUSE = 0.02
"""Seconds between steps while something is."""
_STEP = 256
"""Chunks that one step drops from each tier."""


class Sweeper:
    """Runs on the store's clock from the first chunk on that expires. A chunk that is over is a miss
    whether it was swept or not.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._is_running = False
        self._burying: set[DiskPath] = set()

    def start(self) -> None:
        """Sweep from now on, if any chunk expires. Called with the lock held."""
        if not self._is_running and any(tier.index.expiry.count for tier in self._core.tiers):
            self._is_running = True
            self._again(_PERIOD)

    def finish(self) -> None:
        """Drop every chunk whose time is over."""
        while not self._core.closed and any(tier.index.expiry.is_due() for tier in self._core.tiers):
            self.step()

    def step(self) -> bool:
        """Drop some of the chunks whose time is over; whether there may be more."""
        core = self._core
        is_due = False
        with core.lock:
            if core.closed:
                return False
            swept = 0
            for tier in core.tiers:
                rows = tier.index.sweep(_STEP)
                for row in rows:
                    tier.expire(row)
                swept += len(rows)
                is_due |= tier.index.expiry.is_due()
            graves = [path for path in core.paths if path.tier.has_graves and path not in self._burying]
            self._burying.update(graves)
            if swept:
                core.changed.notify_all()
        for path in graves:
            path.keeper.submit(partial(self._bury, path))
        if swept:
            core.pump()
        return is_due

    def _run(self) -> None:
        if not self._core.closed:
            self._again(_PAUSE if self.step() else _PERIOD)

    def _bury(self, path: DiskPath) -> None:
        """Write the tombstones: one that hangs is waited for, not asked again."""
        try:
            path.bury()
        finally:
            with self._core.lock:
                self._burying.discard(path)

    def _again(self, pause: float) -> None:
        self._core.clock.call_at(time.monotonic() + pause, self._run)
