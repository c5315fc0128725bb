"""From chunks to aligned operations: pure arithmetic, no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.io.base import OP, Batch

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

MAX_OP_BYTES = 4 << 20
"""Larger requests gain nothing; smaller ones cost CPU and reach less depth per byte."""


class Plan:
    """Collects whole chunks into one batch; each chunk becomes operations of whole parts."""

    def __init__(self, *, fd: int, part_bytes: int, max_op_bytes: int = MAX_OP_BYTES) -> None:
        self._fd = fd
        self._part_bytes = part_bytes
        self._step = max(part_bytes, max_op_bytes // part_bytes * part_bytes)
        self._ops: list[tuple[int, int, int, int, int, int, int, int, int]] = []
        self._sums: list[npt.NDArray[np.uint64]] = []
        self._sum_count = 0
        self._first_op: list[int] = []
        self.nbytes = 0

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self._first_op)

    def add(
        self,
        *,
        offset: int,
        address: int,
        nbytes: int,
        seed: int,
        sums: npt.NDArray[np.uint64] | None,
        collect: bool = False,
    ) -> None:
        """Add a chunk of `nbytes`, whole pages: read and check it against `sums`, or write it (None).

        With `collect` it is read, and `sums` of the batch tells the checksums that it has.
        """
        is_write = sums is None and not collect
        parts = -(-nbytes // self._part_bytes)
        self._first_op.append(len(self._ops))
        for start in range(0, nbytes, self._step):
            part = start // self._part_bytes
            self._ops.append(
                (
                    offset + start,
                    address + start,
                    (seed + part) & (2**64 - 1),
                    min(self._step, nbytes - start),
                    self._part_bytes,
                    self._sum_count + part,
                    self._fd,
                    int(is_write),
                    int(collect),
                )
            )
        self._sums.append(np.zeros(parts, np.uint64) if sums is None else sums[:parts])
        self._sum_count += parts
        self.nbytes += nbytes

    def batch(self, on_done: Callable[[Batch], None], context: Any) -> Batch:
        """The batch of everything added."""
        return Batch(np.array(self._ops, OP), np.concatenate(self._sums), on_done, context)

    def outcomes(self, batch: Batch) -> list[int]:
        """Per chunk: 0, or the first result of its operations that is not."""
        failed = np.flatnonzero(batch.results)
        outcomes = [0] * len(self)
        if failed.size:
            chunks = np.searchsorted(np.array(self._first_op), failed, side="right") - 1
            for chunk, op in zip(chunks[::-1].tolist(), failed[::-1].tolist(), strict=True):
                outcomes[chunk] = int(batch.results[op])
        return outcomes

    def sums(self, batch: Batch) -> list[npt.NDArray[np.uint64]]:
        """Per chunk: the checksums of its parts, as the engine left them."""
        ends = np.cumsum([len(sums) for sums in self._sums])
        return np.split(batch.sums, ends[:-1])
