"""The encoded form: a payload's blocks in order, each as one section, or as two byte planes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtier.codec.lz4 import compress, decompress
from kvtier.codec.planes import join, split

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

BLOCK_BYTES = 256 << 10  # its planes, and lz4's own buffers, stay in the processor's cache
_LENGTH_BYTES = 4
_LEAST_SAVING = 32  # a section is stored raw unless lz4 takes off this part: less does not pay decoding


def encode(payload: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8], *, planes: bool) -> int | None:
    """Write all sections to `out`; their bytes, or None if `out` is too short for them."""
    end = 0
    for section in _planes(payload) if planes else _blocks(payload):
        packed = compress(section)
        pays = len(packed) <= len(section) - max(1, len(section) // _LEAST_SAVING)
        stored = np.frombuffer(packed, np.uint8) if pays else section
        start = end + _LENGTH_BYTES
        end = start + len(stored)
        if end > len(out):
            return None
        out[start - _LENGTH_BYTES : start] = np.frombuffer(len(stored).to_bytes(4, "little"), np.uint8)
        out[start:end] = stored
    return end


def decode(encoded: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8], *, planes: bool) -> bool:
    """Fill `out` from the sections that `encoded` begins with; False if they do not fit it."""
    sections = _Sections(encoded)
    for block in _blocks(out):
        if planes:
            high = sections.take(len(block) // 2)
            low = sections.take(len(block) - len(block) // 2)
            if high is None or low is None:
                return False
            join(high, low, block)
        else:
            plain = sections.take(len(block))
            if plain is None:
                return False
            block[:] = plain
    return True


class _Sections:
    """The sections of an encoded form, one after the other."""

    def __init__(self, encoded: npt.NDArray[np.uint8]) -> None:
        self._rest = encoded

    def take(self, nbytes: int) -> npt.NDArray[np.uint8] | None:
        """The next section's `nbytes` bytes, a view or a copy; None if there is no such section."""
        length = int.from_bytes(self._rest[:_LENGTH_BYTES].tobytes(), "little")
        stored = self._rest[_LENGTH_BYTES : _LENGTH_BYTES + length]
        if len(stored) < length or length > nbytes:
            return None
        self._rest = self._rest[_LENGTH_BYTES + length :]
        if length == nbytes:
            return stored
        plain = decompress(stored, nbytes)
        return None if plain is None else np.frombuffer(plain, np.uint8)


def _blocks(payload: npt.NDArray[np.uint8]) -> Iterator[npt.NDArray[np.uint8]]:
    for start in range(0, len(payload), BLOCK_BYTES):
        yield payload[start : start + BLOCK_BYTES]


def _planes(payload: npt.NDArray[np.uint8]) -> Iterator[npt.NDArray[np.uint8]]:
    """The two planes of every block, in memory that the next block's planes take over."""
    scratch = np.empty(min(BLOCK_BYTES, len(payload)), np.uint8)
    for block in _blocks(payload):
        high, low = scratch[: len(block) // 2], scratch[len(block) // 2 : len(block)]
        split(block, high, low)
        yield high
        yield low
