"""The vocabulary of results: keys, statuses, reasons, and what a batch came to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NewType

import numpy as np
import numpy.typing as npt

ChunkKey = NewType("ChunkKey", bytes)
"""32 bytes that name one chunk: see `kvtier.chunk_keys`."""

KEY_BYTES = 32


class Status(IntEnum):
    """What became of one key of a batch. Up to KNOWN the chunk is there; above, recompute it."""

    HIT = 0  # get: the payload was delivered, exactly as it was put
    STORED = 1  # put: the tier that was asked for holds it
    KNOWN = 2  # put: it was there already, nothing was moved
    MISS = 3  # get: no tier can serve it
    REFUSED = 4  # nothing was stored or leased; `reason` says why
    FAILED = 5  # the device failed or the deadline passed; `reason` says which


class Reason(IntEnum):
    """Why a key is not HIT, STORED or KNOWN. Counted by name in `Store.stats()`."""

    NONE = 0
    ABSENT = 1  # no tier has the key
    CHECKSUM = 2  # the disk returned bytes that are not those written; the entry was dropped
    SHORT_READ = 3  # the slab ends before the payload does; the entry was dropped
    IO_ERROR = 4  # the device returned an error; the entry is kept, a put replaces it
    DEADLINE = 5  # the time allowed for the call is over
    QUEUE_FULL = 6  # too many puts are waiting: try again later
    NO_SPACE = 7  # the tier is full of pinned or unwritten chunks, or the file system is full
    CANCELLED = 8  # Transfer.cancel() came before the device
    DELETED = 9  # Store.delete() came before the write was done
    CLOSED = 10  # the store was closed before it was done
    TIER_DOWN = 11  # the device failed or hung lately and is not asked for now; the entry is kept
    ADMISSION = 12  # not worth a write to disk now: the `endurance` budget, or the `admission` setting
    QUOTA = 13  # the tenant has used up its quota, and nothing of its own can make room


class TierName(IntEnum):
    """Where a HIT was served from."""

    NONE = 0  # no HIT
    DRAM = 1
    DISK = 2  # read for this call, or for another that it joined


@dataclass(frozen=True, slots=True, repr=False)
class BatchResult:
    """Outcome of one batch, in the caller's key order. The arrays belong to the caller."""

    status: npt.NDArray[np.int8]
    """Shape (n,): a `Status` per key."""
    reason: npt.NDArray[np.int8]
    """Shape (n,): a `Reason` per key, NONE where the status is HIT, STORED or KNOWN."""
    nbytes: npt.NDArray[np.int64]
    """Shape (n,): payload bytes delivered or accepted per key."""
    tier: npt.NDArray[np.uint8]
    """Shape (n,): a `TierName` per key, NONE where the status is not HIT."""

    @property
    def prefix(self) -> int:
        """Number of leading keys that are HIT, STORED or KNOWN: the usable part of a prefix."""
        bad = np.flatnonzero(self.status > Status.KNOWN)
        return int(bad[0]) if bad.size else len(self.status)

    def __repr__(self) -> str:
        outcomes: dict[str, int] = {}
        for status, reason in zip(self.status.tolist(), self.reason.tolist(), strict=True):
            name = Status(status).name + (f" {Reason(reason).name.lower()}" if reason else "")
            outcomes[name] = outcomes.get(name, 0) + 1
        shown = ", ".join(f"{count} {name}" for name, count in outcomes.items())
        return f"BatchResult({len(self.status)} keys: {shown or 'none'}; prefix {self.prefix})"

    @property
    def ok(self) -> bool:
        """Whether every key is HIT, STORED or KNOWN."""
        return bool((self.status <= Status.KNOWN).all())


@dataclass(frozen=True, slots=True)
class OwnerUsage:
    """What one owner holds in one tier."""

    tier: str
    """`dram`, or `disk` for all paths together."""
    id: int
    """Names the owner in every record; 0: nobody."""
    namespace: str
    """Public name of the namespace, 64 hex digits: no key can be made of it. Empty if none was given, or
    if damage to the disk has cost it."""
    tenant: str
    """Name of the tenant, empty likewise."""
    chunks: int
    nbytes: int
    """Bytes of the slots that the chunks take up."""
    oldest: int
    """When the first of them was stored, in seconds since 1970."""
    median: int
    """The same of the one in the middle."""
    newest: int
    """The same of the last one."""
    expired: int
    """Chunks of them whose time is over, and whose room is not free yet."""


@dataclass(frozen=True, slots=True)
class FlushResult:
    """Outcome of `Store.flush`."""

    synced: bool
    """Whether a device confirmed that everything written before is durable; never without a disk tier."""
    failed: int
    """Chunks taken in since the last flush that did not get to disk: no space, not admitted, or a failing
    device.
    They may still be in DRAM."""
