"""Invariant 6, step by step: `kill -9` between any two statements that touch the disk.

Each step is met on two stores: one of small chunks on one path, and one of chunks up to nine parts, two
records each, spread over two paths. Half of the puts are encoded with lz4. The steps of opening are met
on a new store, and on one whose last process died in the middle of a record. Two or three kills a step; at
least twenty with

    CRASH=long pytest tests/faults/test_crash_steps.py
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest

from crash_steps import STEPS

pytest.register_assert_rewrite("crashes")

from crashes import KIB, MIB, Crashes, engines  # noqa: E402  rewritten first

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.slow  # all of them together

LONG = os.environ.get("CRASH") == "long"
KILLS = 10 if LONG else 1


def small_chunks(folder: Path) -> Crashes:
    settings = {
        "capacity": MIB, "dram": MIB, "landing": MIB, "chunk_bytes": 16 * KIB, "part_bytes": 64 * KIB,
        "io_threads": 2,
    }  # fmt: skip
    return Crashes([folder / "a"], settings, [4096, 5000, 1, 8192, 12 * KIB], most=50)


def large_chunks_on_two_paths(folder: Path) -> Crashes:
    settings = {
        "capacity": 6 * MIB, "dram": 0, "landing": 8 * MIB, "chunk_bytes": 576 * KIB, "part_bytes": 64 * KIB,
        "io_threads": 2,
    }  # fmt: skip
    sizes = [570 * KIB, 8192, 4096, 5000, 1, 4096, 12 * KIB, 70 * KIB]
    return Crashes([folder / "b", folder / "c"], settings, sizes, most=30)


@pytest.mark.timeout(120 * KILLS)
@pytest.mark.parametrize("make", [small_chunks, large_chunks_on_two_paths], ids=["small", "large"])
@pytest.mark.parametrize("step", STEPS)
def test_invariant_6_killed_at(step: str, make: Callable[[Path], Crashes], tmp_path: Path) -> None:
    crashes = make(tmp_path)
    rng = random.Random(step)

    def kill(step: str) -> None:
        crashes.run(rng.randrange(1 << 30), rng.choice(engines()), step=step)

    crashes.check()  # which stores the first chunks
    for _ in range(KILLS):
        if STEPS[step].phase == "open":
            if make is small_chunks or LONG:  # a new store, where nothing is there yet
                crashes.forget()
                kill(step)
                crashes.check()
            kill("journal: half a record")
            crashes.grow()  # so that all headers are rewritten, too, by an opening that finds a torn journal
        kill(step)
        crashes.check()
    assert crashes.kills >= KILLS
