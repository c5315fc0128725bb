"""`kvtier plan`, run as a person runs it."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

QUICK = ["--prompt-tokens", "30000", "--hit-rate", "0.9", "--bandwidth", "6GB/s", "--prefill", "4000"]
SHAPE = {"num_hidden_layers": 62, "num_key_value_heads": 8, "head_dim": 128, "dtype": "bfloat16"}


def run(*arguments: object, cwd: Path | None = None, columns: int = 250) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "kvtier", "plan", *map(str, arguments)], cwd=cwd,
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "COLUMNS": str(columns)},
    )  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SHAPE))
    return file


def figures(file: Path) -> dict[str, Any]:
    return {record["name"]: record for record in json.loads(file.read_text())["figures"]}


def test_the_case_is_recomputed(tmp_path: Path) -> None:
    shown = run("--case", "fx100", "--json", tmp_path / "out.json")
    assert (shown.returncode, shown.stderr) == (0, "")
    for words in (
        "does not follow",
        "follows: what the inputs give",
        "left out, needs price_per_hour",
        "255,000",
    ):
        assert words in shown.stdout
    report = json.loads((tmp_path / "out.json").read_text())
    marks = {check["name"]: check["mark"] for check in report["checks"]}
    assert marks["what they earn an hour"] == "does not follow"
    assert marks["more tokens an hour"] == "follows"
    assert all({"formula", "inputs", "value", "unit"} <= check["right"].keys() for check in report["checks"])
    assert report["rule"].startswith("follows")
    rows = {(row["setup"], row["concurrency"]): row["ttft"] for row in report["rows"]}
    assert rows["array", 16] == pytest.approx(16 * 7.15 / 8.12)
    assert len(rows) == 9


def test_no_figure_is_cut_in_a_narrow_terminal() -> None:
    shown = run("--case", "fx100", columns=80).stdout
    assert "…" not in shown
    for figure in ("254,880", "226,300", "-99.9%", "GB/request"):
        assert figure in shown


def test_a_plan_needs_no_file(config: Path, tmp_path: Path) -> None:
    shown = run("--model", config, *QUICK, "--concurrency", 8, "--json", tmp_path / "out.json")
    assert (shown.returncode, shown.stderr) == (0, "")
    found = figures(tmp_path / "out.json")
    assert found["recompute.at_8.ttft"]["value"] == 60
    assert found["tier.at_8.ttft"]["value"] == pytest.approx(8 * 253_952 * 27_000 / 6e9 + 6)
    assert found["tier.at_8.ttft"]["formula"] == "load + compute"
    assert found["bytes_per_token"]["inputs"]["layers"] == {"figure": "layers", "value": 62, "unit": "1"}


def test_options_override_a_file(config: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(
        "version = 1\n[model]\nconfig = 'config.json'\n[workload]\nprompt_tokens = 1000\nhit_rate = 1\n"
        "[prefill]\nseconds = 1\nconcurrency = 1\n"
        "[[setup]]\nname = 'a'\n[[setup.tier]]\nname = 'b'\nbandwidth = 1e9\n"
    )
    plain, changed = tmp_path / "plain.json", tmp_path / "changed.json"
    assert run(tmp_path / "plan.toml", "--json", plain).stderr == ""
    assert run(tmp_path / "plan.toml", *QUICK, "--set", "a.b.latency=0.5", "--json", changed).stderr == ""
    assert figures(plain)["prefill_speed"]["value"] == 1000
    after = figures(changed)
    values = [
        after[name]["value"]
        for name in ("prefill_speed", "prompt_tokens", "a.at_1.b.bandwidth", "a.b.latency")
    ]
    assert values == [4000, 30_000, 6, 0.5]
    assert config.exists()


def test_files_of_options_are_looked_for_where_it_runs(config: Path, tmp_path: Path) -> None:
    rows = [{"policy": "lru", "capacity_chunks": 1000, "hit_rate": 0.5}]
    (tmp_path / "curve.json").write_text(json.dumps({"rows": rows}))
    (tmp_path / "bench.json").write_text(json.dumps({"rows": [{"name": "kvtier-uring", "gb_s": 2.5}]}))
    model = ["--model", config.name, "--prompt-tokens", 1000, "--prefill", 4000]
    tier = ["--hit-curve", "curve.json", "--chunk-tokens", 256, "--bench", "bench.json", "--size", "1TB"]
    shown = run(*model, *tier, "--json", "out.json", cwd=tmp_path)
    assert shown.stderr == ""
    found = figures(tmp_path / "out.json")
    assert found["tier.hit_rate"]["value"] == 0.5
    assert found["tier.at_1.disk.bandwidth"]["source"] == "bench.json, row kvtier-uring"


def test_explain_shows_formulas_and_inputs() -> None:
    shown = run("--case", "fx100", "--explain").stdout
    assert "array.at_16.energy_per_request = 0.000367 kWh/request = " in shown
    assert "    ttft = 14.1 s  (array.at_16.ttft)" in shown
    assert "array.fx100.price = 371,200 CNY    [price in the tier array.fx100]" in shown


def test_the_picture_has_no_ground_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shown = run("--case", "fx100", "--plot", tmp_path / "plan.png")
    assert (shown.returncode, shown.stderr) == (0, "")
    header = (tmp_path / "plan.png").read_bytes()[:26]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height, _, color = struct.unpack(">IIBB", header[16:26])
    assert (width > 1000, height > 500, color) == (True, True, 6)  # 6: with transparency


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--case", "fx10"], "did you mean 'fx100'"),
        (["plan.toml", "--case", "fx100"], "leave one out"),
        (["--case", "fx100", "--bandwidth", "1GB/s"], "tiers local.disk, array.fx100"),
        (["--case", "fx100", "--set", "array.fx100.prize=1"], "did you mean 'price'"),
        (["absent.toml"], "cannot read the plan"),
        ([], "give a FILE, a --case, or"),
        (["--case", "fx100", "--json", "/absent/out.json"], "there is no directory"),
        (["--hit-rate", "2", "--bandwidth", "1GB/s"], "hit_rate in [workload] is '2'"),
    ],
)
def test_what_is_wrong_is_a_sentence(arguments: list[str], says: str) -> None:
    shown = run(*arguments)
    assert shown.returncode == 2
    assert says in shown.stderr
    assert "Traceback" not in shown.stderr
