"""What the store relies on: exact round trips, honest None, and no surprise from any bytes on disk."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.codec import Codec, codec_obstacle, decode, encode, parse_codec
from kvtier.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy.typing as npt

PAGE = 4096
BLOCK = 256 << 10
COMPRESSING = [Codec.LZ4, Codec.LZ4_16BIT]
GUARD = 64
LENGTHS = [PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1, 65537, BLOCK - 1, BLOCK, BLOCK + 1, (3 << 20) + 5]


def runs(nbytes: int) -> npt.NDArray[np.uint8]:
    """Runs of equal bytes, which every codec makes smaller."""
    return np.repeat(np.random.default_rng(nbytes).integers(0, 256, nbytes // 24 + 1, np.uint8), 24)[:nbytes]


def noise(nbytes: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)


def encoded_form(codec: Codec, payload: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The encoded form, zero-padded to whole pages as it lies on disk."""
    room = np.zeros(len(payload), np.uint8)
    nbytes = encode(codec, payload, room)
    assert nbytes is not None
    padded = np.zeros(-(-nbytes // PAGE) * PAGE, np.uint8)
    padded[:nbytes] = room[:nbytes]
    return padded


def decoded(codec: int, encoded: npt.NDArray[np.uint8], nbytes: int) -> npt.NDArray[np.uint8] | None:
    """What decode gives for a payload of `nbytes`, having checked that nothing else was written."""
    memory = np.full(nbytes + 2 * GUARD, 0xEE, np.uint8)
    before = encoded.copy()
    ok = decode(codec, encoded, memory[GUARD : GUARD + nbytes])
    assert (memory[:GUARD] == 0xEE).all()
    assert (memory[GUARD + nbytes :] == 0xEE).all()
    assert np.array_equal(encoded, before)
    return memory[GUARD : GUARD + nbytes] if ok else None


def test_numbers_and_names_are_fixed() -> None:
    assert {codec.label: int(codec) for codec in Codec} == {"raw": 0, "lz4": 1, "lz4-16bit": 2}
    for codec in Codec:
        assert parse_codec(codec.label) is codec
        assert codec_obstacle(codec) == ""


@pytest.mark.parametrize("name", ["zstd", "LZ4", "", None, 1])
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"codec is .*, needs one of raw, lz4, lz4-16bit"):
        parse_codec(name)


@pytest.mark.parametrize("codec", COMPRESSING)
@pytest.mark.parametrize("nbytes", LENGTHS)
def test_what_was_encoded_is_decoded(codec: Codec, nbytes: int) -> None:
    payload = runs(nbytes)
    encoded = encoded_form(codec, payload)
    assert len(encoded) < len(payload)
    assert np.array_equal(decoded(codec, encoded, nbytes), payload)


@pytest.mark.parametrize("codec", COMPRESSING)
def test_read_only_memory_at_odd_addresses_will_do(codec: Codec) -> None:
    payload = runs(BLOCK + 78)[1:]
    payload.flags.writeable = False
    encoded = np.concatenate([[np.uint8(0)], encoded_form(codec, payload)])[1:]
    encoded.flags.writeable = False
    assert np.array_equal(decoded(codec, encoded, len(payload)), payload)


@given(
    codec=st.sampled_from(COMPRESSING),
    pieces=st.lists(st.tuples(st.binary(min_size=1, max_size=9), st.integers(1, 4000)), max_size=5),
)
def test_any_payload_comes_back_or_is_left_raw(codec: Codec, pieces: list[tuple[bytes, int]]) -> None:
    payload = np.frombuffer(b"".join(piece * count for piece, count in pieces) or b"x", np.uint8)
    memory = np.full(len(payload) + GUARD, 0xEE, np.uint8)
    nbytes = encode(codec, payload, memory[: len(payload)])
    assert (memory[len(payload) :] == 0xEE).all()
    if nbytes is not None:
        assert -(-nbytes // PAGE) < -(-len(payload) // PAGE)
        assert np.array_equal(decoded(codec, memory[:nbytes], len(payload)), payload)


@pytest.mark.parametrize("codec", COMPRESSING)
@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE])
def test_what_fits_one_page_stays_raw(codec: Codec, nbytes: int) -> None:
    assert encode(codec, np.zeros(nbytes, np.uint8), np.zeros(2 * PAGE, np.uint8)) is None


@pytest.mark.parametrize("codec", COMPRESSING)
@pytest.mark.parametrize("nbytes", LENGTHS)
def test_what_does_not_save_a_page_stays_raw(codec: Codec, nbytes: int) -> None:
    assert encode(codec, noise(nbytes), np.zeros(2 * nbytes, np.uint8)) is None
    assert encode(Codec.RAW, runs(nbytes), np.zeros(2 * nbytes, np.uint8)) is None


@pytest.mark.parametrize("codec", COMPRESSING)
def test_a_page_less_than_the_payload_is_room_enough(codec: Codec) -> None:
    """From incompressible to just compressible: the same answer as with all the room there is."""
    nbytes = 8 * PAGE
    answers = set()
    for zeros in range(0, nbytes, PAGE // 2):
        payload = noise(nbytes)
        payload[:zeros] = 0
        memory = np.full(2 * nbytes, 0xEE, np.uint8)
        found = encode(codec, payload, memory[: nbytes - PAGE])
        assert (memory[nbytes - PAGE :] == 0xEE).all()
        assert found == encode(codec, payload, memory)
        answers.add(found is None)
    assert answers == {True, False}


def test_raw_is_the_payload_itself() -> None:
    payload = noise(5000)
    padded = np.concatenate([payload, np.zeros(2 * PAGE - 5000, np.uint8)])
    assert np.array_equal(decoded(Codec.RAW, padded, 5000), payload)
    assert decoded(Codec.RAW, payload[:4999], 5000) is None


@pytest.mark.parametrize("codec", [3, 255])
def test_an_unknown_codec_decodes_nothing(codec: int) -> None:
    assert decoded(codec, noise(PAGE), PAGE) is None
    assert f"no codec {codec}" in codec_obstacle(codec)


@given(codec=st.sampled_from(COMPRESSING), data=st.binary(max_size=300), nbytes=st.integers(1, 600))
def test_random_bytes_do_no_harm(codec: Codec, data: bytes, nbytes: int) -> None:
    decoded(codec, np.frombuffer(data, np.uint8), nbytes)


@pytest.mark.parametrize("codec", COMPRESSING)
def test_long_random_bytes_do_not_decode(codec: Codec) -> None:
    assert decoded(codec, noise(BLOCK), 2 * BLOCK) is None
    assert decoded(codec, np.zeros(BLOCK, np.uint8), BLOCK) is None
    assert decoded(codec, np.full(BLOCK, 0xFF, np.uint8), BLOCK) is None


@given(codec=st.sampled_from(COMPRESSING), data=st.data())
def test_damaged_forms_do_no_harm(codec: Codec, data: st.DataObject) -> None:
    payload = runs(BLOCK + 999)
    encoded = encoded_form(codec, payload)
    for place in data.draw(st.lists(st.integers(0, len(encoded) - 1), min_size=1, max_size=3)):
        encoded[place] ^= 1 << data.draw(st.integers(0, 7))
    decoded(codec, encoded, len(payload))


@pytest.mark.parametrize("codec", COMPRESSING)
def test_truncated_forms_do_not_decode(codec: Codec) -> None:
    payload = runs(BLOCK + 999)
    encoded = encoded_form(codec, payload)
    room = np.zeros(len(payload), np.uint8)
    end = encode(codec, payload, room)
    assert end is not None
    assert decoded(codec, encoded[:end], len(payload)) is not None
    for cut in [0, 1, 3, 4, 5, 1000, *range(end // 2, end, end // 16), end - 1]:
        assert decoded(codec, encoded[:cut], len(payload)) is None


@pytest.mark.parametrize("codec", COMPRESSING)
@pytest.mark.parametrize("change", [-BLOCK, -1000, -2, 2, 1000, BLOCK])
def test_another_length_does_not_decode(codec: Codec, change: int) -> None:
    payload = runs(2 * BLOCK + 5000)
    assert decoded(codec, encoded_form(codec, payload), len(payload) + change) is None


WITHOUT_LZ4 = """
import sys
sys.modules["lz4"] = None  # importing it fails, as where it is not installed
import numpy as np
from kvtier.codec import Codec, codec_obstacle, decode, parse_codec
from kvtier.errors import InvalidRequest
assert parse_codec("raw") is Codec.RAW and codec_obstacle(Codec.RAW) == ""
assert decode(Codec.RAW, np.ones(9, np.uint8), np.zeros(9, np.uint8))
assert not decode(Codec.LZ4, np.array([1, 0, 0, 0, 7], np.uint8), np.zeros(1, np.uint8))
try:
    parse_codec("lz4-16bit")
except InvalidRequest as error:
    print(error)
"""


def test_without_the_package_only_raw_is_left() -> None:
    command = [sys.executable, "-P", "-c", WITHOUT_LZ4]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout.startswith("codec is 'lz4-16bit', but ")
    assert ended.stdout.endswith("pip install 'kvtier[lz4]', or set codec to 'raw'\n")


@given(
    codec=st.sampled_from(COMPRESSING),
    sections=st.lists(
        st.tuples(
            st.sampled_from([0, 1, 2, 300, BLOCK - 1, BLOCK, BLOCK + 1, 2**31, 2**32 - 1])
            | st.integers(0, 2**32 - 1),
            st.binary(max_size=40),
        ),
        max_size=6,
    ),
    nbytes=st.sampled_from([1, 2, 3, 300, 301, BLOCK, BLOCK + 1]),
)
def test_sections_that_claim_any_length_do_no_harm(
    codec: Codec, sections: list[tuple[int, bytes]], nbytes: int
) -> None:
    data = b"".join(length.to_bytes(4, "little") + content for length, content in sections)
    decoded(codec, np.frombuffer(data, np.uint8), nbytes)
