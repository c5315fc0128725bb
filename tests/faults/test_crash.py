"""Invariant 6: `kill -9` at any moment. What was reported on disk is found, and nothing else is wrong.

Fifty kills in all; five hundred with

    CRASH=long pytest tests/faults/test_crash.py

`test_crash_steps.py` kills at chosen steps, and says how the stores and their load look.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest

pytest.register_assert_rewrite("crashes")

from crashes import KIB, MIB, Crashes, engines  # noqa: E402  rewritten first

if TYPE_CHECKING:
    from pathlib import Path

TIMES = 10 if os.environ.get("CRASH") == "long" else 1
COMMON = {"part_bytes": 64 * KIB, "io_threads": 2}


@pytest.mark.timeout(120 * TIMES)
def test_invariant_6_kills_under_load(tmp_path: Path) -> None:
    """Chunks of up to three parts through the landing slots; deletes keep the disk from evicting."""
    settings = {**COMMON, "capacity": 48 * MIB, "dram": 0, "landing": 4 * MIB, "chunk_bytes": 256 * KIB}
    sizes = [64 * KIB, 4096, 100 * KIB, 5000, 192 * KIB]
    kill(Crashes([tmp_path / "store"], settings, sizes, most=150), 15)


@pytest.mark.timeout(120 * TIMES)
def test_invariant_6_kills_while_the_disk_evicts_on_several_paths(tmp_path: Path) -> None:
    """And while what is there is scrubbed."""
    settings = {
        **COMMON,
        "scrub": 1 << 40,
        "capacity": 12 * MIB,
        "dram": MIB,
        "landing": 4 * MIB,
        "chunk_bytes": 256 * KIB,
    }
    sizes = [200 * KIB, 4096, 100 * KIB, 5000, 250 * KIB]
    kill(Crashes([tmp_path / "one", tmp_path / "two", tmp_path / "three"], settings, sizes, most=1000), 15)


@pytest.mark.timeout(120 * TIMES)
def test_invariant_6_kills_while_the_journal_is_compacted(tmp_path: Path) -> None:
    """Small chunks and a small journal, which is compacted again and again."""
    settings = {**COMMON, "capacity": 2 * MIB, "dram": MIB, "landing": MIB, "chunk_bytes": 16 * KIB}
    crashes = Crashes([tmp_path / "store"], settings, [4096, 5000, 1, 8192, 12 * KIB], most=100)
    kill(crashes, 20)
    for _ in range(10):  # a slow machine writes less between two kills
        if len(crashes.journals) <= 10:
            kill(crashes, 5)
    assert len(crashes.journals) > 10, "the journal was hardly ever compacted"


def kill(crashes: Crashes, times: int) -> None:
    rng = random.Random(times)
    for i in range(times * TIMES):
        crashes.run(i, rng.choice(engines()), lifetime=rng.uniform(0.0, 0.25))
        crashes.check()
    assert crashes.kills >= times * TIMES
    assert crashes.next > 300, "the workers did hardly anything"
