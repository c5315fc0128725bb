"""Naming the chunks of a long prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvtier.hashing import chunk_keys

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

TOKENS = 100_000


@pytest.mark.parametrize("algorithm", ["sha256", "xxh3_128"])
@pytest.mark.parametrize("chunk_tokens", [16, 256], ids="chunks-of-{}-tokens".format)
def test_keys_of_100000_tokens(benchmark: BenchmarkFixture, chunk_tokens: int, algorithm: Any) -> None:
    tokens = np.random.default_rng(0).integers(0, 150_000, TOKENS, np.uint32)
    keys = benchmark(chunk_keys, tokens, namespace=bytes(32), chunk_tokens=chunk_tokens, algorithm=algorithm)
    assert len(set(keys)) == TOKENS // chunk_tokens
