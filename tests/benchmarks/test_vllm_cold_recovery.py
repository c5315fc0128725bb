"""`benchmarks/vllm_cold_recovery.py` from end to end, with a server in vLLM's place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
# What the benchmark runs is `python -m vllm.entrypoints.cli.main serve MODEL ... --port PORT ...`.
STAND_IN = """
import os, sys, threading
import openai_server

if os.environ.get("REFUSED", "nothing") in str(sys.argv):
    sys.exit("ValueError: that is refused")
port = int(sys.argv[sys.argv.index("--port") + 1])
with openai_server.Server(model="model", port=port):
    threading.Event().wait()
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    package = tmp_path / "stand in/vllm/entrypoints/cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(STAND_IN)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    model = tmp_path / "model"
    model.mkdir()
    config = {"vocab_size": 1000, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    (model / "config.json").write_text(json.dumps(config))
    paths = [str(ROOT), str(tmp_path / "stand in"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "COLUMNS": "240"}


def run(tmp_path: Path, environment: dict[str, str], *more: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, str(ROOT / "benchmarks/vllm_cold_recovery.py"), "--work", str(tmp_path / "work"),
        "--model", str(tmp_path / "model"), "--concurrency", "1", "2", "--tokens", "20",
        "--output-tokens", "3", "--settle", "0", "--json", str(tmp_path / "report.json"), *more,
    ]  # fmt: skip
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


def report(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "report-disk.json").read_text())
    return found


def test_trials_and_their_medians(tmp_path: Path, environment: dict[str, str]) -> None:
    chosen = ("--configuration", "recompute", "fs", "lmcache", "kvtier-tier", "--trials", "1")
    ended = run(tmp_path, environment, *chosen, "--recompute-trials", "1")
    assert ended.returncode == 0, ended.stderr
    found = report(tmp_path)
    configurations = ("recompute", "fs", "kvtier-tier")
    assert [row["name"] for row in found["rows"]] == [
        f"{c}, {n} at once" for n in (1, 2) for c in configurations
    ]
    for row in found["rows"]:
        assert row["trials"] == 1
        assert row["ttft_p50_s"] > 0
        assert row["recompute_times_p50"] > 0
        assert row["failed"] == 0
        assert row["other_output"].startswith("0 of")
    assert found["rows"][1]["fs_times"] == 1.0
    assert found["absent"] == {"lmcache": f"{sys.executable} has no module lmcache"}
    assert found["kv_bytes_per_token"] == 2 * 2 * 64 * 2
    assert "lmcache is absent" in ended.stdout

    again = run(tmp_path, environment, *chosen, "--recompute-trials", "1")
    assert "storing" not in again.stderr, "what is done is kept"
    assert report(tmp_path)["rows"] == found["rows"]

    other = run(tmp_path, environment, "--seed", "1")
    assert other.returncode == 1
    assert "holds a run with other settings" in other.stderr


def test_a_configuration_that_does_not_start_is_left_out(tmp_path: Path, environment: dict[str, str]) -> None:
    chosen = ("--configuration", "recompute", "fs", "--trials", "1", "--recompute-trials", "1")
    ended = run(tmp_path, {**environment, "REFUSED": "root_dir"}, *chosen)
    assert ended.returncode == 0, ended.stderr
    found = report(tmp_path)
    assert [row["name"] for row in found["rows"]] == ["recompute, 1 at once", "recompute, 2 at once"]
    assert "vLLM does not start as fs: ValueError: that is refused" in found["absent"]["fs"]
