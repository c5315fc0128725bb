"""Reads and writes on engines of their own."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvtier.io.base import OP, Batch, IOEngine
from kvtier.io.split import SplitEngine
from kvtier.io.threads import ThreadEngine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PAGE = 4096


class Recording(ThreadEngine):
    def __init__(self) -> None:
        super().__init__(1)
        self.kinds: list[int] = []
        self.is_closed = False

    def submit(self, batch: Batch) -> None:
        self.kinds += batch.ops["write"].tolist()
        super().submit(batch)

    def close(self, timeout: float) -> bool:
        self.is_closed = True
        return super().close(timeout)


@pytest.fixture
def transfer(tmp_path: Path, aligned: Callable[[int], np.ndarray]) -> Any:
    """`transfer(engine, write)`: move a page and wait; its result."""
    memory = aligned(PAGE)
    sums = np.zeros(1, np.uint64)
    address = memory.__array_interface__["data"][0]

    def run(engine: IOEngine, write: bool) -> int:
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        done = threading.Event()
        ops = np.array([(0, address, 7, PAGE, PAGE, 0, fd, write, 0)], OP)
        batch = Batch(ops, sums, lambda batch: done.set())
        engine.submit(batch)
        assert done.wait(10)
        os.close(fd)
        sums[:] = batch.sums
        return int(batch.results[0])

    return run


def test_each_kind_has_an_engine_and_the_second_comes_when_it_is_needed(transfer: Any) -> None:
    made: list[Recording] = []
    engine = SplitEngine(lambda: made.append(Recording()) or made[-1])
    assert engine.name == "threads"
    assert len(made) == 1
    assert [transfer(engine, True), transfer(engine, False), transfer(engine, True)] == [0, 0, 0]
    assert [one.kinds for one in made] == [[0], [1, 1]]
    assert engine.close(10)
    assert all(one.is_closed for one in made)


def test_without_a_second_engine_they_share_one(transfer: Any, caplog: pytest.LogCaptureFixture) -> None:
    made: list[Recording] = []

    def make() -> Recording:
        if made:
            raise OSError(24, "too many open files")
        made.append(Recording())
        return made[0]

    engine = SplitEngine(make)
    assert [transfer(engine, True), transfer(engine, False)] == [0, 0]
    assert made[0].kinds == [1, 0]
    assert "too many open files" in caplog.text
    assert engine.close(10)
