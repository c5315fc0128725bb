"""Which of the engine's blocks make which chunk: pure arithmetic over block tables, and its checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.device import NO_BLOCK
from kvtier.errors import InvalidRequest

BlockTable = Sequence[int] | npt.NDArray[np.integer[Any]]
"""`table[i]` is the engine's block of the tokens from `i * block_tokens` on."""


@dataclass(frozen=True, slots=True)
class BlockMap:
    """Blocks of `block_tokens` tokens, `blocks` of them; chunks of `chunk_tokens`.

    Raises InvalidRequest at construction unless a chunk is whole blocks.
    """

    block_tokens: int
    chunk_tokens: int
    blocks: int

    def __post_init__(self) -> None:
        chunk = self.chunk_tokens
        if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
            raise InvalidRequest(f"chunk_tokens is {chunk!r}, needs a whole number of at least 1")
        if chunk % self.block_tokens:
            raise InvalidRequest(
                f"chunk_tokens is {chunk}, needs a multiple of the {self.block_tokens} tokens of a block"
            )

    @property
    def per_chunk(self) -> int:
        """Blocks per chunk."""
        return self.chunk_tokens // self.block_tokens

    def check_tokens(self, name: str, tokens: int) -> None:
        """Raise InvalidRequest unless `tokens` are whole blocks."""
        if isinstance(tokens, bool) or not isinstance(tokens, int | np.integer) or tokens < 0:
            raise InvalidRequest(f"{name} is {tokens!r}, needs a whole number of tokens")
        if tokens % self.block_tokens:
            raise InvalidRequest(
                f"{name} is {tokens}, needs whole blocks of {self.block_tokens} tokens: round it down"
            )

    def check_range(self, start: int, end: int) -> None:
        """Raise InvalidRequest unless the range is whole blocks."""
        self.check_tokens("start", start)
        self.check_tokens("end", end)
        if start > end:
            raise InvalidRequest(f"start is {start}, behind end, which is {end}")

    def to_fill(
        self, block_table: BlockTable, start: int, end: int, known: int
    ) -> tuple[range, npt.NDArray[np.int64]]:
        """The chunks that tokens `start` to `end` lie in, and their blocks, shape (chunks, per_chunk).

        What of the outer chunks is not in the range is NO_BLOCK. Raises InvalidRequest for a wrong table,
        or a range beyond the `known` chunks, those that have keys.
        """
        self.check_range(start, end)
        chunks = range(start // self.chunk_tokens, -(-end // self.chunk_tokens)) if start < end else range(0)
        if chunks.stop > known:
            raise InvalidRequest(
                f"end is {end}, but the request has full chunks up to token {known * self.chunk_tokens}: "
                "load no more than match said"
            )
        table = np.full(chunks.stop * self.per_chunk, NO_BLOCK, np.int64)
        ids = self._ids(block_table, start, end)
        if len(np.unique(ids)) < len(ids):
            raise InvalidRequest("block_table names a block twice: each takes the KV of its own tokens only")
        if chunks:
            table[start // self.block_tokens : end // self.block_tokens] = ids
        return chunks, table[chunks.start * self.per_chunk :].reshape(len(chunks), self.per_chunk)

    def to_save(
        self, block_table: BlockTable, start: int, end: int, known: int
    ) -> tuple[range, npt.NDArray[np.int64]]:
        """The full chunks that end behind `start` and not behind `end`, and their blocks, as `to_fill`.

        Of `known` chunks, those that have keys.
        """
        self.check_range(start, end)
        first, stop = start // self.chunk_tokens, min(end // self.chunk_tokens, known)
        chunks = range(first, stop) if first < stop else range(0)
        ids = self._ids(block_table, chunks.start * self.chunk_tokens, chunks.stop * self.chunk_tokens)
        return chunks, ids.reshape(len(chunks), self.per_chunk)

    def _ids(self, block_table: BlockTable, start: int, end: int) -> npt.NDArray[np.int64]:
        table = np.asarray(block_table)
        if table.ndim != 1 or (table.size and not np.issubdtype(table.dtype, np.integer)):
            raise InvalidRequest(
                f"block_table has dtype {table.dtype} and shape {table.shape}, needs the ids of the "
                "request's blocks, one dimension"
            )
        if len(table) * self.block_tokens < end:
            raise InvalidRequest(
                f"block_table has {len(table)} blocks of {self.block_tokens} tokens, needs all up to "
                f"token {end}"
            )
        ids = table[start // self.block_tokens : end // self.block_tokens].astype(np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.blocks:
            wrong = ids[(ids < 0) | (ids >= self.blocks)][0]
            raise InvalidRequest(f"block_table names block {wrong}, needs ids from 0 to {self.blocks - 1}")
        return ids
