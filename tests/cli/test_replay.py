"""`kvtier replay` as it is called: table, JSON, picture, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twelve sessions that take turns, each a block longer every time."""
    lines = []
    for turn in range(10):
        for session in range(12):
            ids = [1000 * session + block for block in range(turn + 2)]
            lines.append(json.dumps({"timestamp": 1000 * (12 * turn + session), "hash_ids": ids}))
    path = tmp_path / "sessions.jsonl"
    path.write_text("\n".join(lines))
    return path


def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvtier", "replay", *map(str, arguments)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_table_json_and_picture(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    json_file, picture = tmp_path / "out.json", tmp_path / "out.png"
    done = run(
        trace, "--policy", "lru", "--policy", "reuse", "--capacity-chunks", 40, "--capacity-percent", 50,
        "--capacity-percent", 100, "--dram-percent", 25, "--json", json_file, "--plot", picture,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "sessions: 120 requests, 780 references to 132 chunks" in done.stdout
    assert "…" not in done.stdout
    report = json.loads(json_file.read_text())
    assert report["version"] == 1
    rows = {(row["policy"], row["capacity_chunks"]): row for row in report["rows"]}
    assert set(rows) == {
        *((policy, chunks) for policy in ("lru", "reuse", "belady") for chunks in (40, 66, 132)),
        ("infinite", 132),
    }
    assert rows["lru", 132]["hit_rate"] == rows["infinite", 132]["hit_rate"] == 648 / 780
    assert rows["lru", 40]["hit_rate"] <= rows["belady", 40]["hit_rate"]
    assert rows["lru", 132]["hit_rate_dram"] + rows["lru", 132]["hit_rate_disk"] == pytest.approx(648 / 780)
    assert rows["lru", 132]["dram_chunks"] == 33
    [summary] = report["traces"]
    assert summary["infinite_hit_rate"] == 648 / 780
    assert sum(bucket["share"] for bucket in summary["reuse_distance"]) == pytest.approx(648 / 780)
    assert picture.read_bytes().startswith(b"\x89PNG")


WRONG = {
    "policy": (["--policy", "lfu"], "Choose from"),
    "percent": (["--capacity-percent", 0], "--capacity-percent is 0.0, needs a number"),
    "chunks": (["--capacity-chunks", 0], "--capacity-chunks is 0, needs a number of at least 1"),
    "warm": (["--warm", 1], "--warm is 1.0, needs a number of at least 0, at most 0.99"),
    "both": (["--dram-chunks", 1, "--dram-percent", 1], "say the same"),
    "json": (["--json", "/none/out.json"], "there is no directory"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_refused(trace: Path, case: str) -> None:
    options, message = WRONG[case]
    done = run(trace, *options)
    assert done.returncode != 0
    assert message in " ".join((done.stdout + done.stderr).replace("│", " ").split())


def test_no_trace_is_refused() -> None:
    done = run()
    assert done.returncode == 2
    assert "replay got no trace" in done.stderr
