"""Both ways to make byte planes write the same bytes, and join what they split."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import _native
from kvtier.codec import planes

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

WAYS = ["numpy", "portable", "avx2", "avx512"]
LENGTHS = [0, 1, 2, 3, 63, 64, 65, 127, 128, 129, 4095, 4096, 4097, 262_143, 262_144]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """NumPy, or one of the native core's vector paths."""
    if request.param == "numpy":
        monkeypatch.setattr(planes, "core", None)
        yield request.param
        return
    if _native.core is None:
        pytest.skip(_native.why_not)
    try:
        _native.core.set_checksum_path(request.param)
    except ValueError:
        pytest.skip(f"no {request.param} here")
    yield request.param
    _native.core.set_checksum_path("auto")


def split(block: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    high = np.empty(len(block) // 2, np.uint8)
    low = np.empty(len(block) - len(high), np.uint8)
    planes.split(block, high, low)
    return high, low


def random_bytes(nbytes: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)


@pytest.mark.usefixtures("way")
def test_bfloat16_parts_into_exponents_and_the_rest() -> None:
    # 1.0, -1.0, 1.0078125, 2**-126, infinity, and an odd byte: sign 1 bit, exponent 8, mantissa 7.
    block = np.frombuffer(np.array([0x3F80, 0xBF80, 0x3F81, 0x0080, 0x7F80], "<u2").tobytes() + b"\xa5", "u1")
    high, low = split(block)
    assert high.tolist() == [127, 127, 127, 1, 255]
    assert low.tolist() == [0, 1, 2, 0, 0, 0xA5]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("nbytes", LENGTHS)
def test_planes_hold_the_rotated_elements_and_join_again(nbytes: int) -> None:
    block = random_bytes(nbytes + 1)[1:]  # at an odd address
    high, low = split(block)
    for i in range(0, nbytes // 2, max(1, nbytes // 200)):
        element = int.from_bytes(block[2 * i : 2 * i + 2].tobytes(), "little")
        assert int(high[i]) << 8 | int(low[i]) == (element << 1 | element >> 15) & 0xFFFF
    back = np.zeros(nbytes, np.uint8)
    planes.join(high, low, back)
    assert np.array_equal(back, block)


@pytest.mark.skipif(_native.core is None, reason=_native.why_not)
@given(st.binary(max_size=400))
def test_native_and_numpy_planes_are_the_same(data: bytes) -> None:
    block = np.frombuffer(data, np.uint8)
    native = split(block)
    back = np.zeros_like(block)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(planes, "core", None)
        for one, other in zip(native, split(block), strict=True):
            assert np.array_equal(one, other)
        planes.join(*native, back)
    assert np.array_equal(back, block)
