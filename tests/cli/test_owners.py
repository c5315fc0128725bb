"""What `kvtier inspect` tells of owners, and `kvtier delete`, run as a person runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtier
from kvtier import Owner
from small_stores import CHUNK, SMALL, WallClock, numbered_key

if TYPE_CHECKING:
    from pathlib import Path

SECRET = bytes(range(32))
ACME, OTHER, BETA = Owner(SECRET, "acme"), Owner(bytes([7]) * 32, "acme"), Owner(tenant="[red]beta")
COUNTS = {ACME: 5, OTHER: 3, BETA: 4, Owner(): 2}


@pytest.fixture(params=["slab", "files"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def path(tmp_path: Path, kind: str) -> Path:
    """A closed store of four owners; of BETA's chunks half are over."""
    path = tmp_path / "store"
    wall = WallClock(time.time() - 7200)
    config = kvtier.StoreConfig(**{**SMALL, "paths": (path,), "kind": kind})
    with kvtier.Store(config, wall=wall) as store:
        number = 0
        for owner, count in COUNTS.items():
            keys = [numbered_key(number + i) for i in range(count)]
            values = np.zeros((count, CHUNK), np.uint8)
            number += count
            half = count // 2 if owner is BETA else 0
            assert store.put(keys[:half], values[:half], until="disk", owner=owner, ttl=60).result(20).ok
            wall.now += 600
            assert store.put(keys[half:], values[half:], until="disk", owner=owner).result(20).ok
    return path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "kvtier", *arguments],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip


def owners(path: Path) -> dict[tuple[str, str], Any]:
    report = json.loads(run("inspect", str(path), "--json").stdout)
    return {(row["tenant"], row["namespace"]): row for row in report["owners"]}


def named(owner: Owner) -> tuple[str, str]:
    return owner.tenant, owner.name.namespace.hex()


def test_inspect_tells_who_owns_what(path: Path, kind: str) -> None:
    rows = owners(path)
    assert {name: row["chunks"] for name, row in rows.items()} == {
        named(owner): count for owner, count in COUNTS.items()
    }
    beta = rows[named(BETA)]
    assert (beta["nbytes"], beta["expired"], beta["named"]) == (4 * CHUNK, 2, True)
    if kind == "slab":  # the time of a file is when it was last used
        assert beta["newest"] - beta["oldest"] == 600
    assert -2 < time.time() - beta["oldest"] < 7300
    shown = run("inspect", str(path)).stdout
    for words in ("[red]beta", "acme", named(ACME)[1][:8], "nobody", *(["110 min"] * (kind == "slab"))):
        assert words in shown
    for words in (SECRET.hex(), numbered_key(3).hex()):
        assert words not in shown + run("inspect", str(path), "--json").stdout


@pytest.mark.parametrize(
    ("options", "deleted"),
    [
        (["--tenant", "acme"], {ACME, OTHER}),
        (["--tenant", "[red]beta"], {BETA}),
        (["--namespace", ACME.name.namespace.hex()], {ACME}),
        (["--namespace", OTHER.name.namespace.hex()[:8].upper(), "--tenant", "acme"], {OTHER}),
        (["--tenant", "nobody"], set()),
    ],
)
def test_delete_deletes_what_it_is_told(path: Path, options: list[str], deleted: set[Owner]) -> None:
    done = run("delete", str(path), *options)
    assert (done.returncode, done.stderr) == (0, "")
    count = sum(COUNTS[owner] for owner in deleted) - (2 if BETA in deleted else 0)  # what is over is gone
    assert f"{count} chunks deleted" in done.stdout
    left = {named(owner): count for owner, count in COUNTS.items() if owner not in deleted}
    found = {name: row["chunks"] - row["expired"] for name, row in owners(path).items()}
    assert {name: count for name, count in found.items() if count} == {
        name: count - (2 if name == named(BETA) else 0) for name, count in left.items()
    }
    assert json.loads(run("inspect", str(path), "--json").stdout)["faults"] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "needs one of them"),
        (["--namespace", "zz"], "no names in this store"),
        (["--namespace", SECRET.hex()], "no names in this store"),
        (["--tenant", "x" * 41], "at most 40"),
    ],
)
def test_delete_refuses_what_names_nobody(path: Path, options: list[str], words: str) -> None:
    failed = run("delete", str(path), *options)
    assert failed.returncode == 2
    assert words in failed.stderr.replace("\n", " ")
    assert "Traceback" not in failed.stderr
    assert sum(row["chunks"] for row in owners(path).values()) == sum(COUNTS.values())


@pytest.mark.parametrize("kind", ["slab"])
def test_delete_of_a_store_in_use_names_its_owner(path: Path) -> None:
    with kvtier.open(path, **SMALL):
        failed = run("delete", str(path), "--tenant", "acme")
    assert failed.returncode == 2
    assert f"in use by process {os.getpid()}" in failed.stderr.replace("\n", " ")


@pytest.mark.parametrize("kind", ["files"])
def test_delete_reaches_those_who_share_the_directory(path: Path) -> None:
    with kvtier.open(path, **SMALL, kind="files") as store:
        keys = [numbered_key(i) for i in range(COUNTS[ACME])]
        assert store.match(keys) == len(keys)
        assert run("delete", str(path), "--tenant", "acme").returncode == 0
        end = time.monotonic() + 20
        while store.match(keys):
            assert time.monotonic() < end
            time.sleep(0.01)


def test_delete_of_what_is_no_store_makes_none(tmp_path: Path) -> None:
    assert run("delete", str(tmp_path), "--tenant", "acme").returncode == 2
    assert list(tmp_path.iterdir()) == []
