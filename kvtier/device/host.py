"""HostCopier: between a paged KV cache in host memory and chunks."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier import _native
from kvtier.device.paged import NO_BLOCK, checked_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from kvtier.buffers import Buffers
    from kvtier.device.paged import PagedKV


_SEGMENTS = 8192  # per native call: arrays that small are made in memory at hand


class HostCopier:
    """Gathers blocks into chunks and scatters them back, many to a native call that needs no GIL.

    A chunk is contiguous: every region of `paged` in turn (layer by layer, K before V), in each the blocks
    of its row of the block table in order. Both calls return when all is copied and keep nothing.
    """

    def __init__(self, paged: PagedKV) -> None:
        self._paged = paged

    def mark(self) -> object:
        """Nothing: host memory holds what was written to it."""
        return None

    def gather(self, block_table: npt.NDArray[Any], into: Buffers, after: object = None) -> None:
        """Copy the blocks of each row of `block_table` into the chunk of the same row.

        `block_table` is int32 or int64 of shape (chunks, blocks per chunk). `into` has a writable buffer
        of `paged.chunk_bytes(blocks per chunk)` bytes per row, none of which overlaps another or the paged
        memory. Raises InvalidRequest, before anything is copied, for ids or buffers that do not fit.
        """
        table = self._paged.checked_table(block_table, distinct=False)
        chunks = self._chunks(table, into, name="into", writable=True)
        if (core := _native.core) is not None:
            for paged, packed, lengths in self._segments(table, chunks, self._paged.checked_regions(None)):
                core.copy_many(paged, packed, lengths)
            return
        for ids, region, part in self._pieces(table, chunks, self._paged.checked_regions(None)):
            np.take(region, ids, axis=0, out=part, mode="clip")  # checked above; "raise" would copy twice

    def scatter(
        self,
        source: Buffers,
        block_table: npt.NDArray[Any],
        after: object = None,
        regions: range | None = None,
    ) -> None:
        """Copy each chunk of `source` into the blocks of the same row of `block_table`.

        The reverse of `gather`, with the same shapes. No block may be named twice; -1 leaves that part of
        the chunk out. With `regions`, of step 1, the others are left alone, and what the chunks hold of them
        is not looked at. Raises InvalidRequest, before anything is copied, for ids, buffers or regions that
        do not fit.
        """
        table = self._paged.checked_table(block_table, distinct=True)
        chunks = self._chunks(table, source, name="source", writable=False)
        wanted_regions = self._paged.checked_regions(regions)
        if (core := _native.core) is not None:
            for paged, packed, lengths in self._segments(table, chunks, wanted_regions):
                core.copy_many(packed, paged, lengths)
            return
        for ids, region, part in self._pieces(table, chunks, wanted_regions):
            wanted = ids != NO_BLOCK
            region[ids[wanted]] = part[wanted]

    def _chunks(
        self, table: npt.NDArray[np.int64], buffers: Buffers, *, name: str, writable: bool
    ) -> npt.NDArray[np.uint64]:
        """The addresses of the chunks."""
        needed = self._paged.chunk_bytes(table.shape[1])
        return np.array(checked_chunks(buffers, len(table), needed, name=name, writable=writable), np.uint64)

    def _segments(
        self, table: npt.NDArray[np.int64], chunks: npt.NDArray[np.uint64], regions: range
    ) -> Iterator[tuple[npt.NDArray[np.uint64], ...]]:
        """`PagedKV.segments` of some whole chunks at a time: addresses of all would take longer to make."""
        step = max(1, _SEGMENTS // max(1, len(regions) * table.shape[1]))
        for start in range(0, len(table), step):
            yield self._paged.segments(table[start : start + step], chunks[start : start + step], regions)

    def _pieces(
        self, table: npt.NDArray[np.int64], chunks: npt.NDArray[np.uint64], regions: range
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
        """Of every chunk and wanted region: the ids, the region's blocks, and their place in the chunk."""
        paged, per_chunk = self._paged, table.shape[1]
        part_bytes = per_chunk * paged.block_bytes
        for ids, chunk in zip(table, chunks.tolist(), strict=True):
            for r in regions:
                base = int(paged.bases[r])
                region = _blocks(base, paged.blocks, paged.block_bytes, paged.stride_bytes)
                part = _blocks(chunk + r * part_bytes, per_chunk, paged.block_bytes, paged.block_bytes)
                yield ids, region, part


def _blocks(address: int, count: int, nbytes: int, stride: int) -> npt.NDArray[np.uint8]:
    """Memory as an array of shape (count, nbytes)."""
    memory = memoryview((ctypes.c_uint8 * ((count - 1) * stride + nbytes)).from_address(address))
    return np.lib.stride_tricks.as_strided(np.frombuffer(memory, np.uint8), (count, nbytes), (stride, 1))
