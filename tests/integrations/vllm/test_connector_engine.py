"""A real vLLM with `KvtierConnector`: what it says is the same as without, and what it computes is less.

The scenarios, in `vllm_connector_scenarios`, run in three processes: those of `SECOND` after those of
`FIRST`, whose store they find, and those of `DEVICE` on devices with faults.
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

PROGRAM = "vllm_connector_scenarios.py"
DEVICE = ["failing", "dying", "hanging", "aborted", "slow", "mixed"]
FIRST = [
    "plain", "cold", "default_chunks", "shared", "preempted", "windows", "reset", "salted", "full",
]  # fmt: skip
SECOND = ["restart", "corrupted", "other_weights", "processes"]
FULL = [672, 736, 800]
"""Tokens of the prompts in whole blocks, but for the last token, which is always computed."""
COLD = [0, 0, 0]


@pytest.fixture(scope="module")
def first_life(work: Path) -> dict[str, Any]:
    return run(work, PROGRAM, FIRST)


@pytest.fixture(scope="module")
def device_life(work: Path) -> dict[str, Any]:
    return run(work, PROGRAM, DEVICE)


@pytest.fixture(scope="module")
def second_life(work: Path, first_life: dict[str, Any]) -> dict[str, Any]:
    return run(work, PROGRAM, SECOND)


@pytest.fixture
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The result of the scenario that the test is named after; its error, if it had one."""
    name = request.node.originalname.removeprefix("test_")
    life = "first_life"
    if name in SECOND:
        life = "second_life"
    elif name in DEVICE:
        if reason := obstacle():
            pytest.skip(reason)
        life = "device_life"
    lives = request.getfixturevalue(life)
    assert "error" not in lives[name], lives[name]["error"]
    return lives[name]


@pytest.fixture
def plain(first_life: dict[str, Any]) -> dict[str, Any]:
    """What the models say without kvtier."""
    assert "error" not in first_life["plain"], first_life["plain"]["error"]
    return first_life["plain"]


def test_cold(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["first"] == {"tokens": plain["tokens"], "cached": COLD}
    assert found["second"] == {"tokens": plain["tokens"], "cached": FULL}
    chunks = sum(FULL) // 32
    assert found["stats"]["load.hit"] == found["stats"]["load.requested"] == chunks
    metrics = found["metrics"]
    assert metrics["vllm:external_prefix_cache_hits"] == sum(FULL)
    assert metrics["vllm:kvtier_chunks"] == chunks + found["stats"]["save.stored"]
    assert metrics["vllm:kvtier_hits"] == chunks
    assert metrics["vllm:kvtier_chunk_tokens"] == 32
    assert metrics["vllm:kvtier_used_bytes"] == 2 * found["stats"]["disk.bytes"]
    assert (found["leaks"], found["threads"]) == ([], [])


def test_default_chunks(found: dict[str, Any], plain: dict[str, Any]) -> None:
    first, second, head = plain["forked"]
    assert found["first"] == {"tokens": [first], "cached": [0]}
    assert found["local"] == {"tokens": [second], "cached": [576]}
    assert found["second"] == {"tokens": [first, second], "cached": [768, 768]}
    assert found["whole"] == {"tokens": [head], "cached": [480]}
    assert found["leaks"] == []


def test_shared(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["first"]["tokens"] == found["second"]["tokens"] == plain["shared"]
    assert found["second"]["cached"] == [608] * 16
    assert found["leaks"] == []


def test_preempted(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["preemptions"] > 0
    assert found["first"]["tokens"] == found["second"]["tokens"] == plain["many"]
    assert min(found["second"]["cached"]) >= 384
    assert found["leaks"] == []


def test_windows(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["first"] == {"tokens": plain["windows"], "cached": COLD}
    assert found["second"] == {"tokens": plain["windows"], "cached": FULL}
    assert found["leaks"] == []


def test_reset(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["first"] == found["second"] == {"tokens": plain["tokens"], "cached": COLD}
    assert found["third"] == {"tokens": plain["tokens"], "cached": FULL}
    assert found["restarted"] == found["kept"] == {"tokens": plain["tokens"][:1], "cached": FULL[:1]}
    assert found["leaks"] == []


def test_salted(found: dict[str, Any], plain: dict[str, Any]) -> None:
    nothing = {"tokens": plain["tokens"], "cached": COLD}
    assert (found["open"], found["mine"], found["other"]) == (nothing, nothing, nothing)
    assert found["again"] == {"tokens": plain["tokens"], "cached": FULL}


def test_full(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert [run["tokens"] for run in found["found"]] == [plain["tokens"]] * 3
    assert found["stats"]["disk.evictions"] > 0
    assert found["leaks"] == []


def test_mixed(found: dict[str, Any], plain: dict[str, Any]) -> None:
    for wave in found["waves"]:
        assert len(wave) > 8
        assert {number: plain["mixed"][int(number)] for number in wave} == wave
    assert found["stats"]["load.hit"] > 0
    assert sum(found["stats"].get(f"load.{reason}", 0) for reason in ("io_error", "absent")) > 0
    assert found["leaks"] == []


def test_slow(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert [run["tokens"] for run in found["found"]] == [plain["tokens"][:1]] * 3
    assert [run["cached"] for run in found["found"]] == [[0], FULL[:1], [0]]
    assert (found["decisions"]["loaded"], found["decisions"]["recomputed"]) == (1, 1)
    assert found["metrics"]["vllm:kvtier_decisions"] == 2
    assert found["leaks"] == []


def test_failing(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert [found[run]["tokens"] for run in ("first", "second", "third")] == [plain["tokens"]] * 3
    assert found["struck"] == 1
    assert found["second"]["cached"] != FULL
    assert found["leaks"] == []


def test_dying(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["first"]["tokens"] == found["second"] == found["third"]["tokens"] == plain["tokens"]
    assert found["fourth"] == plain["shared"][:2]
    assert found["leaks"] == []


def test_hanging(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["first"]["tokens"] == found["second"]["tokens"] == plain["tokens"]
    assert found["leaks"] == []


def test_aborted(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["first"]["tokens"] == plain["tokens"]
    assert found["second"] == {"tokens": plain["tokens"], "cached": FULL}
    assert found["leaks"] == []


def test_restart(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert [run["cached"] for run in found["first"]] == [[tokens] for tokens in FULL]
    assert [run["tokens"][0] for run in found["first"]] == plain["tokens"]
    assert found["stats"]["disk.hits"] == sum(FULL) // 32


def test_corrupted(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["first"]["tokens"] == plain["tokens"]
    assert found["stats"]["get.checksum"] > 0
    assert found["stats"]["disk.hits"] > 0
    assert found["leaks"] == []


def test_other_weights(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["cached"] == COLD
    assert found["tokens"] != plain["tokens"]


def test_processes(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["first"] == {"tokens": plain["tokens"], "cached": FULL}
    assert found["metrics"]["vllm:external_prefix_cache_hits"] == sum(FULL)


def test_ranks(work: Path, plain: dict[str, Any]) -> None:
    """Two tensor-parallel workers, each with a store of its own."""
    if (os.cpu_count() or 1) < 2:
        pytest.skip("vLLM binds each CPU worker to a core of its own")
    found = run(work, PROGRAM, ["ranks"])["ranks"]
    assert "error" not in found, found["error"]
    assert found["first"] == {"tokens": plain["tokens"][:1], "cached": [0]}
    assert found["first again"] == {"tokens": plain["tokens"], "cached": [FULL[0], 0, 0]}
    assert found["second"] == {"tokens": plain["tokens"][:1], "cached": FULL[:1]}
    assert found["second again"] == {"tokens": plain["tokens"], "cached": FULL}
    assert found["directories"] == ["tp0", "tp1"]
