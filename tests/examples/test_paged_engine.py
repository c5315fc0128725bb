"""The tutorial does what it says: two processes on one directory give the same tokens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
EXAMPLE = Path(__file__).parents[2] / "examples/paged_engine.py"


def run(directory: Path, *options: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE), str(directory), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def field(output: str, pattern: str) -> str:
    found = re.search(pattern, output)
    assert found, output
    return found[1]


def test_a_prompt_survives_a_restart(tmp_path: Path) -> None:
    options = ("--tokens", "400", "--new", "6")
    first, second = run(tmp_path, *options), run(tmp_path, *options)
    tokens = field(first, r"tokens: ([\d ]+)\n")
    assert len(set(tokens.split())) > 2, "a model that repeats itself would show nothing"
    assert field(first, r"(\d+) of 400 tokens loaded") == "0"
    assert field(second, r"tokens: ([\d ]+)\n") == tokens
    assert field(second, r"(\d+) of 400 tokens loaded") == "384"
    assert field(second, r"tokens identical: (\w+)") == "True"
    assert field(second, r"restored in (\d+\.\d+) s, prefill takes \d+\.\d+ s")
