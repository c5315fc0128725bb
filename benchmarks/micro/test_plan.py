"""From the chunks of a read to the operations of one batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtier.io.plan import Plan

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

    from kvtier.io.base import Batch

MIB = 1 << 20
CHUNKS = 512


def test_plan_of_512_chunks_of_2_mib(benchmark: BenchmarkFixture) -> None:
    sums = [np.full(2, i, np.uint64) for i in range(CHUNKS)]

    def plan() -> Batch:
        made = Plan(fd=3, part_bytes=MIB)
        for i, expected in enumerate(sums):
            made.add(offset=i * 2 * MIB, address=i * 4 * MIB, nbytes=2 * MIB, seed=i, sums=expected)
        return made.batch(lambda _: None, None)

    batch = benchmark(plan)
    assert batch.ops["length"].sum() == CHUNKS * 2 * MIB
    assert np.array_equal(batch.sums, np.concatenate(sums))
