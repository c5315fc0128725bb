"""Shares of the landing slots: a path that hangs must not hold those that the others need."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.store.core import Core
    from kvtier.store.paths import DiskPath


def may_hold(core: Core, path: DiskPath, nbytes: int) -> bool:
    """Whether a path may hold `nbytes` more of the landing slots. Called with the lock held.

    Half of them is set aside, in equal parts, one for each path that works; the other half is for whoever
    comes first. Who holds none is never refused, however few there are.
    """
    each = core.landing.capacity / (2 * len(core.paths))
    held = _in_flight(path)
    if held == 0 or held + nbytes <= each:
        return True
    others = (other for other in core.paths if other is not path and not other.health.is_down)
    owed = sum(max(0.0, each - _in_flight(other)) for other in others)
    return core.landing.capacity - core.landing.index.used_bytes >= owed


def _in_flight(path: DiskPath) -> int:
    return path.reads.in_flight + path.writes.in_flight
