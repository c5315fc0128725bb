"""Byte planes of 16-bit elements: like bytes come to lie together, which is what lz4 needs.

Each little-endian element is rotated left by one bit first. The sign, which is noise, then leaves
the upper byte, and bfloat16's whole exponent takes it: the upper plane of real KV shrinks to 0.69
instead of 0.70 of its size. The lower plane, mantissa and sign, is noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtier._native import core

if TYPE_CHECKING:
    import numpy.typing as npt


def split(block: npt.NDArray[np.uint8], high: npt.NDArray[np.uint8], low: npt.NDArray[np.uint8]) -> None:
    """Write the planes of `block`, shape (n,), to `high`, (n // 2,), and `low`, (n - n // 2,).

    An odd last byte goes to the end of `low` as it is. All contiguous; no two overlap.
    """
    if core is not None:
        core.split_planes16(_address(block), len(block), _address(high), _address(low))
        return
    pairs = len(high)
    elements = block[: 2 * pairs].view("<u2")
    rotated = (elements << 1) | (elements >> 15)
    high[:] = rotated >> 8
    low[:pairs] = rotated & 0xFF
    low[pairs:] = block[2 * pairs :]


def join(high: npt.NDArray[np.uint8], low: npt.NDArray[np.uint8], block: npt.NDArray[np.uint8]) -> None:
    """The inverse of `split`: fill `block` from its planes, of the same shapes."""
    if core is not None:
        core.join_planes16(_address(high), _address(low), len(block), _address(block))
        return
    pairs = len(high)
    rotated = (high.astype("<u2") << 8) | low[:pairs]
    block[: 2 * pairs] = ((rotated >> 1) | (rotated << 15)).astype("<u2", copy=False).view(np.uint8)
    block[2 * pairs :] = low[pairs:]


def _address(array: npt.NDArray[np.uint8]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
