"""The contract of an I/O engine: whole batches of aligned reads and writes, checked part by part."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable

ALIGNMENT = 4096
"""Offsets, lengths and addresses of every operation are multiples of this many bytes."""

OP = np.dtype(
    [
        ("offset", "<u8"),  # byte offset in the file
        ("address", "<u8"),  # host memory; the engine may touch it until the batch is done
        ("seed", "<u8"),  # checksum seed of the first part; part j uses seed + j (mod 2**64)
        ("length", "<u4"),  # bytes, at least one part unless it is the chunk's tail
        ("part_bytes", "<u4"),  # bytes per checksummed part, the last may be shorter; 0 for none
        ("sums", "<u4"),  # index of the first part's checksum in `Batch.sums`
        ("fd", "<i4"),  # open file descriptor; stays open until the batch is done
        ("write", "<u4"),  # 0 = read, 1 = write
        ("collect", "<u4"),  # 1 = a read stores its parts' checksums instead of comparing them
    ]
)
"""One operation, 48 bytes, shared with the native core.

`part_bytes` of 0 makes it unchecked: no checksum is computed, stored or compared. That is for measuring
what a device and an engine do alone. A store cannot come by it: `kvtier.io.plan.Plan` makes all of its
operations, divides by the part size, and gets none below 64 KiB (`StoreConfig.part_bytes`).
"""

# Results of one operation: 0, a positive errno, or one of these.
SHORT = -1
CHECKSUM = -2
GONE = -3
"""Not of an engine: the file that a chunk should be in is not there."""

_ids = itertools.count(1)


class Batch:
    """Operations that start together and report once.

    A read compares every part's xxh3_64 with `sums` (CHECKSUM on a mismatch), or stores it there if it
    is to `collect`: the submitter then compares. A write stores the computed xxh3_64 into `sums` before
    the data goes to the device; an unchecked operation leaves them alone. `results` holds one int32 per
    operation once `on_done` is called.
    """

    __slots__ = ("context", "id", "on_done", "ops", "results", "sums")

    def __init__(
        self,
        ops: npt.NDArray[Any],
        sums: npt.NDArray[np.uint64],
        on_done: Callable[[Batch], None],
        context: Any = None,
    ) -> None:
        self.id = next(_ids)
        self.ops = ops
        self.sums = sums
        self.on_done = on_done
        self.context = context  # the submitter's own; also keeps its memory alive
        self.results: npt.NDArray[np.int32] = np.zeros(len(ops), np.int32)


class IOEngine(ABC):
    """Runs batches. Thread-safe."""

    name: str
    """As in the setting `engine`."""

    @abstractmethod
    def submit(self, batch: Batch) -> None:
        """Start every operation of `batch` and return at once.

        `batch.on_done(batch)` is called exactly once, on a thread of the engine, after the last
        operation has left the kernel; it must not block. No error of a device raises here.
        """

    def register(self, address: int, nbytes: int) -> bool:
        """Offer a long-lived, populated memory range for registered I/O; True if it was taken.

        The range must stay mapped until `close()` has returned True.
        """
        return False

    @abstractmethod
    def close(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for running batches, then stop. Idempotent.

        Returns False if the kernel still owns memory of a running operation: then that memory must
        never be unmapped or reused.
        """
