"""The contract that every tier meets."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from kvtier.index.rows import NO_ROW
from kvtier.owner import NOBODY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvtier.index.cache import SlotCache

__all__ = ["NO_ROW", "Tier"]


class Tier(ABC):
    """Slots for chunks behind one index. Not thread-safe: the store's lock guards every call that
    touches the index; none of those does I/O.
    """

    name: ClassVar[str]
    index: SlotCache

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Bytes that slots may take up."""

    @property
    def largest_payload(self) -> int:
        """Bytes of the largest chunk that fits."""
        return self.index.slots.extent_bytes

    def share(self, nbytes: int) -> float:
        """The part of the tier that one such chunk takes up, 1.0 if it holds just one; above if none."""
        slots = self.index.slots
        size = slots.size_for(nbytes) if nbytes <= self.largest_payload else slots.extent_bytes + 1
        count = slots.extents * (slots.extent_bytes // size)
        return (1 - 1e-9) / count if count else 2.0

    def find(self, key: bytes) -> int:
        """Row of a chunk that the tier holds and whose time is not over, or NO_ROW."""
        row = self.index.find(key)
        if row != NO_ROW and self.index.expiry.count and self.index.is_expired(row):
            return NO_ROW
        return row

    def expire(self, row: int) -> None:
        """Forget a chunk whose time is over."""
        self.index.expired += 1
        self.discard(row)

    def make_way(self, key: bytes) -> None:
        """Before a key is entered: drop the chunk that it had, whose time was over when it was put again."""
        if (row := self.index.find(key)) != NO_ROW:
            self.expire(row)

    def touch_prefix(self, keys: Sequence[bytes]) -> None:
        """Mark the chunks of a prefix as used, tail to head, so that the head outlives the tail."""
        self.index.touch(self._rows(keys))

    def order_prefix(self, keys: Sequence[bytes]) -> None:
        """When a request ends, whose batches ended in any order: as `touch_prefix`, but no further use."""
        self.index.order(self._rows(keys))

    def _rows(self, keys: Sequence[bytes]) -> Iterator[int]:
        """Of those of the keys that are in the tier, last key first."""
        rows = (self.index.find(key) for key in reversed(keys))
        return (row for row in rows if row != NO_ROW)

    @abstractmethod
    def reserve(self, nbytes: int, owner: int = NOBODY) -> int | None:
        """Offset of a slot for a payload, or None if everything else is pinned, or all that the owner's
        tenant may have is.

        The slot is the caller's until it is inserted or released.
        """

    def is_over_quota(self, nbytes: int, owner: int) -> bool:
        """Whether a slot for `nbytes` would take the owner's tenant above what it may have."""
        return nbytes <= self.largest_payload and self.index.over_limit(nbytes, owner)

    def fits(self, taken: float, share: float, owner: int) -> bool:
        """Whether a request that has `taken` a part of the tier may take `share` more: it keeps its head
        where it is larger than the tier, or than what the owner's tenant may have of it.
        """
        slots, limit = self.index.slots, self.index.holdings.limit(owner)
        area = slots.extents * slots.extent_bytes
        return taken + share <= (1.0 if limit is None else min(1.0, limit / max(1, area)))

    def release(self, offset: int) -> None:
        """Give back a reserved slot."""
        self.index.release(offset)

    def discard(self, row: int) -> None:
        """Forget a chunk at once; its slot is free when nothing pins it."""
        self.index.discard(row)

    @property
    def budget_left(self) -> float:
        """Bytes that may be written now, by a budget of writes."""
        return math.inf

    def is_due(self, now: float) -> bool:
        """True once for every time that somebody should call `look`, without the lock; `now` is monotonic."""
        return False

    def look(self) -> None:  # noqa: B027  most have nothing to look at
        """See what others did to the device since. May wait for it."""

    def delete(self, row: int) -> None:
        """Forget a chunk because somebody asked for that: other processes are to forget it, too."""
        self.discard(row)

    def stats(self) -> dict[str, int | float | str]:
        """Gauges of the tier, named without its own name in front."""
        return {
            "chunks": len(self.index),
            "bytes": self.index.used_bytes,
            "capacity": self.capacity,
            "evictions": self.index.evicted,
            "expired": self.index.expired,
            "pinned_slots": self.index.pinned(),
        }
