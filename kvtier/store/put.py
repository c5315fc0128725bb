"""Writes in progress: puts, flushes, and single chunks on their way to disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtier.errors import StoreClosed
from kvtier.store.request import Request
from kvtier.tiers.base import NO_ROW

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.store.lease import Until
    from kvtier.store.transfer import Transfer
    from kvtier.tiers.dram import DramTier
    from kvtier.tiers.slab.tier import Write
    from kvtier.types import FlushResult, Status


class Put(Request):
    """A put, whose payloads are copied from `sources`, or a commit, whose slots are filled."""

    __slots__ = (
        "accepted", "copying", "deadline", "deleted", "disk_left", "dram_left", "lengths", "slots",
        "sources", "until", "writing",
    )  # fmt: skip

    def __init__(
        self,
        keys: Sequence[bytes],
        transfer: Transfer[Any],
        owner: object,
        sources: list[int],
        lengths: list[int],
        until: Until,
        deadline: float,
    ) -> None:
        super().__init__(keys, transfer, owner)
        self.sources = sources
        self.lengths = lengths
        self.until = until
        self.deadline = deadline
        self.accepted = len(keys)  # items that the queue took, from the head
        self.deleted: set[bytes] = set()  # keys deleted since it was queued
        self.slots: dict[int, tuple[DramTier, int]] = {}  # reserved, not yet published
        self.dram_left = self.disk_left = (
            1.0  # share of a tier it may still take: a larger put keeps its head
        )
        self.writing = 0  # items on their way to disk
        self.copying = False  # its source is being read now: the outcome waits for that

    def prepare_slot(self, i: int) -> int:
        """Address of the reserved slot of item `i`, with zeros behind the payload."""
        tier, offset = self.slots[i]
        return tier.address_to_fill(offset, self.lengths[i])

    def release_slots(self) -> None:
        """Give back every slot that is reserved and not published."""
        for tier, offset in self.slots.values():
            tier.release(offset)
        self.slots.clear()


class Flush:
    """A flush: done when every write before it has ended and the device has confirmed them."""

    __slots__ = ("_claimed", "open", "transfer")

    def __init__(self, transfer: Transfer[FlushResult]) -> None:
        self.transfer = transfer
        self.open = 0  # writes it waits for
        self._claimed = False

    def claim(self) -> bool:
        """True once, when no write is left to wait for: whoever gets it syncs."""
        claimed = self.open == 0 and not self._claimed
        self._claimed = self._claimed or claimed
        return claimed

    def give_up(self) -> None:
        """Tell the caller that the store was closed first."""
        self.transfer._fail(StoreClosed("the store was closed before the flush was done: open it again"))


class WriteThrough:
    """One chunk on its way to disk, and who waits for it."""

    __slots__ = (
        "deleted", "fits", "flushes", "key", "nbytes", "offset", "put", "row", "tier", "waiters", "write",
    )  # fmt: skip

    def __init__(self, put: Put, key: bytes, nbytes: int, tier: DramTier, offset: int, row: int) -> None:
        self.put = put  # that brought it about
        self.key = key
        self.nbytes = nbytes
        self.tier = tier  # of the slot that holds the payload
        self.offset = offset
        self.row = row  # pinned there; NO_ROW for a slot that only passes it through
        self.write: Write | None = None  # its slot on disk, once it has one
        self.fits = True  # False for the tail of a put that is larger than the disk tier
        self.deleted = False
        self.waiters: list[tuple[Put, int, Status]] = []
        self.flushes: list[Flush] = []

    @property
    def slot(self) -> Write:
        """The write into its slot on disk."""
        assert self.write is not None, "it has no slot yet"
        return self.write

    def put_down(self) -> None:
        """Let go of the slot that held the payload."""
        if self.row != NO_ROW:
            self.tier.index.unpin(self.row)
        else:
            self.tier.release(self.offset)
