"""`kvtier inspect`, `verify` and `doctor` on a store of kind `files`, while others use it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

import kvtier

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHUNK = 256 << 10
KEYS = [kvtier.ChunkKey(bytes([i]) * 32) for i in range(8)]


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """An open store of eight chunks of four parts."""
    path = tmp_path / "store"
    payloads = np.random.default_rng(0).integers(0, 256, (8, CHUNK), np.uint8)
    with kvtier.open(
        path,
        kind="files",
        capacity="8MiB",
        dram="1MiB",
        landing="1MiB",
        chunk_bytes=CHUNK,
        part_bytes="64KiB",
    ) as store:
        assert store.put(KEYS, payloads, until="disk").result(20).ok
        yield path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "kvtier", *arguments],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip


def test_inspect_tells_what_is_there(path: Path) -> None:
    report = json.loads(run("inspect", str(path), "--json").stdout)
    store = report["store"]
    assert (store["kind"], store["format_version"]) == ("files", 1)
    assert (store["chunks"], store["payload_bytes"]) == (8, 8 * CHUNK)
    assert store["capacity_bytes"] == 8 << 20
    assert store["bytes_on_disk"] == 8 * CHUNK + (path / "ledger").stat().st_size
    assert report["faults"] == []
    assert "256.0 KiB" in run("inspect", str(path)).stdout or "2.0 MiB" in run("inspect", str(path)).stdout


def test_verify_finds_everything_sound(path: Path) -> None:
    verified = run("verify", str(path))
    assert (verified.returncode, verified.stderr) == (0, "")
    assert "8 of 8 chunks (2.0 MiB in all) are sound" in verified.stdout


def test_verify_names_what_is_bad(path: Path) -> None:
    bad, cut = sorted((path / "chunks").iterdir())[:2]
    with bad.open("r+b") as file:
        file.seek(CHUNK - 1)
        byte = file.read(1)[0]
        file.seek(CHUNK - 1)
        file.write(bytes([byte ^ 1]))
    os.truncate(cut, 4096)
    verified = run("verify", str(path))
    assert verified.returncode == 1
    assert f"chunk {bad.name[:64]} in {bad.name}: checksum mismatch" in verified.stdout
    assert f"{cut.name} is no chunk, or has lost a part of it" in verified.stdout
    assert "6 of 7 chunks" in verified.stdout


def test_a_missing_ledger_is_told(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path / "chunks", tmp_path / "copy" / "chunks")
    shutil.copytree(path / "incoming", tmp_path / "copy" / "incoming")
    for command in ("inspect", "verify"):
        assert "the ledger is missing or damaged" in run(command, str(tmp_path / "copy")).stdout


def test_doctor_tells_the_kind(path: Path) -> None:
    report = json.loads(run("doctor", str(path), "--json").stdout)
    assert report["store"]["found"] == "of kind 'files': open it with kind='files'"
