"""SlotAllocator: an area cut into extents, each extent into slots of one size."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

import numpy as np

from kvtier.config import page_up

if TYPE_CHECKING:
    import numpy.typing as npt

UNASSIGNED = 0


class SlotAllocator:
    """Deals out slots by byte offset. An extent takes a slot size when it is first needed, and gives
    it up when its last slot is freed, so that chunks of several sizes share the area.
    """

    def __init__(self, area: int, extent_bytes: int) -> None:
        self.extent_bytes = extent_bytes
        self.extents = area // extent_bytes
        self.slot_bytes = np.zeros(self.extents, np.int64)
        """Slot size per extent, or UNASSIGNED."""
        self._used = [0] * self.extents
        self._fresh = [0] * self.extents  # slots from this index on were never dealt out
        self._freed: list[list[int]] = [[] for _ in range(self.extents)]
        self._unassigned = list(range(self.extents))  # a heap: low extents first
        self._open: dict[int, dict[int, None]] = {}  # slot size -> extents that have a free slot

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a free slot of at least `nbytes`, or None if there is none."""
        size = self.size_for(nbytes)
        extent = next(iter(self._open.get(size, ())), None)
        if extent is None:
            if not self._unassigned:
                return None
            extent = heapq.heappop(self._unassigned)
            self.slot_bytes[extent] = size
            self._fresh[extent] = 0
            self._open.setdefault(size, {})[extent] = None
        freed = self._freed[extent]
        if freed:
            index = freed.pop()
        else:
            index = self._fresh[extent]
            self._fresh[extent] += 1
        self._used[extent] += 1
        if not freed and self._fresh[extent] == self.extent_bytes // size:
            self._close(extent, size)
        return extent * self.extent_bytes + index * size

    def has_free(self, nbytes: int) -> bool:
        """Whether `allocate` would find a slot."""
        return bool(self._unassigned) or self.size_for(nbytes) in self._open

    def free(self, offset: int) -> None:
        """Take a slot back."""
        extent, rest = divmod(offset, self.extent_bytes)
        size = int(self.slot_bytes[extent])
        self._used[extent] -= 1
        if self._used[extent]:
            self._freed[extent].append(rest // size)
            self._open.setdefault(size, {})[extent] = None
        else:
            self._close(extent, size)
            self._freed[extent].clear()
            self.slot_bytes[extent] = UNASSIGNED
            heapq.heappush(self._unassigned, extent)

    def size_for(self, nbytes: int) -> int:
        """Slot size for a payload: a size in use that wastes at most an eighth, else whole pages.

        Raises ValueError above the size of an extent.
        """
        exact = page_up(nbytes)
        if exact > self.extent_bytes:
            raise ValueError(f"{nbytes} bytes do not fit an extent of {self.extent_bytes}")
        if exact in self._open:
            return exact
        near = [size for size in self._open if exact < size <= exact + exact // 8]
        return min(near, default=exact)

    def size_at(self, offset: int) -> int:
        """Slot size of the extent that `offset` lies in."""
        return int(self.slot_bytes[offset // self.extent_bytes])

    def sizes_at(self, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The same for many: shape (n,)."""
        sizes: npt.NDArray[np.int64] = self.slot_bytes[offsets // self.extent_bytes]
        return sizes

    def class_at(self, offset: int) -> int:
        """Names the slots that can take each other's place: those of one size."""
        return self.size_at(offset)

    def load(self, slot_bytes: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> None:
        """Start over with these slot sizes per extent, and the slots at `offsets` dealt out.

        Every extent with a size must have a slot dealt out, and no other.
        """
        self.slot_bytes[:] = slot_bytes
        self._unassigned = np.flatnonzero(slot_bytes == UNASSIGNED).tolist()
        extents, rest = np.divmod(np.sort(offsets), self.extent_bytes)
        bounds = np.flatnonzero(np.diff(extents, prepend=-1, append=-1)).tolist()
        for start, end in itertools.pairwise(bounds):
            extent = int(extents[start])
            size = int(slot_bytes[extent])
            indices = rest[start:end] // size
            self._used[extent] = end - start
            self._fresh[extent] = int(indices[-1]) + 1
            free = np.ones(self._fresh[extent], bool)
            free[indices] = False
            self._freed[extent] = np.flatnonzero(free)[::-1].tolist()
            if end - start < self.extent_bytes // size:
                self._open.setdefault(size, {})[extent] = None

    def _close(self, extent: int, size: int) -> None:
        extents = self._open.get(size, {})
        extents.pop(extent, None)
        if not extents:
            self._open.pop(size, None)
