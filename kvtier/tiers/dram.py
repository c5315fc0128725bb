"""The DRAM tier: an arena of slots that chunks are cached in, and that disk reads land in."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvtier.buffers import Arena, zero
from kvtier.config import extent_size, page_up
from kvtier.errors import TierUnavailable
from kvtier.index.cache import SlotCache
from kvtier.owner import NOBODY
from kvtier.tiers.base import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    import numpy.typing as npt

    from kvtier.config import PolicyName
    from kvtier.index.owners import Owners


class DramTier(Tier):
    """Chunks in host memory. The store writes a reserved slot's bytes itself, then inserts it.

    `nbytes` 0 makes a tier that never has room.
    """

    name = "dram"

    def __init__(
        self,
        nbytes: int,
        chunk_bytes: int,
        owners: Owners | None = None,
        limits: Mapping[str, int] | None = None,
        wall: Callable[[], float] = time.time,
        policy: PolicyName = "lru",
    ) -> None:
        """`owners`, `limits`, `wall` and `policy` as of SlotCache."""
        extent_bytes = extent_size(nbytes, chunk_bytes)
        try:
            self.arena = Arena(nbytes)
        except (OSError, OverflowError, ValueError) as error:
            raise TierUnavailable(f"cannot map {nbytes} bytes of memory ({error}): lower dram") from error
        self.index = SlotCache(nbytes, extent_bytes, owners=owners, limits=limits, wall=wall, policy=policy)
        self._sums: dict[int, int] = {}  # by row

    @property
    def capacity(self) -> int:
        """Bytes of the area that slots are cut from."""
        slots = self.index.slots
        return slots.extents * slots.extent_bytes

    def stats(self) -> dict[str, int | float | str]:
        """Gauges of the tier; see Tier.stats."""
        return {**super().stats(), "huge_pages": self.arena.huge}

    @property
    def largest_payload(self) -> int:
        """Bytes of the largest chunk that fits; 0 for a tier without room."""
        return self.index.slots.extent_bytes if self.capacity else 0

    def reserve(self, nbytes: int, owner: int = NOBODY) -> int | None:
        """Offset of a slot in the arena, or None if everything else is pinned or too small; see Tier."""
        return self.index.reserve(nbytes, owner) if nbytes <= self.largest_payload else None

    def insert(
        self,
        key: bytes,
        offset: int,
        nbytes: int,
        checksum: int | None = None,
        *,
        stored_at: int = 0,
        expires_at: int = 0,
    ) -> int:
        """Bind a key that is not in the tier to a filled slot, pinned once. Returns its row.

        The times are seconds since 1970; 0: now, and never.
        """
        self.make_way(key)
        row = self.index.insert(
            key, offset, nbytes, stored_at=stored_at or self.index.expiry.now(), expires_at=expires_at
        )
        self._sums.pop(row, None)  # of the row's last use
        if checksum is not None:
            self._sums[row] = checksum
        return row

    def checksum(self, row: int) -> int:
        """What `insert` was told of a chunk."""
        return self._sums[row]

    def address(self, offset: int) -> int:
        """Address in memory of a slot."""
        return self.arena.address + offset

    def address_to_fill(self, offset: int, nbytes: int) -> int:
        """Address of a slot that a payload of `nbytes` goes to, with zeros behind it to whole pages."""
        address = self.address(offset)
        zero(address + nbytes, page_up(nbytes) - nbytes)
        return address

    def view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Writable uint8 view of a slot, shape (nbytes,)."""
        return self.arena.view(offset, nbytes)
