"""Byte planes of one block, natively and with NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvtier import _native
from kvtier.codec import planes

if TYPE_CHECKING:
    import numpy.typing as npt
    from pytest_benchmark.fixture import BenchmarkFixture

BLOCK = 256 << 10


@pytest.fixture(params=["native", "numpy"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(planes, "core", None)
    elif _native.core is None:
        pytest.skip(_native.why_not)


@pytest.fixture
def block(bfloat16_chunk: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return bfloat16_chunk[:BLOCK]


def test_split_of_256_kib(benchmark: BenchmarkFixture, block: npt.NDArray[np.uint8]) -> None:
    high, low = np.zeros((2, BLOCK // 2), np.uint8)
    benchmark(planes.split, block, high, low)
    back = np.zeros(BLOCK, np.uint8)
    planes.join(high, low, back)
    assert np.array_equal(back, block)


def test_join_of_256_kib(benchmark: BenchmarkFixture, block: npt.NDArray[np.uint8]) -> None:
    high, low = np.zeros((2, BLOCK // 2), np.uint8)
    planes.split(block, high, low)
    back = np.zeros(BLOCK, np.uint8)
    benchmark(planes.join, high, low, back)
    assert np.array_equal(back, block)
