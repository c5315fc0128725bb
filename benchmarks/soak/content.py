"""Numbered chunks: the key, the size and the bytes of each follow from its number."""

from __future__ import annotations

import numpy as np

import kvtier

KIB, MIB = 1 << 10, 1 << 20
LARGEST = 256 * KIB
_SIZES = [4096, 64 * KIB, 5000, LARGEST, 100 * KIB, 1, 192 * KIB, 16 * KIB + 8]


def key_of(number: int) -> kvtier.ChunkKey:
    return kvtier.ChunkKey(number.to_bytes(32, "big"))


def size_of(number: int) -> int:
    return _SIZES[number % len(_SIZES)]


def content(number: int) -> bytes:
    """Every third can be encoded, the others are random."""
    rng = np.random.Generator(np.random.SFC64(number))
    nbytes = size_of(number)
    if number % 3:
        return rng.bytes(nbytes)
    return (rng.bytes(128) * (nbytes // 128 + 1))[:nbytes]
