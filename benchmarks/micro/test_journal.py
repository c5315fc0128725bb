"""The journal's records of one batch of writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvtier.format import StoredChunk, intact, put_records, seal

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

MIB = 1 << 20
CHUNKS = 32
JOURNAL = 12345


@pytest.mark.parametrize(("parts", "records_each"), [(2, 1), (12, 3)], ids=["2-mib", "12-mib"])
def test_records_of_32_chunks(benchmark: BenchmarkFixture, parts: int, records_each: int) -> None:
    sums = np.arange(parts, dtype=np.uint64)
    nbytes = parts * MIB

    def records() -> bytes:
        chunks = [
            StoredChunk(
                key=i.to_bytes(32, "little"),
                generation=i,
                offset=i * nbytes,
                slot_bytes=nbytes,
                payload_bytes=nbytes,
                stored_bytes=nbytes,
                sums=sums,
            )
            for i in range(CHUNKS)
        ]
        return seal(put_records(chunks), JOURNAL, 0)

    sealed = memoryview(benchmark(records))
    found = intact(sealed, JOURNAL)
    assert len(found) == records_each * CHUNKS
    assert found.all()
