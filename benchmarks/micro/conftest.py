"""Payloads that several benchmarks share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    import numpy.typing as npt

CHUNK = 2 << 20


@pytest.fixture(scope="session")
def bfloat16_chunk() -> npt.NDArray[np.uint8]:
    """2 MiB of normally distributed bfloat16, as bytes."""
    wide = np.random.default_rng(0).standard_normal(CHUNK // 2).astype("<f4").view("<u4")
    return (wide >> 16).astype("<u2").view(np.uint8)
