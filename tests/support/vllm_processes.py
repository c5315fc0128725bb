"""Runs scenarios on a real vLLM in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run(work: Path, program: str, scenarios: list[str]) -> dict[str, Any]:
    """What the scenarios found; `program` is the name of their file here."""
    paths = [str(ROOT / "tests/support"), str(_entry_point(work)), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory(prefix="vllm-") as scratch:  # a short path, as sockets are in it
        ended = subprocess.run(
            [sys.executable, str(ROOT / "tests/support" / program), str(work), *scenarios],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "TMPDIR": scratch},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=840, cwd=work,
        )  # fmt: skip
    lines = [line for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    found = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    assert [entry["scenario"] for entry in found] == scenarios, ended.stdout[-5000:]
    return {entry["scenario"]: entry for entry in found}


def _entry_point(work: Path) -> Path:
    """Where vLLM finds kvtier's entry point, if kvtier runs from its sources and is not installed."""
    path = work / "installed"
    if not any(point.name == "kvtier" for point in entry_points(group="vllm.general_plugins")):
        points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
        info = path / "kvtier-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtier\nVersion: 0\n")
        lines = [f"{name} = {target}" for name, target in points["vllm.general_plugins"].items()]
        (info / "entry_points.txt").write_text("[vllm.general_plugins]\n" + "\n".join(lines) + "\n")
    return path
