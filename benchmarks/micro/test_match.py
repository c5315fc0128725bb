"""Finding a stored prompt: 100,000 tokens in chunks of 16 and of 256, all of them known."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import pytest

import kvtier

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

PAYLOAD = np.ones(4096, np.uint8)


@pytest.mark.parametrize("count", [390, 6250], ids="{}-keys".format)
def test_match_in_dram(benchmark: BenchmarkFixture, count: int) -> None:
    keys = [kvtier.ChunkKey(hashlib.sha256(b"%d" % i).digest()) for i in range(count)]
    dram = 2 * count * len(PAYLOAD) + (64 << 20)
    with kvtier.open(dram=dram, chunk_bytes=len(PAYLOAD), max_queued_chunks=count) as store:
        assert store.put(keys, [PAYLOAD] * count).result().ok
        assert benchmark(store.match, keys) == count
