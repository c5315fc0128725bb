"""ByteCache: the index of a tier whose room is counted in bytes, with one order of recency over all sizes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvtier.config import PAGE, page_up
from kvtier.index.cache import SlotCache
from kvtier.index.slots import SlotAllocator
from kvtier.owner import NOBODY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    import numpy.typing as npt

    from kvtier.config import PolicyName
    from kvtier.index.owners import Owners

_SIZE_BITS = 21  # of a slot's offset, its size in pages; the bits above tell it from all others
_ANYWHERE = 1 << 62


class ByteAllocator(SlotAllocator):
    """Room that is counted and lies nowhere: the offset of a slot names it, and holds its size."""

    def __init__(self, capacity: int) -> None:
        super().__init__(_ANYWHERE, _ANYWHERE)
        self._number = 0
        self.capacity = capacity
        """Bytes to deal out; may be changed, also to less than is dealt out."""
        self.dealt = 0

    @property
    def left(self) -> int:
        """Bytes that can be dealt out; negative if there is less room than is taken."""
        return self.capacity - self.dealt

    def allocate(self, nbytes: int) -> int | None:
        """The offset of a slot for `nbytes`, or None if there is no room for it."""
        return self.take(nbytes) if page_up(nbytes) <= self.left else None

    def take(self, nbytes: int) -> int:
        """The offset of a slot for `nbytes`, whether there is room or not."""
        size = page_up(nbytes)
        self.dealt += size
        self._number += 1
        return self._number << _SIZE_BITS | size // PAGE

    def shrink(self, offset: int, nbytes: int) -> int:
        """Keep only `nbytes` of a slot, under the same number. Returns its new offset."""
        size = page_up(nbytes)
        self.dealt -= self.size_at(offset) - size
        return offset >> _SIZE_BITS << _SIZE_BITS | size // PAGE

    def has_free(self, nbytes: int) -> bool:
        """Whether `allocate` would find room."""
        return page_up(nbytes) <= self.left

    def free(self, offset: int) -> None:
        """Take room back."""
        self.dealt -= self.size_at(offset)

    def size_for(self, nbytes: int) -> int:
        """Whole pages."""
        return page_up(nbytes)

    def size_at(self, offset: int) -> int:
        """Bytes of a slot."""
        return (offset & (1 << _SIZE_BITS) - 1) * PAGE

    def sizes_at(self, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The same for many: shape (n,)."""
        sizes: npt.NDArray[np.int64] = (offsets & (1 << _SIZE_BITS) - 1) * PAGE
        return sizes

    def class_at(self, offset: int) -> int:
        """Any chunk makes room for any other."""
        return 0


class ByteCache(SlotCache):
    """Evicts the least recently used unpinned chunks, as many as it takes."""

    slots: ByteAllocator

    def __init__(
        self,
        capacity: int,
        *,
        on_evict: Callable[[int], None] = lambda row: None,
        owners: Owners | None = None,
        limits: Mapping[str, int] | None = None,
        wall: Callable[[], float] = time.time,
        policy: PolicyName = "lru",
    ) -> None:
        """`capacity` in bytes of whole pages; the rest as of SlotCache."""
        self._idle_bytes = 0  # of chunks that could be evicted
        super().__init__(
            0, 1, slots=ByteAllocator(capacity), on_evict=on_evict, owners=owners, limits=limits, wall=wall,
            policy=policy,
        )  # fmt: skip

    def adopt(
        self,
        key: bytes,
        nbytes: int,
        generation: int,
        *,
        stored_bytes: int,
        codec: int,
        owner: int = NOBODY,
        stored_at: int = 0,
        expires_at: int = 0,
    ) -> int:
        """Enter a chunk that takes up room whether there is any or not, pinned once. Returns its row."""
        offset = self.slots.take(stored_bytes)
        self.used_bytes += self.slots.size_at(offset)
        self._busy[0] += 1
        if owner != NOBODY:
            self._reserved[offset] = owner
            self.holdings.charge(owner, self.slots.size_at(offset))
        return self.insert(
            key, offset, nbytes, generation, stored_bytes=stored_bytes, codec=codec, stored_at=stored_at,
            expires_at=expires_at,
        )  # fmt: skip

    def shrink(self, offset: int, nbytes: int) -> int:
        """Keep only `nbytes` of a reserved slot. Returns its new offset."""
        before, owner = self.slots.size_at(offset), self._reserved.pop(offset, NOBODY)
        offset = self.slots.shrink(offset, nbytes)
        spare = before - self.slots.size_at(offset)
        self.used_bytes -= spare
        if owner != NOBODY:
            self._reserved[offset] = owner
            self.holdings.charge(owner, -spare)
        return offset

    def _link(self, row: int) -> None:
        super()._link(row)
        self._idle_bytes += self.slots.size_at(self.offset[row])

    def _hold(self, row: int) -> None:
        super()._hold(row)
        self._idle_bytes -= self.slots.size_at(self.offset[row])

    def _unlink(self, row: int) -> None:
        super()._unlink(row)
        self._idle_bytes -= self.slots.size_at(self.offset[row])

    def _make_room(self, size: int) -> bool:
        """Evict the oldest chunk, unless not even all of them would do."""
        return size <= self.slots.left + self._idle_bytes and self.evict_oldest()
