"""Where a chunk is read to; and shares of the landing slots, as a path that hangs must not hold those that
the others need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.config import page_up
from kvtier.store.request import LeaseRead, Prefetch

if TYPE_CHECKING:
    from kvtier.store.core import Core
    from kvtier.store.flight import Flight
    from kvtier.store.paths import DiskPath
    from kvtier.store.request import Read


def place(core: Core, flight: Flight, read: Read, i: int) -> bool:
    """Give a flight all the memory it needs, for the item `i` of a read; False, and none of it, if that is
    not free now. Called with the lock held.
    """
    landing = core.landing
    scratch = landing.reserve(flight.stored_bytes) if flight.codec else None
    if flight.codec and scratch is None:
        return False
    if not _find_place(core, flight, read, i):
        if scratch is not None:
            landing.release(scratch)
        return False
    if scratch is not None:
        flight.scratch = (landing, scratch)
    return True


def _find_place(core: Core, flight: Flight, read: Read, i: int) -> bool:
    """A lent target, a slot among the cached chunks, or one to land in; False if none is free."""
    if read.lend:
        flight.address, flight.lender = read.targets[i], read
        read.lent += 1
        return True
    size = page_up(flight.nbytes)
    kinds = {type(waiter) for waiter, _ in flight.waiters}
    # Leases would starve the reads, unless there is nothing else to lease.
    leases = any(issubclass(kind, LeaseRead) for kind in kinds)
    may_land = Prefetch not in kinds and not (leases and core.dram.capacity)
    share = core.dram.share(size)
    fits = core.dram.fits(1.0 - read.dram_left, share, flight.owner)
    for tier, allowed in ((core.dram, fits), (core.landing, may_land)):
        offset = tier.reserve(size, flight.owner) if allowed else None
        if offset is not None and tier is core.landing and not may_hold(core, flight.path, size):
            tier.release(offset)
        elif offset is not None:
            read.dram_left -= share if tier is core.dram else 0.0
            flight.tier, flight.offset, flight.address = tier, offset, tier.address(offset)
            return True
    return False


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
    return path.reads.in_flight + path.writes.in_flight + path.begun_bytes
