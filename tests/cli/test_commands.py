"""`kvtier inspect`, `verify` and `doctor`, run as a person runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtier
from kvtier.format import JOURNAL_HEADER_BYTES, SLAB_HEADER_BYTES
from kvtier.tiers.slab.inspection import inspect

if TYPE_CHECKING:
    from pathlib import Path

CHUNK = 256 << 10
KEYS = [kvtier.ChunkKey(bytes([i]) * 32) for i in range(8)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed store of eight chunks of four parts."""
    path = tmp_path / "store"
    settings: dict[str, Any] = {"capacity": "8MiB", "dram": "1MiB", "landing": "1MiB"}
    payloads = np.random.default_rng(0).integers(0, 256, (8, CHUNK), np.uint8)
    with kvtier.open(path, chunk_bytes=CHUNK, part_bytes="64KiB", io_window="1MiB", **settings) as store:
        assert store.put(KEYS, payloads, until="disk").result(20).ok
    return path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "kvtier", *arguments],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip


def flip(file: Path, offset: int) -> None:
    with file.open("r+b") as slab:
        slab.seek(offset)
        byte = slab.read(1)
        slab.seek(offset)
        slab.write(bytes([byte[0] ^ 1]))


def test_inspect_tells_what_is_there(path: Path) -> None:
    report = json.loads(run("inspect", str(path), "--json").stdout)
    store = report["store"]
    assert (store["format_version"], store["chunks"]) == (2, 8)
    assert store["payload_bytes"] == 8 * CHUNK
    assert store["capacity_bytes"] == 8 << 20
    assert store["bytes_on_disk"] <= 8 << 20
    assert report["faults"] == []
    assert [(row["slot_bytes"], row["chunks"]) for row in report["slots"]] == [(CHUNK, 8)]
    shown = run("inspect", str(path))
    assert shown.returncode == 0
    for word in ("256.0 KiB", "free share", "UTC, ", "compaction in records"):
        assert word in shown.stdout


def test_inspect_works_while_the_store_is_in_use(path: Path) -> None:
    with kvtier.open(path, dram="1MiB", landing="1MiB", chunk_bytes=CHUNK):
        assert json.loads(run("inspect", str(path), "--json").stdout)["store"]["chunks"] == 8


def test_verify_finds_everything_sound(path: Path) -> None:
    before = {name: (path / name).read_bytes() for name in ("slab", "journal")}
    verified = run("verify", str(path))
    assert (verified.returncode, verified.stderr) == (0, "")
    assert "8 of 8 chunks (2.0 MiB in all) are sound" in verified.stdout
    assert before == {name: (path / name).read_bytes() for name in before}


def test_verify_names_what_is_bad(path: Path) -> None:
    chunk = inspect(path).recovered.chunks[3]
    offset = SLAB_HEADER_BYTES + int(chunk["offset"])
    flip(path / "slab", offset + CHUNK - 1)
    verified = run("verify", str(path))
    assert verified.returncode == 1
    assert f"chunk {chunk['key'].tobytes().hex()} at byte {offset} of the slab: checksum" in verified.stdout
    assert "7 of 8 chunks" in verified.stdout


def test_verify_tells_of_a_slab_cut_short(path: Path) -> None:
    last = max(int(offset) for offset in inspect(path).recovered.chunks["offset"])
    os.truncate(path / "slab", SLAB_HEADER_BYTES + last + 4096)
    verified = run("verify", str(path))
    assert verified.returncode == 1
    assert "slab ends before the payload" in verified.stdout


def test_verify_tells_of_a_garbled_journal(path: Path) -> None:
    flip(path / "journal", JOURNAL_HEADER_BYTES + 128 * 2 + 50)
    verified = run("verify", str(path))
    assert verified.returncode == 1
    assert "1 journal records fail their check" in verified.stdout
    assert "7 of 7 chunks" in verified.stdout


def test_verify_tells_of_a_missing_and_of_a_foreign_slab(path: Path, tmp_path: Path) -> None:
    with kvtier.open(
        tmp_path / "other", capacity="8MiB", dram="1MiB", landing="1MiB", chunk_bytes=CHUNK
    ) as store:
        assert store.put(KEYS, np.zeros((8, CHUNK), np.uint8), until="disk").result(20).ok
    (path / "slab").write_bytes((tmp_path / "other" / "slab").read_bytes())
    foreign = run("verify", str(path))
    assert foreign.returncode == 1
    assert "of another store" in foreign.stdout
    assert "0 of 8 chunks" in foreign.stdout
    (path / "slab").unlink()
    missing = run("verify", str(path))
    assert missing.returncode == 1
    assert "no slab" in missing.stdout


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_what_is_no_store_is_a_sentence(command: str, tmp_path: Path) -> None:
    for path, words in ((tmp_path, "holds no store"), (tmp_path / "absent", "is not a directory")):
        failed = run(command, str(path))
        assert failed.returncode == 2
        assert words in failed.stderr
        assert "Traceback" not in failed.stderr
    assert list(tmp_path.iterdir()) == []


def test_verify_of_a_store_in_use_names_its_owner(path: Path) -> None:
    with kvtier.open(path, dram="1MiB", landing="1MiB", chunk_bytes=CHUNK):
        failed = run("verify", str(path))
    assert failed.returncode == 2
    assert f"in use by process {os.getpid()}" in failed.stderr.replace("\n", " ")


def test_doctor_reports_every_check(tmp_path: Path) -> None:
    report = json.loads(run("doctor", str(tmp_path / "not-there-yet"), "--json").stdout)
    names = {
        "native core", "io_uring", "engine for 'auto'", "huge pages", "locked memory", "CUDA", "torch",
        "transformers", "aiofiles", "free space", "writable", "O_DIRECT", "reservation",
    }  # fmt: skip
    assert set(report) == names
    for check in report.values():
        assert check["ok"] or check["advice"], "what is missing comes with what to do"
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"


def test_doctor_says_why_there_is_no_native_core() -> None:
    found = subprocess.run(
        [sys.executable, "-P", "-m", "kvtier", "doctor", "--json"],
        capture_output=True, text=True, timeout=60, check=True, env={**os.environ, "KVTIER_NATIVE": "0"},
    )  # fmt: skip
    report = json.loads(found.stdout)
    assert "KVTIER_NATIVE=0" in report["native core"]["found"]
    assert report["engine for 'auto'"]["found"] == "threads (Python)"
    assert not report["io_uring"]["ok"]
