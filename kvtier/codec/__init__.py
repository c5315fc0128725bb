"""Codecs: how a payload is made smaller on its way to disk, and exact again on its way back.

Whether one pays depends on the bytes. KV in bfloat16 does not get smaller with plain `lz4`; with
`lz4-16bit` it takes 0.84 of its size, but is encoded at half a GB/s only: lz4 finds a little in the
exponents, nothing in the rest. float16 gains nothing with either.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from kvtier.config import PAGE, page_up
from kvtier.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Codec(IntEnum):
    """The codec of a stored payload: one byte on disk. docs/FORMAT.md describes each."""

    RAW = 0  # "raw": the payload as it is
    LZ4 = 1  # "lz4": blocks of lz4
    LZ4_16BIT = 2  # "lz4-16bit": blocks of lz4 behind byte planes, for elements of 16 bits

    @property
    def label(self) -> str:
        """The name that callers use."""
        return self.name.lower().replace("_", "-")


def parse_codec(name: str) -> Codec:
    """The codec called `name`: "raw", "lz4" or "lz4-16bit".

    Raises InvalidRequest for any other name, and where the codec's package is not installed.
    """
    codec = next((codec for codec in Codec if codec.label == name), None)
    if codec is None:
        raise InvalidRequest(f"codec is {name!r}, needs one of {', '.join(codec.label for codec in Codec)}")
    if obstacle := codec_obstacle(codec):
        raise InvalidRequest(f"codec is {name!r}, but {obstacle}, or set codec to 'raw'")
    return codec


def codec_obstacle(codec: int) -> str:
    """Why payloads of the codec with this number cannot be encoded or decoded here; empty if they can."""
    if codec not in tuple(Codec):
        return f"this kvtier knows no codec {codec}: use the kvtier that wrote it"
    if codec != Codec.RAW:
        try:
            import kvtier.codec.lz4  # noqa: F401
        except ImportError as error:
            return f"{error}: pip install 'kvtier[lz4]'"
    return ""


def encode(codec: Codec, payload: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> int | None:
    """Write the encoded form of `payload` to the start of `out`; how many bytes it takes.

    None if it takes no fewer whole 4 KiB pages than the payload, or does not fit `out`: then store the
    payload raw; what was written to `out` is of no use. Payload and `out`: contiguous, shapes (n,) and
    (m,), apart from each other; more than n - 4096 bytes, rounded up to whole pages, are never needed.
    Thread-safe; the GIL is released while bytes are compressed or copied. Raises ImportError where
    `codec_obstacle` tells.
    """
    limit = page_up(len(payload)) - PAGE
    if codec == Codec.RAW or limit <= 0:
        return None
    from kvtier.codec import blocks

    return blocks.encode(payload, out[:limit], planes=codec == Codec.LZ4_16BIT)


def decode(codec: int, encoded: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> bool:
    """Fill `out`, shape (n,), with the n bytes of the payload that `encoded`, shape (m,), begins with.

    What follows the encoded form, such as the zeros up to a whole page, is ignored. False, and `out`
    holds anything, if these bytes are not the encoded form of exactly n bytes, whatever they are, and
    where `codec_obstacle` tells of something: ask it first. Both contiguous. Thread-safe; the GIL is
    released while bytes are decompressed or copied.
    """
    if codec_obstacle(codec):
        return False
    if codec == Codec.RAW:
        if len(encoded) < len(out):
            return False
        out[:] = encoded[: len(out)]
        return True
    from kvtier.codec import blocks

    return blocks.decode(encoded, out, planes=codec == Codec.LZ4_16BIT)
