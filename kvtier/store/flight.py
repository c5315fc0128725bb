"""Flight: one chunk on its way from disk to memory, as a whole or piece by piece."""

from __future__ import annotations

import ctypes
import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtier.codec import codec_obstacle, decode
from kvtier.io.base import CHECKSUM
from kvtier.store.request import LeaseRead
from kvtier.tiers.base import NO_ROW

if TYPE_CHECKING:
    from kvtier.store.paths import DiskPath
    from kvtier.store.request import Read
    from kvtier.tiers.dram import DramTier

PIECE_BYTES = 1 << 20
"""Least bytes per operation where chunks are read in pieces: less costs more CPU than it saves time."""
_MOST_PIECE_BYTES = 4 << 20
_PIECES = 32
"""Of how many pieces a large chunk may be: who computes beside a read is kept waiting for one of them."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of a chunk's stored bytes, read by themselves."""

    flight: Flight
    start: int
    nbytes: int


class Flight:
    """One chunk on its way from disk to memory, who waits for it, and then the slot it landed in."""

    __slots__ = (
        "_arrived",
        "_count",
        "address",
        "checksum",
        "codec",
        "dram_row",
        "expires_at",
        "failure",
        "has_left",
        "key",
        "lender",
        "nbytes",
        "next",
        "offset",
        "owner",
        "path",
        "pieces",
        "reading",
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
        self.pieces = [Piece(self, 0, self.stored_bytes)]
        self.next = 0  # of the pieces: those before it were asked for
        self.reading = 0  # pieces in the kernel
        self.failure = 0  # what came of the first piece that failed
        self.has_left = False  # nobody joins it any more, and its chunk on disk is not pinned for it
        self._count = 1  # of the pieces that make a chunk
        self._arrived: set[int] = set()  # starts of the pieces that are there

    def cut(self) -> None:
        """Have it read in several pieces, if parts of it can be checked by themselves."""
        part = self.path.tier.part_bytes
        if not part or self.codec:
            return
        step = min(max(self.stored_bytes // _PIECES, PIECE_BYTES), _MOST_PIECE_BYTES)
        step = max(part, step // part * part)
        size = self.stored_bytes
        self.pieces = [Piece(self, start, min(step, size - start)) for start in range(0, size, step)]
        self._count = len(self.pieces)

    def arrive(self, piece: Piece) -> None:
        """A piece is there, and checked."""
        self._arrived.add(piece.start)

    @property
    def there(self) -> int:
        """How many of the payload's first bytes are there; none before all of it is decoded."""
        if self.codec:
            return 0
        end = 0
        for piece in self.pieces:
            if piece.start not in self._arrived:
                break
            end = piece.start + piece.nbytes
        return min(end, self.nbytes)

    @property
    def is_begun(self) -> bool:
        """Whether some pieces were asked for, and others are not yet."""
        return 0 < self.next < len(self.pieces)

    @property
    def is_asked_for(self) -> bool:
        """Whether no piece is left to be asked for."""
        return self.next == len(self.pieces)

    @property
    def is_whole(self) -> bool:
        """Whether all of it is there."""
        return len(self._arrived) == self._count

    def give_up(self) -> None:
        """Ask for no more pieces of it."""
        del self.pieces[self.next :]

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
