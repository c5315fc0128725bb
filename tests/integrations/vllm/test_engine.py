"""A real vLLM with a `kvtier` tier: what it says is the same as without, and what it computes is less.

The engines run in two processes, the second after the first has ended; `vllm_scenarios` has the scenarios.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.testing.build import obstacle
from vllm_processes import run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

PROGRAM = "vllm_scenarios.py"
DEVICE = ["failing", "dying", "hanging", "aborted"]
FIRST = [
    "plain",
    "cold",
    "shared",
    "chunks_of_four",
    "preempted",
    "mixed_attention",
    "reset_forgets",
    "salted",
]
SECOND = ["restart", "corrupted", "other_weights", "moved"]
FULL = [672, 736, 800]
"""Tokens of the prompts in whole blocks, but for the last token, which is always computed."""


@pytest.fixture(scope="module")
def first_life(work: Path) -> dict[str, Any]:
    return run(work, PROGRAM, FIRST + ([] if obstacle() else DEVICE))


@pytest.fixture(scope="module")
def second_life(work: Path, first_life: dict[str, Any]) -> dict[str, Any]:
    return run(work, PROGRAM, SECOND)


@pytest.fixture
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The result of the scenario that the test is named after; its error, if it had one."""
    name = request.node.originalname.removeprefix("test_")
    if name in DEVICE and (reason := obstacle()):
        pytest.skip(reason)
    lives = request.getfixturevalue("second_life" if name in SECOND else "first_life")
    assert "error" not in lives[name], lives[name]["error"]
    return lives[name]


@pytest.fixture
def plain(first_life: dict[str, Any]) -> dict[str, Any]:
    """What the model says without kvtier."""
    assert "error" not in first_life["plain"], first_life["plain"]["error"]
    return first_life["plain"]


def test_cold(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["first"] == {"tokens": plain["tokens"], "cached": [0, 0, 0]}
    assert found["second"] == {"tokens": plain["tokens"], "cached": FULL}
    chunks = sum(FULL) // 32
    assert found["stats"]["disk.hits"] == chunks
    assert found["stats"]["put.stored"] == chunks
    assert found["metrics"]["vllm:external_prefix_cache_hits"] == sum(FULL)
    assert found["metrics"]["vllm:kvtier_chunks"] == 2 * chunks
    assert found["metrics"]["vllm:kvtier_bytes"] == 2 * chunks * 65536
    assert (found["leaks"], found["threads"], found["pool"]) == ([], [], False)


def test_restart(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["first"] == {"tokens": plain["tokens"], "cached": FULL}
    assert found["stats"]["disk.hits"] == sum(FULL) // 32


def test_shared(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["first"]["tokens"] == found["second"]["tokens"] == plain["shared"]
    assert min(found["second"]["cached"]) >= 512 or found["shed"]
    assert found["leaks"] == []


def test_ranks(work: Path, plain: dict[str, Any]) -> None:
    """Two tensor-parallel workers and the scheduler, each a process of its own."""
    if (os.cpu_count() or 1) < 2:
        pytest.skip("vLLM binds each CPU worker to a core of its own")
    found = run(work, PROGRAM, ["ranks"])["ranks"]
    assert "error" not in found, found["error"]
    assert found["first"] == {"tokens": plain["tokens"], "cached": [0, 0, 0]}
    assert found["second"] == {"tokens": plain["tokens"], "cached": FULL}
    assert found["metrics"]["vllm:external_prefix_cache_hits"] == sum(FULL)


def test_mixed_attention(found: dict[str, Any]) -> None:
    assert found["groups"] == 2
    assert found["first"] == {"tokens": found["expected"], "cached": [0, 0, 0]}
    assert found["second"] == {"tokens": found["expected"], "cached": FULL}
    assert found["leaks"] == []


def test_preempted(found: dict[str, Any]) -> None:
    assert found["preemptions"] > 0
    assert found["first"]["tokens"] == found["second"]["tokens"] == found["expected"]
    assert min(found["second"]["cached"]) > 0
    assert found["leaks"] == []


def test_chunks_of_four(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["first"] == {"tokens": plain["tokens"], "cached": [0, 0, 0]}
    assert found["second"] == {"tokens": plain["tokens"], "cached": [640, 640, 768]}


def test_reset_forgets(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["first"] == found["second"] == {"tokens": plain["tokens"], "cached": [0, 0, 0]}


def test_salted(found: dict[str, Any], plain: dict[str, Any]) -> None:
    nothing = {"tokens": plain["tokens"], "cached": [0, 0, 0]}
    assert (found["open"], found["mine"], found["other"]) == (nothing, nothing, nothing)
    assert found["again"] == {"tokens": plain["tokens"], "cached": FULL}


def test_failing(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert [found[run]["tokens"] for run in ("first", "second", "third")] == [plain["tokens"]] * 3
    assert found["struck"] == 1
    assert found["second"]["cached"] != FULL
    assert found["third"]["cached"] == FULL  # what was recomputed is stored again
    assert found["leaks"] == []


def test_dying(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert [found[run]["tokens"] for run in ("first", "second", "third")] == [plain["tokens"]] * 3
    assert found["leaks"] == []


def test_hanging(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["first"] == found["second"] == {"tokens": plain["tokens"], "cached": [0, 0, 0]}


def test_aborted(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["first"]["tokens"] == found["second"]["tokens"] == plain["tokens"]
    assert found["second"]["cached"] == FULL
    assert found["leaks"] == []


def test_corrupted(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["first"]["tokens"] == plain["tokens"]
    assert 0 < sum(found["first"]["cached"]) < sum(FULL)
    assert found["stats"]["get.checksum"] > 0
    assert found["stats"]["get.checksum"] + found["stats"]["disk.hits"] == found["stats"]["get.requested"]


def test_other_weights(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["cached"] == [0, 0, 0]
    assert found["tokens"] != plain["tokens"]


def test_moved(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert (found["tokens"], found["cached"]) == (plain["tokens"], FULL)
