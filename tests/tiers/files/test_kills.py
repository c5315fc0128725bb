"""Invariants 5 and 6 for kind `files`: `kill -9` at any step and any moment.

The directory opens, what was reported on disk is there, nothing is wrong, no temporary is left, and what
the ledger counts is what is there. More of it with

    CRASH=long pytest tests/tiers/files/test_kills.py
"""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING

import pytest

import kvtier
from crash_steps import FILE_STEPS
from kvtier.tiers.files import inspection
from small_stores import bytes_on_disk

pytest.register_assert_rewrite("crashes")

from crashes import KIB, MIB, Crashes, engines  # noqa: E402  rewritten first

if TYPE_CHECKING:
    from pathlib import Path

LONG = os.environ.get("CRASH") == "long"
KILLS = 10 if LONG else 1
SIZES = [60 * KIB, 4096, 100 * KIB, 5000, 1, 130 * KIB]


def crashes_in(folder: Path, capacity: int = MIB) -> Crashes:
    settings = {
        "kind": "files", "capacity": capacity, "dram": MIB, "landing": MIB, "chunk_bytes": 192 * KIB,
        "part_bytes": 64 * KIB, "io_threads": 2,
    }  # fmt: skip
    return Crashes([folder / "store"], settings, SIZES, most=50)


def check(crashes: Crashes) -> None:
    crashes.check()
    for path in crashes.paths:
        found = inspection.inspect(path)
        end = time.monotonic() + 10
        while found.temporaries:  # a ring holds its files for a moment after its process
            assert time.monotonic() < end, "temporaries of the dead are left"
            kvtier.open(path, **crashes.settings).close()
            found = inspection.inspect(path)
        assert found.header is not None
        assert not found.header.dirty
        assert found.header.used == found.bytes_on_disk == bytes_on_disk(path)


@pytest.mark.slow
@pytest.mark.timeout(120 * KILLS)
@pytest.mark.parametrize("step", FILE_STEPS)
def test_invariant_6_killed_at(step: str, tmp_path: Path) -> None:
    crashes = crashes_in(tmp_path)
    rng = random.Random(step)

    def kill(step: str) -> None:
        crashes.run(rng.randrange(1 << 30), rng.choice(engines()), step=step)

    check(crashes)  # which stores the first chunks
    for _ in range(KILLS):
        if FILE_STEPS[step].phase == "open":
            crashes.forget()
            kill(step)
            check(crashes)
            kill("files, put: files under way")
        kill(step)
        check(crashes)
    assert crashes.kills >= KILLS


@pytest.mark.timeout(120 * KILLS)
@pytest.mark.parametrize("capacity", [2 * MIB, 32 * MIB])
def test_invariant_6_kills_under_load(capacity: int, tmp_path: Path) -> None:
    crashes = crashes_in(tmp_path, capacity)
    times = 12 * KILLS
    rng = random.Random(times)
    for i in range(times):
        crashes.run(i, rng.choice(engines()), lifetime=rng.uniform(0.0, 0.25))
        check(crashes)
    assert crashes.next > 200, "the workers did hardly anything"
