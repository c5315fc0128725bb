"""The encoded form is a format: its bytes are pinned here, as docs/FORMAT.md describes them."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import lz4.block
import numpy as np
import pytest

from kvtier.codec import blocks

if TYPE_CHECKING:
    import numpy.typing as npt

BLOCK = 256 << 10
FIVE_REPEATED = bytes.fromhex("1f05010059500505050505")  # lz4 of 114 bytes of 5: literal, match, literals
GOLDEN = [  # planes, encoded, payload
    (False, b"\x0b\0\0\0" + FIVE_REPEATED, b"\x05" * 114),
    (False, b"\x03\0\0\0abc", b"abc"),  # as long as the block: raw
    (False, b"", b""),
    (True, b"\x0b\0\0\0" + FIVE_REPEATED + b"\x72\0\0\0" + bytes(range(114)),
     b"".join(struct.pack("<H", (5 << 8 | i) >> 1 | (i & 1) << 15) for i in range(114))),
    (True, b"\x01\0\0\0\x7f" + b"\x02\0\0\0\x01!", b"\x80\xbf!"),  # -1.0 in bfloat16, and an odd byte
    (True, b"\0\0\0\0" + b"\x01\0\0\0!", b"!"),
]  # fmt: skip


def array(data: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


def repeated(value: int, count: int) -> bytes:
    """One lz4 block of `count` times `value`: a literal, one long match, five literals."""
    rest = count - 1 - 5 - 4 - 15
    return b"\x1f%c\1\0" % value + b"\xff" * (rest // 255) + b"%c\x50" % (rest % 255) + b"%c" % value * 5


@pytest.mark.parametrize("padding", [b"", bytes(4096), b"\xff" * 7])
@pytest.mark.parametrize("case", range(len(GOLDEN)))
def test_golden_bytes_are_decoded(case: int, padding: bytes) -> None:
    planes, encoded, payload = GOLDEN[case]
    out = np.full(len(payload), 0xEE, np.uint8)
    assert blocks.decode(array(encoded + padding), out, planes=planes)
    assert out.tobytes() == payload


INVALID = [  # planes, bytes, length of the payload
    (False, b"\x04\0\0\0\x30abc", 3),  # an lz4 block of "abc", which is longer than the block itself
    (False, b"\x02\0\0\0\x10a", 3),  # an lz4 block of "a"
    (False, b"\x03\0\0\0ab", 3),
    (False, b"\x03\0\0\0a", 3),
    (False, b"\x03\0\0", 3),
    (False, b"\0\0\0\0", 3),
    (False, b"\xff\xff\xff\xffabc", 3),
    (True, b"\x01\0\0\0\x7f" + b"\x02\0\0\0\x01", 3),
    (True, b"\x01\0\0\0\x7f", 3),
    (True, b"\x02\0\0\0\x7f\x7f" + b"\x02\0\0\0\x01!", 3),
    (True, b"\0\0\0\0", 1),
    (True, b"", 1),
]


@pytest.mark.parametrize("case", range(len(INVALID)))
def test_what_no_payload_encodes_to_is_refused(case: int) -> None:
    planes, encoded, nbytes = INVALID[case]
    assert not blocks.decode(array(encoded), np.zeros(nbytes, np.uint8), planes=planes)


def test_blocks_of_256_kib_follow_one_another() -> None:
    assert blocks.BLOCK_BYTES == BLOCK
    payload = b"\1" * BLOCK + b"\2" * BLOCK + b"\3" * 100
    encoded = b""
    for value, count in ((1, BLOCK), (2, BLOCK), (3, 100)):
        block = repeated(value, count)
        encoded += struct.pack("<I", len(block)) + block
    out = np.zeros(len(payload), np.uint8)
    assert blocks.decode(array(encoded), out, planes=False)
    assert out.tobytes() == payload


@pytest.mark.parametrize("planes", [False, True])
@pytest.mark.parametrize("nbytes", [1, 4095, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
def test_the_encoded_form_is_as_described(nbytes: int, planes: bool) -> None:
    """Read back with nothing but struct and the lz4 package."""
    draw = np.random.default_rng(nbytes)
    elements = draw.standard_normal(nbytes // 2 + 1).astype("<f4").view("<u4") >> 16  # bfloat16
    payload = elements.astype("<u2").view(np.uint8)[:nbytes]
    room = np.zeros(2 * nbytes + 100, np.uint8)
    end = blocks.encode(payload, room, planes=planes)
    assert end is not None
    assert not room[end:].any()

    at, plain = 0, b""
    for start in range(0, nbytes, BLOCK):
        size = min(BLOCK, nbytes - start)
        sections = []
        for expected in (size // 2, size - size // 2) if planes else (size,):
            (length,) = struct.unpack_from("<I", room, at)
            stored = room[at + 4 : at + 4 + length].tobytes()
            at += 4 + length
            assert length <= expected
            sections.append(
                stored if length == expected else lz4.block.decompress(stored, uncompressed_size=expected)
            )
        if planes:
            high, low = sections
            rotated = np.stack([array(low[: len(high)]), array(high)], axis=1).view("<u2")
            plain += (rotated // 2 + rotated % 2 * 32768).astype("<u2").tobytes()
            plain += low[len(high) :]
        else:
            plain += sections[0]
    assert at == end
    assert plain == payload.tobytes()


def test_of_bfloat16_only_the_exponents_are_compressed() -> None:
    elements = np.random.default_rng(0).standard_normal(BLOCK // 2).astype("<f4").view("<u4") >> 16
    payload = elements.astype("<u2").view(np.uint8)
    room = np.zeros(BLOCK + 8, np.uint8)
    end = blocks.encode(payload, room, planes=True)
    (high,) = struct.unpack_from("<I", room, 0)
    (low,) = struct.unpack_from("<I", room, 4 + high)
    assert high < 0.75 * BLOCK / 2
    assert low == BLOCK / 2
    assert end == 8 + high + low


def test_a_section_that_hardly_shrinks_is_stored_raw() -> None:
    noise = np.random.default_rng(0).integers(0, 256, BLOCK, np.uint8)
    noise[: BLOCK // 64] = 0  # saves 1/64
    room = np.zeros(BLOCK + 4, np.uint8)
    assert blocks.encode(noise, room, planes=False) == BLOCK + 4
    assert np.array_equal(room[4:], noise)
    noise[: BLOCK // 16] = 0
    end = blocks.encode(noise, room, planes=False)
    assert end is not None
    assert end < BLOCK


@pytest.mark.parametrize("planes", [False, True])
def test_encode_stops_where_there_is_no_room(planes: bool) -> None:
    payload = np.random.default_rng(0).integers(0, 4, 3 * BLOCK, np.uint8)
    room = np.zeros(len(payload), np.uint8)
    end = blocks.encode(payload, room, planes=planes)
    assert end is not None
    for short in (0, 1, 3, 4, 5, end // 2, end - 1):
        memory = np.full(end + 100, 0xEE, np.uint8)
        assert blocks.encode(payload, memory[:short], planes=planes) is None
        assert (memory[short:] == 0xEE).all()
    assert blocks.encode(payload, np.zeros(end, np.uint8), planes=planes) == end
