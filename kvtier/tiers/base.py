"""The contract that every tier meets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from kvtier.index.cache import NO_ROW, SlotCache

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        """Row of a chunk that the tier holds, or NO_ROW."""
        return self.index.find(key)

    def touch_prefix(self, keys: Sequence[bytes]) -> None:
        """Mark the chunks of a prefix as used, tail to head, so that the head outlives the tail."""
        rows = (self.index.find(key) for key in reversed(keys))
        self.index.touch(row for row in rows if row != NO_ROW)

    @abstractmethod
    def reserve(self, nbytes: int) -> int | None:
        """Offset of a slot for a payload, or None if everything else is pinned.

        The slot is the caller's until it is inserted or released.
        """

    def release(self, offset: int) -> None:
        """Give back a reserved slot."""
        self.index.release(offset)

    def discard(self, row: int) -> None:
        """Forget a chunk at once; its slot is free when nothing pins it."""
        self.index.discard(row)

    def stats(self) -> dict[str, int | float | str]:
        """Gauges of the tier, named without its own name in front."""
        return {
            "chunks": len(self.index),
            "bytes": self.index.used_bytes,
            "capacity": self.capacity,
            "evictions": self.index.evicted,
            "pinned_slots": self.index.pinned(),
        }
