"""One operation in Python: its memory, and the checksums of its parts."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from kvtier.io.base import CHECKSUM, Batch

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Operation:
    """Operation `index` of a batch, with its fields as Python numbers. See `kvtier.io.base.OP`."""

    batch: Batch
    offset: int
    address: int
    seed: int
    length: int
    part_bytes: int
    first_sum: int
    fd: int
    is_write: bool
    collects: bool

    @classmethod
    def of(cls, batch: Batch, index: int) -> Operation:
        """Read one out of a batch."""
        offset, address, seed, length, part_bytes, first_sum, fd, write, collect = batch.ops[index].item()
        return cls(
            batch, offset, address, seed, length, part_bytes, first_sum, fd, bool(write), bool(collect)
        )

    def memory(self) -> memoryview:
        """The bytes to read into or write from; the submitter owns them."""
        return memoryview((ctypes.c_uint8 * self.length).from_address(self.address)).cast("B")

    def sign(self) -> None:
        """Store the parts' checksums into the batch: of a write before it starts, of a read that collects."""
        for part, found in enumerate(self._sums()):
            self.batch.sums[self.first_sum + part] = found

    def check(self) -> int:
        """Compare the parts with the batch's checksums: of a read, once it is done. 0 or CHECKSUM."""
        if self.collects:
            self.sign()
            return 0
        for part, found in enumerate(self._sums()):
            if found != self.batch.sums[self.first_sum + part]:
                return CHECKSUM
        return 0

    def _sums(self) -> Iterator[int]:
        if not self.part_bytes:
            return
        memory = self.memory()
        for part, start in enumerate(range(0, self.length, self.part_bytes)):
            seed = (self.seed + part) & (2**64 - 1)
            yield xxhash.xxh3_64_intdigest(memory[start : start + self.part_bytes], seed)
