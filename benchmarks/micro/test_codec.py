"""Codecs on 2 MiB of bfloat16, which only `lz4-16bit` makes smaller, and on runs, which both do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvtier.codec import Codec, decode, encode

if TYPE_CHECKING:
    import numpy.typing as npt
    from pytest_benchmark.fixture import BenchmarkFixture

CODECS = pytest.mark.parametrize("codec", [Codec.LZ4, Codec.LZ4_16BIT], ids=lambda codec: codec.label)


@pytest.fixture(params=["bfloat16", "runs"])
def payload(request: pytest.FixtureRequest, bfloat16_chunk: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return bfloat16_chunk if request.param == "bfloat16" else np.repeat(bfloat16_chunk[::32], 32)


@CODECS
def test_encode_of_2_mib(benchmark: BenchmarkFixture, codec: Codec, payload: npt.NDArray[np.uint8]) -> None:
    room = np.zeros_like(payload)
    nbytes = benchmark(encode, codec, payload, room)
    back = np.zeros_like(payload)
    assert nbytes is None or (decode(codec, room[:nbytes], back) and np.array_equal(back, payload))


@CODECS
def test_decode_of_2_mib(benchmark: BenchmarkFixture, codec: Codec, payload: npt.NDArray[np.uint8]) -> None:
    room = np.zeros_like(payload)
    nbytes = encode(codec, payload, room)
    if nbytes is None:
        pytest.skip("stored raw")
    back = np.zeros_like(payload)
    assert benchmark(decode, codec, room[:nbytes], back)
    assert np.array_equal(back, payload)
