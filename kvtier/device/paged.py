"""A paged KV cache as addresses, and which pieces of it make a chunk: pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvtier.buffers import regions
from kvtier.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.buffers import Buffers

NO_BLOCK = -1
"""In a block table: this part of the chunk goes nowhere."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedKV:
    """Host memory that holds the KV of every layer and plane in blocks (vLLM's 16-token pages).

    Block `b` of region `r` is the `block_bytes` bytes from address `bases[r] + b * stride_bytes` on.
    There is one region per layer and plane (K, V), in the order of a chunk's bytes: layer by layer.
    Whoever made it keeps the memory alive; `owner` may refer to it for that.
    """

    bases: npt.NDArray[np.uint64]
    """Address of block 0 of every region, shape (regions,)."""
    blocks: int
    """Blocks per region."""
    block_bytes: int
    """Bytes of one block of one region, without gaps."""
    stride_bytes: int
    """Bytes from one block of a region to the next, at least `block_bytes`."""
    owner: object = None

    def __post_init__(self) -> None:
        if self.bases.dtype != np.uint64 or self.bases.ndim != 1 or not len(self.bases):
            raise InvalidRequest("bases needs an address of dtype uint64 per region, at least one")
        if self.blocks < 1 or self.block_bytes < 1 or self.stride_bytes < self.block_bytes:
            raise InvalidRequest(
                f"a region of {_described(self.blocks, self.block_bytes, self.stride_bytes)} needs at "
                "least one block of at least one byte, and no overlap"
            )

    @classmethod
    def of(cls, tensors: Sequence[Any]) -> PagedKV:
        """Describe one array or CPU tensor of shape (blocks, ...) per layer and plane; it keeps them alive.

        A tensor with both planes in front, (2, blocks, ...), is given as its two halves. Each block must
        be contiguous; strides between blocks are free, but equal in all tensors, as are blocks and bytes.
        Raises InvalidRequest, naming the tensor, for anything else.
        """
        if not len(tensors):
            raise InvalidRequest("tensors is empty, needs an array or CPU tensor per layer and plane")
        found = [_region(tensor, f"tensors[{i}]") for i, tensor in enumerate(tensors)]
        _, *expected = found[0]
        for i, (_, *shape) in enumerate(found):
            if shape != expected:
                raise InvalidRequest(
                    f"tensors[{i}] has {_described(*shape)}; tensors[0] has {_described(*expected)}: all "
                    "need the same"
                )
        bases = np.array([base for base, *_ in found], np.uint64)
        blocks, block_bytes, stride_bytes = expected
        return cls(bases, blocks, block_bytes, stride_bytes, tuple(tensors))

    def chunk_bytes(self, blocks: int) -> int:
        """Bytes of a chunk of that many blocks."""
        return len(self.bases) * blocks * self.block_bytes

    def checked_table(self, block_table: npt.NDArray[Any], *, distinct: bool) -> npt.NDArray[np.int64]:
        """The block table as int64, shape (chunks, blocks per chunk).

        Raises InvalidRequest unless it is of int32 or int64 and names existing blocks; if `distinct`,
        none of them twice, or NO_BLOCK.
        """
        return checked_table(block_table, self.blocks, distinct=distinct)

    def checked_regions(self, regions: range | None) -> range:
        """The regions that are wanted, all for None. Raises InvalidRequest for others than there are."""
        return checked_regions(regions, len(self.bases))

    def segments(
        self, table: npt.NDArray[np.int64], chunks: npt.NDArray[np.uint64], regions: range | None = None
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Addresses in the paged memory, addresses in the chunks, and lengths, in the order of the chunks.

        `chunks` has the address of every chunk. Within one, region by region, its blocks lie in the order
        of their row of the table. Where that has NO_BLOCK there is no segment, nor for regions other than
        `regions`, if these are given.
        """
        regions = self.checked_regions(regions)
        per_chunk = table.shape[1]
        starts = table.astype(np.uint64) * np.uint64(self.stride_bytes)
        paged = self.bases[None, regions.start : regions.stop, None] + starts[:, None, :]
        blocks = np.arange(regions.start * per_chunk, regions.stop * per_chunk, dtype=np.uint64)
        within = blocks * np.uint64(self.block_bytes)
        packed = chunks[:, None] + within[None, :]
        if table.size and table.min() == NO_BLOCK:
            wanted = np.repeat(table[:, None, :] != NO_BLOCK, len(regions), axis=1)
            paged, packed = paged[wanted], packed.reshape(paged.shape)[wanted]
        lengths = np.full(paged.size, self.block_bytes, np.uint64)
        return paged.reshape(-1), packed.reshape(-1), lengths


def checked_table(block_table: npt.NDArray[Any], blocks: int, *, distinct: bool) -> npt.NDArray[np.int64]:
    """See `PagedKV.checked_table`, of so many blocks."""
    table = np.asarray(block_table)
    if table.dtype not in (np.int32, np.int64) or table.ndim != 2 or not table.shape[1]:
        raise InvalidRequest(
            f"block_table has dtype {table.dtype} and shape {table.shape}, needs int32 or int64 ids of "
            "shape (chunks, blocks per chunk)"
        )
    least = NO_BLOCK if distinct else 0
    if table.size and not least <= table.min() <= table.max() < blocks:
        wrong = table[(table < least) | (table >= blocks)][0]
        raise InvalidRequest(f"block_table names block {wrong}, needs ids from 0 to {blocks - 1}")
    ordered = np.sort(table, axis=None) if distinct else table[:0, 0]
    if ((ordered[1:] == ordered[:-1]) & (ordered[1:] != NO_BLOCK)).any():
        raise InvalidRequest("block_table names a block twice: each can take the bytes of one chunk only")
    return table.astype(np.int64, copy=False)


def checked_regions(wanted: range | None, count: int) -> range:
    """See `PagedKV.checked_regions`, of so many regions."""
    if wanted is None:
        return range(count)
    if wanted.step != 1 or not 0 <= wanted.start <= wanted.stop <= count:
        raise InvalidRequest(f"regions is {wanted}, needs a range within the {count} regions, of step 1")
    return wanted


def checked_chunks(buffers: Buffers, rows: int, chunk_bytes: int, *, name: str, writable: bool) -> list[int]:
    """The addresses of chunks of so many bytes, one for each row of a table.

    Raises InvalidRequest for buffers of another number or length.
    """
    addresses, lengths = regions(buffers, name=name, writable=writable)
    if len(addresses) != rows:
        raise InvalidRequest(f"{name} has {len(addresses)} buffers for {rows} rows of block_table")
    for i, nbytes in enumerate(lengths):
        if nbytes != chunk_bytes:
            raise InvalidRequest(f"{name}[{i}] has {nbytes} bytes, needs the {chunk_bytes} of its blocks")
    return addresses


def _region(tensor: Any, where: str) -> tuple[int, int, int, int]:
    """Address of the first block, blocks, bytes per block, and bytes from one to the next."""
    if not getattr(tensor, "ndim", 0) or not len(tensor):
        raise InvalidRequest(f"{where} needs a shape of (blocks, ...), with at least one block")
    (first,), (block_bytes,) = regions([tensor[0, ...]], name=where, writable=True)
    is_torch = hasattr(tensor, "data_ptr")
    stride = tensor.stride(0) * tensor.element_size() if is_torch else tensor.strides[0]
    return first, len(tensor), block_bytes, block_bytes if len(tensor) == 1 else stride


def _described(blocks: int, block_bytes: int, stride_bytes: int) -> str:
    return f"{blocks} blocks of {block_bytes} bytes, {stride_bytes} apart"
