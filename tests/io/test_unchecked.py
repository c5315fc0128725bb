"""Operations without checksums (`part_bytes` of 0), in every engine; and that a store cannot make them."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvtier.config import StoreConfig
from kvtier.errors import InvalidRequest
from kvtier.io.base import OP, SHORT, Batch, IOEngine
from kvtier.io.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PAGE = 4096
NBYTES = 64 * PAGE
UNTOUCHED = 77


@pytest.fixture(params=["direct", "buffered"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """An open file of NBYTES known bytes."""
    path = tmp_path / "file"
    path.write_bytes(content(1).tobytes())
    try:
        fd = os.open(path, os.O_RDWR | (os.O_DIRECT if request.param == "direct" else 0))
    except OSError:
        pytest.skip("no O_DIRECT here")
    yield fd
    os.close(fd)


def content(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, NBYTES, np.uint8)


def run(engine: IOEngine, fd: int, memory: np.ndarray, *, write: bool) -> Batch:
    """Move `memory` in two operations, the second of an odd number of pages."""
    done = threading.Event()
    cut = 33 * PAGE
    ops = np.array(
        [
            (0, memory.ctypes.data, 9, cut, 0, 0, fd, int(write), 0),
            (cut, memory.ctypes.data + cut, 9, NBYTES - cut, 0, 1, fd, int(write), 0),
        ],
        OP,
    )
    batch = Batch(ops, np.full(2, UNTOUCHED, np.uint64), lambda _: done.set())
    engine.submit(batch)
    assert done.wait(30), "the batch never ended"
    return batch


def test_reads_compare_nothing(engine: IOEngine, file: int, aligned: Callable[[int], np.ndarray]) -> None:
    memory = aligned(NBYTES)
    batch = run(engine, file, memory, write=False)
    assert batch.results.tolist() == [0, 0]
    assert batch.sums.tolist() == [UNTOUCHED, UNTOUCHED]
    assert (memory == content(1)).all()


def test_writes_compute_nothing(engine: IOEngine, file: int, aligned: Callable[[int], np.ndarray]) -> None:
    memory = aligned(NBYTES)
    memory[:] = content(2)
    batch = run(engine, file, memory, write=True)
    assert batch.results.tolist() == [0, 0]
    assert batch.sums.tolist() == [UNTOUCHED, UNTOUCHED]
    with open(f"/proc/self/fd/{file}", "rb") as reader:
        assert reader.read() == content(2).tobytes()


def test_a_short_read_is_still_one(engine: IOEngine, file: int, aligned: Callable[[int], np.ndarray]) -> None:
    os.ftruncate(file, NBYTES - PAGE)
    assert run(engine, file, aligned(NBYTES), write=False).results.tolist() == [0, SHORT]


def test_invariant_1_no_setting_and_no_plan_makes_an_unchecked_operation() -> None:
    with pytest.raises(InvalidRequest, match="part_bytes is 0"):
        StoreConfig(part_bytes=0)
    with pytest.raises(ZeroDivisionError):
        Plan(fd=0, part_bytes=0)
