"""Copies between slots and callers' memory: 32 MiB in pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvtier.buffers import copy_many

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

TOTAL = 32 << 20


@pytest.mark.parametrize("kib", [32, 256, 2048], ids="pieces-of-{}-kib".format)
def test_copy_of_32_mib(benchmark: BenchmarkFixture, kib: int) -> None:
    source = np.random.default_rng(0).integers(0, 256, TOTAL, np.uint8)
    target = np.zeros_like(source)
    starts = np.arange(0, TOTAL, kib << 10)
    sources = (starts[::-1] + source.ctypes.data).tolist()  # not one long copy
    targets = (starts + target.ctypes.data).tolist()
    benchmark(copy_many, sources, targets, [kib << 10] * len(starts))
    assert np.array_equal(target.reshape(len(starts), -1), source.reshape(len(starts), -1)[::-1])
