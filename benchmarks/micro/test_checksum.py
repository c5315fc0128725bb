"""The checksum of one part: in the native core as every read does it, and by the xxhash package."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import xxhash

from kvtier import _native

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

PART = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
SEED = 7


@pytest.mark.skipif(_native.core is None, reason=_native.why_not)
def test_checksum_of_1_mib_native(benchmark: BenchmarkFixture) -> None:
    assert _native.core is not None
    found = benchmark(_native.core.xxh3_64, PART.ctypes.data, PART.nbytes, SEED)
    assert found == xxhash.xxh3_64_intdigest(PART.data, SEED)


def test_checksum_of_1_mib_xxhash(benchmark: BenchmarkFixture) -> None:
    assert benchmark(xxhash.xxh3_64_intdigest, PART.data, SEED)
