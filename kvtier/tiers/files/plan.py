"""FilePlan: reads or writes of whole files. Which descriptors they use is known only when they are open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.io.base import CHECKSUM
from kvtier.io.plan import Plan
from kvtier.tiers.disk import Write
from kvtier.tiers.files.format import ChunkFile, digest_of, seed_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.io.base import Batch

NOT_OPEN = -1


@dataclass(slots=True)
class FileWrite(Write):
    """A payload on its way into a file."""

    temporary: str = ""
    fd: int = NOT_OPEN
    mtime: int = 0

    @property
    def file(self) -> ChunkFile:
        """What the file's name says, once its checksums are known."""
        return ChunkFile(
            self.key, self.payload_bytes, self.stored_bytes, self.codec, self.owner, self.expires_at,
            self.generation,
        )  # fmt: skip


class FilePlan(Plan):
    """A plan of chunks that are files of their own.

    A file that cannot be opened has an outcome in `errors`; its operations then fail on a descriptor that
    is none.
    """

    def __init__(self, part_bytes: int) -> None:
        super().__init__(fd=NOT_OPEN, part_bytes=part_bytes)
        self.reads: list[ChunkFile] = []
        self.writes: list[Write] = []
        self.fds: list[int] = []
        """Per chunk."""
        self.errors: dict[int, int] = {}

    def add_read(self, file: ChunkFile, address: int) -> None:
        """Add a read of a whole file to `address`."""
        self.reads.append(file)
        self.fds.append(NOT_OPEN)
        self.add(
            offset=0,
            address=address,
            nbytes=file.stored_bytes,
            seed=seed_of(file.key),
            sums=None,
            collect=True,
        )

    def add_write(self, write: Write, address: int) -> None:
        """Add a write of a whole file from `address`."""
        self.writes.append(write)
        self.fds.append(NOT_OPEN)
        self.add(offset=0, address=address, nbytes=write.stored_bytes, seed=seed_of(write.key), sums=None)

    def batch(self, on_done: Callable[[Batch], None], context: Any) -> Batch:
        """The batch of everything added, with the files as they are now."""
        batch = super().batch(on_done, context)
        batch.ops["fd"] = np.repeat(self.fds, np.diff([*self._first_op, len(self._ops)]))
        return batch

    def outcomes(self, batch: Batch) -> list[int]:
        """Per chunk: 0, or what went wrong first. What was read is compared with the file's name."""
        outcomes = super().outcomes(batch)
        for i, error in self.errors.items():
            outcomes[i] = error
        if self.reads:
            for i, (file, sums) in enumerate(zip(self.reads, self.sums(batch), strict=True)):
                if not outcomes[i] and digest_of(*file[:6], sums) != file.digest:
                    outcomes[i] = CHECKSUM
        return outcomes
