"""Admission: which chunks are worth a write to disk. What is not is REFUSED there, and may stay in DRAM."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from kvtier.index.admission import make

if TYPE_CHECKING:
    from kvtier.config import StoreConfig
    from kvtier.store.paths import Paths
    from kvtier.store.put import WriteThrough


class Admission:
    """Decides once for each write, before it has a slot. Used with the store's lock held.

    A budget of writes is spent on heads of prefixes: behind a chunk that is refused none of its put is
    written, and no put may take more than half of what is left, so that the next one's head finds some.
    """

    def __init__(self, config: StoreConfig, paths: Paths) -> None:
        self._paths = paths
        self._limited = bool(config.endurance)
        self._admitted: dict[WriteThrough, int] = {}
        self._promised = 0  # bytes of them
        self._admission = make(config.admission if paths else "always")

    @property
    def is_selective(self) -> bool:
        """Whether a chunk that stayed in DRAM alone should be offered again when it is put again."""
        return self._limited or self._admission.is_selective

    def admits(self, write: WriteThrough) -> bool:
        """Whether a new write may go to disk; then `ended` is to be told of its end."""
        self._look_for_space()
        if not self._admission.admits(write.key, partial(self._has_room, write)):
            return False
        return not self._limited or self._affords(write)

    def ended(self, write: WriteThrough) -> None:
        """Take back what a write was promised: its path has counted what was written."""
        self._promised -= self._admitted.pop(write, 0)

    def _affords(self, write: WriteThrough) -> bool:
        working = [path for path in self._paths if not path.health.is_down]
        if not working:
            return True  # it is refused for that, then
        put = write.put
        left = sum(max(0.0, path.tier.budget_left) for path in working) - self._promised
        if put.disk_left is None:
            put.disk_left = max(left / 2, write.stored_bytes)
        if left <= 0 or put.disk_left < write.stored_bytes:
            put.disk_left = 0
            return False
        put.disk_left -= write.stored_bytes
        self._admitted[write] = write.stored_bytes
        self._promised += write.stored_bytes
        return True

    def _has_room(self, write: WriteThrough) -> bool:
        """Whether a path that works has a slot for a write without evicting anything."""
        working = (path for path in self._paths if not path.health.is_down)
        return any(path.tier.has_free(write.slot_bytes, write.owner) for path in working)

    def _look_for_space(self) -> None:
        now = time.monotonic()
        for path in self._paths:
            if path.tier.is_due(now):
                path.keeper.submit(path.tier.look)
