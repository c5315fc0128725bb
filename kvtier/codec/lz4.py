"""The one importer of the lz4 package: single blocks of its block format.

The package compresses and decompresses without the GIL, but into memory of its own, from which it
makes the bytes that it returns: a copy of at most one block, in cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import lz4.block

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def compress(plain: npt.NDArray[np.uint8]) -> bytes:
    """`plain` as one block, without its length; may be longer than `plain`."""
    packed: bytes = lz4.block.compress(plain, store_size=False)
    return packed


def decompress(packed: npt.NDArray[np.uint8], nbytes: int) -> bytes | None:
    """The `nbytes` bytes that `packed` is one block of; None if it is not."""
    try:
        plain: bytes = lz4.block.decompress(packed, uncompressed_size=nbytes)
    except lz4.block.LZ4BlockError:
        return None
    return plain if len(plain) == nbytes else None
