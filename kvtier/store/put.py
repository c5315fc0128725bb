"""Writes in progress: puts, flushes, and single chunks on their way to disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtier.buffers import checksum
from kvtier.codec import Codec
from kvtier.config import page_up
from kvtier.errors import StoreClosed
from kvtier.owner import OwnerName
from kvtier.store.request import Request
from kvtier.tiers.base import NO_ROW

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.store.clock import Alarm
    from kvtier.store.lease import Until
    from kvtier.store.paths import DiskPath
    from kvtier.store.transfer import Transfer
    from kvtier.tiers.disk import Write
    from kvtier.tiers.dram import DramTier
    from kvtier.types import FlushResult, Status

_NOBODY = OwnerName()


class Put(Request):
    """A put, whose payloads are copied from `sources`, or a commit, whose slots are filled."""

    __slots__ = (
        "_path_left",
        "_slot_sizes",
        "_tenant_bytes",
        "accepted",
        "checksums",
        "codec",
        "copying",
        "deadline",
        "deleted",
        "disk_left",
        "dram_left",
        "expires_at",
        "lengths",
        "owner",
        "slots",
        "sources",
        "until",
        "writing",
    )  # fmt: skip

    def __init__(
        self,
        keys: Sequence[bytes],
        transfer: Transfer[Any],
        buffers: object,
        sources: list[int],
        lengths: list[int],
        until: Until,
        deadline: float,
        codec: Codec = Codec.RAW,
        owner: OwnerName = _NOBODY,
        expires_at: int = 0,
    ) -> None:
        super().__init__(keys, transfer, buffers)
        self.sources = sources
        self.lengths = lengths
        self.until = until
        self.deadline = deadline
        self.codec = codec
        self.owner = owner
        self.expires_at = expires_at  # seconds since 1970, 0 for never
        self.accepted = len(keys)  # items that the queue took, from the head
        self.deleted: set[bytes] = set()  # keys deleted since it was queued
        self.slots: dict[int, tuple[DramTier, int]] = {}  # reserved, not yet published
        self.checksums: dict[int, int] = {}  # of filled slots, if DRAM is checked
        self.dram_left = 1.0  # share of DRAM it may still take: a larger put keeps its head
        self.disk_left: float | None = None  # bytes it may write of a limited budget, once that is known
        self._path_left: dict[DiskPath, float] = {}  # the same of each path
        self._slot_sizes: set[tuple[DiskPath, int]] = set()
        self._tenant_bytes: dict[tuple[DiskPath, str], int] = {}  # what paths hold of it
        self.writing = 0  # items on their way to disk
        self.copying = False  # its source is being read now: the outcome waits for that

    def prepare_slot(self, i: int) -> int:
        """Address of the reserved slot of item `i`, with zeros behind the payload."""
        tier, offset = self.slots[i]
        return tier.address_to_fill(offset, self.lengths[i])

    def sign_slot(self, i: int) -> None:
        """Note the checksum of the filled slot of item `i`."""
        tier, offset = self.slots[i]
        self.checksums[i] = checksum(tier.address(offset), self.lengths[i])

    def fits(self, path: DiskPath, nbytes: int, owner: int) -> bool:
        """Whether a path holds `nbytes` more beside the head of this put, for this owner: else they would
        push it out.
        """
        holdings = path.tier.index.holdings
        limit, held = holdings.limit(owner), self._tenant_bytes.get((path, holdings.tenant_of(owner)), 0)
        within = limit is None or held + path.tier.slot_size(nbytes) <= limit
        return within and self._path_left.get(path, 1.0) >= self._share(path, nbytes)

    def charge(self, path: DiskPath, nbytes: int, owner: int) -> None:
        """Count `nbytes` that a path holds of this put, for this owner."""
        share = self._share(path, nbytes)
        self._path_left[path] = self._path_left.get(path, 1.0) - share
        if tenant := path.tier.index.holdings.tenant_of(owner):
            self._tenant_bytes[path, tenant] = self._tenant_bytes.get((path, tenant), 0) + nbytes
        self._slot_sizes.add((path, path.tier.slot_size(nbytes)))

    def _share(self, path: DiskPath, nbytes: int) -> float:
        """With every further slot size, up to one extent of the path is lost between them."""
        is_first = not any(other is path for other, _ in self._slot_sizes)
        is_known = (path, path.tier.slot_size(nbytes)) in self._slot_sizes
        lost = 0.0 if is_first or is_known else path.tier.extent_share
        return path.tier.share(nbytes) + lost

    def release_slots(self) -> None:
        """Give back every slot that is reserved and not published."""
        for tier, offset in self.slots.values():
            tier.release(offset)
        self.slots.clear()


class Flush:
    """A flush: done when every write before it has ended and the device has confirmed them."""

    __slots__ = ("_claimed", "late", "open", "transfer")

    def __init__(self, transfer: Transfer[FlushResult]) -> None:
        self.transfer = transfer
        self.open = 0  # writes it waits for
        self.late: Alarm | None = None  # its deadline
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
        "codec", "deleted", "encoded", "expires_at", "flushes", "key", "nbytes", "offset", "owner", "put",
        "row", "tier", "waiters", "write",
    )  # fmt: skip

    def __init__(self, put: Put, key: bytes, nbytes: int, tier: DramTier, offset: int, row: int) -> None:
        self.put = put  # that brought it about
        self.key = key
        self.nbytes = nbytes
        self.tier = tier  # of the slot that holds the payload
        self.offset = offset
        self.row = row  # pinned there; NO_ROW for a slot that only passes it through
        cached, index = row != NO_ROW, tier.index
        self.owner = index.owner[row] if cached else index.reserved_for(offset)
        self.expires_at = index.expires_at[row] if cached else put.expires_at
        self.codec = put.codec
        self.encoded: tuple[DramTier, int, int] | None = None  # tier, offset and whole pages of that form
        self.write: Write | None = None  # its slot on disk, once it has one
        self.deleted = False
        self.waiters: list[tuple[Put, int, Status]] = []
        self.flushes: list[Flush] = []

    @property
    def slot(self) -> Write:
        """The write into its slot on disk."""
        assert self.write is not None, "it has no slot yet"
        return self.write

    @property
    def address(self) -> int:
        """Where the bytes for the disk are, with zeros behind them up to whole pages."""
        tier, offset = self.encoded[:2] if self.encoded else (self.tier, self.offset)
        return tier.address(offset)

    @property
    def stored_bytes(self) -> int:
        """How many bytes go to disk: whole pages."""
        return self.encoded[2] if self.encoded else page_up(self.nbytes)

    @property
    def slot_bytes(self) -> int:
        """The slot to ask for: in steps of a sixteenth of the payload, so that a few sizes serve all."""
        if not self.encoded:
            return self.nbytes
        step = page_up(-(-self.nbytes // 16))
        return min(-(-self.stored_bytes // step) * step, page_up(self.nbytes))

    def put_down(self) -> None:
        """Let go of the slots that held the payload and its encoded form."""
        if self.encoded is not None:
            tier, offset, _ = self.encoded
            tier.release(offset)
        if self.row != NO_ROW:
            self.tier.index.unpin(self.row)
        else:
            self.tier.release(self.offset)
