"""Numbered chunks: the key, the size and the bytes of each follow from its number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import kvtier
from kvtier.config import KIB, PAGE

LARGEST = 256 * KIB
"""Bytes of the largest chunk at scale 1."""
_SIZES = (4096, 64 * KIB, 5000, LARGEST, 100 * KIB, 1, 192 * KIB, 16 * KIB + 8)


def key_of(number: int) -> kvtier.ChunkKey:
    """The key of a number."""
    return kvtier.ChunkKey(number.to_bytes(32, "big"))


@dataclass(frozen=True, slots=True)
class Contents:
    """Chunks of sizes all over, up to `scale` times LARGEST bytes."""

    scale: int = 1
    """What the sizes of whole pages are multiplied by; the odd ones stay."""

    def size_of(self, number: int) -> int:
        """Bytes of a chunk."""
        size = _SIZES[number % len(_SIZES)]
        return size if size % PAGE else size * self.scale

    @property
    def mean(self) -> int:
        """Bytes of a chunk, on average."""
        return sum(map(self.size_of, range(len(_SIZES)))) // len(_SIZES)

    def content(self, number: int) -> bytes:
        """Its bytes: every third can be encoded, the others are random."""
        rng = np.random.Generator(np.random.SFC64(number))
        nbytes = self.size_of(number)
        if number % 3:
            return rng.bytes(nbytes)
        return (rng.bytes(128) * (nbytes // 128 + 1))[:nbytes]
