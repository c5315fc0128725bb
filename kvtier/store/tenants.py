"""What owners hold of a store, and the end of all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.index.usage import usage
from kvtier.tiers.base import NO_ROW

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvtier.index.cache import SlotCache
    from kvtier.store.core import Core
    from kvtier.store.writes import Writer
    from kvtier.tiers.base import Tier
    from kvtier.types import OwnerUsage

_STEP = 1024
"""Chunks dropped before others get the lock."""


def delete(core: Core, writer: Writer, namespace: bytes | None, tenant: str | None) -> int:
    """Forget every chunk of some owners, puts under way included; returns how many were stored.

    `namespace` is its public name; None is any. The tombstones are still to be written.
    """
    with core.lock:
        core.check_open()
        owners = core.owners.matching(namespace, tenant)
        count = writer.forget_owners(owners)
        rows = [(tier, tier.index.rows_of(owners)) for tier in core.tiers]
        core.changed.notify_all()
    for tier, some in rows:
        for start in range(0, len(some), _STEP):
            with core.lock:
                count += sum(_drop(core, tier, row, owners) for row in some[start : start + _STEP])
                core.changed.notify_all()
    return count


def _drop(core: Core, tier: Tier, row: int, owners: set[int]) -> bool:
    """Forget a chunk, unless it went by itself; whether that was the last tier that had it."""
    index = tier.index
    if index.is_gone(row) or index.owner[row] not in owners:
        return False
    key, is_over = index.key(row), index.is_expired(row)
    tier.delete(row)
    return not is_over and all(other.index.find(key) == NO_ROW for other in core.tiers)


def holdings(core: Core) -> list[OwnerUsage]:
    """What each owner holds, tier by tier."""
    with core.lock:
        core.check_open()
        names = dict(core.owners.names)
        dram, disk = _columns(core.dram.index), [_columns(path.tier.index) for path in core.paths]
    found = usage("dram", names, core.wall(), **dram)
    if disk:
        together = {name: np.concatenate([columns[name] for columns in disk]) for name in disk[0]}
        found += usage("disk", names, core.wall(), **together)
    return found


def _columns(index: SlotCache) -> dict[str, npt.NDArray[Any]]:
    """Owner, slot bytes and times of every chunk in the table."""
    rows = index.table.rows()
    sizes = index.slots.sizes_at(np.array(index.offset, np.int64)[rows])
    times = {name: np.array(getattr(index, name))[rows] for name in ("owner", "stored_at", "expires_at")}
    return {"nbytes": sizes, **times}
