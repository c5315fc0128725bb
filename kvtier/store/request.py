"""Requests in progress: the items of one batch, what each came to, and where its bytes go."""

from __future__ import annotations

import ctypes
import errno
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.codec import codec_obstacle, decode
from kvtier.io.base import CHECKSUM
from kvtier.tiers.base import NO_ROW
from kvtier.types import BatchResult, Reason, Status, TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from kvtier.store.clock import Alarm
    from kvtier.store.paths import DiskPath
    from kvtier.store.transfer import Transfer
    from kvtier.tiers.dram import DramTier

_OPEN = -1


class Request:
    """One batch in progress. All but `resolve` is used with the store's lock held."""

    __slots__ = (
        "_claimed", "_open", "alarm", "buffers", "keys", "nbytes", "reason", "status", "tier", "transfer"
    )  # fmt: skip

    def __init__(self, keys: Sequence[bytes], transfer: Transfer[Any], buffers: object) -> None:
        self.keys = keys
        self.transfer = transfer
        self.buffers = buffers  # the caller's: kept alive while anything refers to this
        self.status = [_OPEN] * len(keys)
        self.reason = [0] * len(keys)
        self.nbytes = [0] * len(keys)
        self.tier = [0] * len(keys)
        self._open = len(keys)
        self._claimed = False
        self.alarm: Alarm | None = None  # its deadline

    def is_open(self, i: int) -> bool:
        """Whether item `i` has no outcome yet."""
        return self.status[i] == _OPEN

    @property
    def is_done(self) -> bool:
        """Whether every item has its outcome."""
        return self._open == 0

    def claim(self) -> bool:
        """True once, when every item has its outcome: whoever gets it calls `resolve`."""
        claimed = self.is_done and not self._claimed
        self._claimed = self._claimed or claimed
        return claimed

    def close(
        self,
        i: int,
        status: Status,
        reason: Reason = Reason.NONE,
        nbytes: int = 0,
        tier: TierName = TierName.NONE,
    ) -> None:
        """Give the open item `i` its outcome."""
        self.status[i] = status
        self.reason[i] = reason
        self.nbytes[i] = nbytes
        self.tier[i] = tier
        self._open -= 1

    def result(self) -> BatchResult:
        """What the items came to."""
        return BatchResult(
            np.array(self.status, np.int8),
            np.array(self.reason, np.int8),
            np.array(self.nbytes, np.int64),
            np.array(self.tier, np.uint8),
        )

    def resolve(self) -> None:
        """Hand the outcome to the caller. Called once, without the lock."""
        if self.alarm is not None:
            self.alarm.cancel()
        self.transfer._finish(self.outcome())

    def outcome(self) -> Any:
        """What the transfer resolves to."""
        return self.result()


class Read(Request):
    """A get: every item is copied to, or read straight into, an address of the caller's."""

    __slots__ = ("copying", "dram_left", "lend", "lent", "targets")

    def __init__(
        self,
        keys: Sequence[bytes],
        transfer: Transfer[Any],
        buffers: object,
        *,
        targets: list[int],
        lend: bool,
    ) -> None:
        super().__init__(keys, transfer, buffers)
        self.targets = targets
        self.lend = lend
        self.lent = 0  # targets that the kernel may be writing to
        self.dram_left = 1.0  # share of DRAM it may still take: a larger read keeps its head
        self.copying: set[int] = set()  # items whose copy is under way: a deadline waits for them


class LeaseRead(Read):
    """A read: every item becomes a view of a slot that the lease pins."""

    __slots__ = ("_make", "releases", "views")

    def __init__(
        self,
        keys: Sequence[bytes],
        transfer: Transfer[Any],
        make: Callable[[LeaseRead], object],
    ) -> None:
        super().__init__(keys, transfer, None, targets=[], lend=False)
        self.views: list[npt.NDArray[np.uint8] | None] = [None] * len(keys)
        self.releases: list[Callable[[], None]] = []
        self._make = make

    def outcome(self) -> Any:
        """The lease."""
        return self._make(self)


class Prefetch(LeaseRead):
    """A read that wants its chunks cached, and is not served by a slot they only land in."""

    __slots__ = ()


class Flight:
    """One chunk on its way from disk to memory, who waits for it, and then the slot it landed in."""

    __slots__ = (
        "address",
        "checksum",
        "codec",
        "dram_row",
        "expires_at",
        "key",
        "lender",
        "nbytes",
        "offset",
        "owner",
        "path",
        "row",
        "scratch",
        "stored_at",
        "stored_bytes",
        "tier",
        "users",
        "waiters",
    )

    def __init__(self, key: bytes, path: DiskPath, row: int) -> None:
        self.key = key
        self.path = path
        self.row = row  # in that path's tier, pinned until it has landed
        self.nbytes = path.tier.index.nbytes[row]
        self.stored_bytes = path.tier.index.stored_bytes[row]
        self.codec = path.tier.index.codec[row]
        self.owner = path.tier.index.owner[row]
        self.stored_at = path.tier.index.stored_at[row]
        self.expires_at = path.tier.index.expires_at[row]
        self.waiters: list[tuple[Read, int]] = []
        self.lender: Read | None = None  # whose target it is read into, instead of a slot
        self.tier: DramTier | None = None
        self.offset = 0
        self.address = 0  # of the payload
        self.scratch: tuple[DramTier, int] | None = None  # slot that its encoded form is read into
        self.dram_row = NO_ROW  # once it is cached
        self.checksum: int | None = None  # of the payload, if DRAM is checked
        self.users = 1  # the read itself, and leases

    @property
    def read_address(self) -> int:
        """Where the stored bytes are read to."""
        if self.scratch is None:
            return self.address
        tier, offset = self.scratch
        return tier.address(offset)

    def decode(self) -> int:
        """Turn the stored bytes into the payload: 0, or a result as of an operation that failed."""
        if self.scratch is None:
            return 0
        if codec_obstacle(self.codec):
            return errno.ENOSYS
        tier, offset = self.scratch
        if self.tier is not None:  # a slot, whose bytes behind the payload may go to disk again
            self.tier.address_to_fill(self.offset, self.nbytes)
        payload = np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(self.address))
        return 0 if decode(self.codec, tier.view(offset, self.stored_bytes), payload) else CHECKSUM

    def drop_scratch(self) -> None:
        """Let go of the slot that held the encoded form."""
        if self.scratch is not None:
            tier, offset = self.scratch
            tier.release(offset)
            self.scratch = None

    def is_over(self) -> bool:
        """Whether its chunk was deleted, or expired: those who wait are served, nobody joins them."""
        index = self.path.tier.index
        return index.is_gone(self.row) or index.is_expired(self.row)

    def open_waiters(self) -> list[tuple[Read, int]]:
        """Those that still want it."""
        return [(read, i) for read, i in self.waiters if read.is_open(i)]

    def is_leased(self) -> bool:
        """Whether somebody wants a view of it, so that not every slot will do."""
        return any(isinstance(read, LeaseRead) for read, _ in self.open_waiters())

    def put_down(self) -> None:
        """One user less; after the last one the slot is free, or no longer pinned in the cache."""
        self.users -= 1
        if self.users == 0 and self.tier is not None:
            if self.dram_row != NO_ROW:
                self.tier.index.unpin(self.dram_row)
            else:
                self.tier.release(self.offset)
