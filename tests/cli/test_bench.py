"""`kvtier bench` on small sizes: what its reports hold, and what it proves. No figure is judged here."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kvtier
from kvtier import _native
from kvtier.cli.bench import app, fio
from kvtier.cli.bench.copy import copy
from kvtier.cli.bench.keys import keys
from kvtier.cli.bench.mixed import mixed
from kvtier.cli.bench.read import read
from kvtier.cli.bench.scale import scale
from kvtier.cli.bench.write import write
from kvtier.errors import InvalidRequest, TierUnavailable
from kvtier.io import uring_obstacle

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL: dict[str, Any] = {"gib": 0.02, "chunk_mib": 1.0, "rounds": 1}
READ: dict[str, Any] = {**SMALL, "chunk_mib": (1.0,)}
FIELDS = {"name", "gb_s", "fraction_of_fio", "cpu_s_per_gb", "p50_ms", "p99_ms", "cold"}
ENGINES = [*([] if uring_obstacle() else ["kvtier-uring"]), "kvtier-threads", "kvtier-aio"]
AIOFILES = ["aiofiles"] if importlib.util.find_spec("aiofiles") else []
FIO = ["fio"] if fio.is_installed() else []
UNCHECKED = ["kvtier-uring-unchecked"] if "kvtier-uring" in ENGINES else []
LEASED = [f"{name}-leased" for name in ENGINES]
ROWS = [*FIO, "serial", "threads32", *AIOFILES, *ENGINES, *LEASED, *UNCHECKED]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little memory to populate, and few ways of fio to try."""
    monkeypatch.setenv("KVTIER_LANDING", "4MiB")
    monkeypatch.setattr(fio, "_POINTS", (("psync", 4), ("libaio", 8)))
    monkeypatch.setattr(fio, "_AGAIN", 1)


@pytest.fixture
def no_fio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fio, "is_installed", lambda: False)


def report_of(run: Callable[..., None], tmp_path: Path, **arguments: Any) -> dict[str, Any]:
    """Run a benchmark, and load what it wrote. Skips where FUSE cannot be had."""
    file = tmp_path / "report.json"
    try:
        run(json=file, **arguments)
    except TierUnavailable as error:
        if "device" not in arguments:
            raise
        pytest.skip(str(error))
    report: dict[str, Any] = json.loads(file.read_text())
    assert report["command"].startswith("kvtier")
    assert report["kvtier"] == kvtier.__version__
    assert abs(datetime.now(UTC) - datetime.fromisoformat(report["date"])) < timedelta(minutes=10)
    assert report["machine"]["cores"] == os.cpu_count()
    assert report["machine"].keys() >= {"cpu", "memory_gib", "kernel", "device"}
    return report


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in report["rows"]}


def test_read_reports_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(read, tmp_path, path=[tmp_path], **READ)
    assert [row["name"] for row in report["rows"]] == ROWS
    assert report["machine"]["device"].startswith(str(tmp_path))
    assert report["checksum_cpu_s_per_gb"] > 0
    for row in report["rows"]:
        assert row.keys() >= FIELDS
        assert row["gb_s"] > 0
        assert row["cpu_s_per_gb"] >= 0
        assert row["cold"] is not False
        assert (row["fraction_of_fio"] is not None) == bool(FIO)
        if row["name"].endswith(("-leased", "-unchecked")):
            assert row["p50_ms"] is row["p99_ms"] is None
        else:
            assert 0 < row["p50_ms"] <= row["p99_ms"]
    shown = capsys.readouterr().out
    assert all(name in shown for name in ROWS)
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"], "the data is removed"


def test_reads_are_cold_by_the_counters_of_the_device(tmp_path: Path) -> None:
    report = report_of(read, tmp_path, device="instant", **READ)
    assert [row["name"] for row in report["rows"]] == ROWS
    assert {row["cold"] for row in report["rows"]} == {True}
    assert report["machine"]["device"] == "emulated instant"


def test_several_devices(tmp_path: Path, no_fio: None) -> None:
    report = report_of(read, tmp_path, device="nvmeof-4", **READ, engine=["threads"])
    assert {row["cold"] for row in report["rows"]} == {True}
    assert report["machine"]["device"] == "emulated nvmeof-4 (4 devices)"


@pytest.mark.skipif(not FIO, reason="needs fio")
def test_more_files_than_fio_takes_leave_its_row_out() -> None:
    assert fio.obstacle(512) == ""
    assert fio.obstacle(2048, 4) == ""
    assert "cannot be told of 2048 files" in fio.obstacle(2048)


@pytest.mark.skipif(not FIO, reason="fio is not installed")
def test_fio_reads_several_directories(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    report = report_of(read, tmp_path, path=[tmp_path / "one", tmp_path / "two"], engine=["threads"], **READ)
    assert by_name(report)["fio"]["fraction_of_fio"] == 1.0
    assert report["fio_probe"]


def test_without_counters_nothing_is_called_cold(tmp_path: Path, no_fio: None) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir():
        pytest.skip("no tmpfs here")
    report = report_of(read, tmp_path, path=[memory], engine=["threads"], **READ)
    assert {row["cold"] for row in report["rows"]} == {None}


def test_without_fio_its_row_is_absent(tmp_path: Path, no_fio: None) -> None:
    report = report_of(read, tmp_path, path=[tmp_path], engine=["threads"], **READ)
    assert "fio" not in by_name(report)
    assert "apt-get install fio" in report["absent"]["fio"]
    assert {row["fraction_of_fio"] for row in report["rows"]} == {None}


def test_engines_can_be_chosen(tmp_path: Path, no_fio: None) -> None:
    report = report_of(read, tmp_path, path=[tmp_path], engine=["threads", "aio"], **READ)
    ours = [name for name in by_name(report) if name.startswith("kvtier")]
    assert ours == ["kvtier-threads", "kvtier-aio", "kvtier-threads-leased", "kvtier-aio-leased"]
    assert report["absent"]["kvtier-uring"] == "not asked for"


def test_without_the_native_core(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; from kvtier.cli.bench.read import read;"
        f"read(path=[Path({str(tmp_path)!r})], gib=0.02, chunk_mib=[1], rounds=1, json=Path('report.json'))"
    )
    environment = {**os.environ, "KVTIER_NATIVE": "0", "PATH": ""}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True, capture_output=True
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["machine"]["native"] is False
    assert "kvtier-threads" in by_name(report)
    assert "KVTIER_NATIVE=0" in report["absent"]["kvtier-uring"]


def test_write(tmp_path: Path) -> None:
    report = report_of(write, tmp_path, path=[tmp_path], **SMALL)
    assert [row["name"] for row in report["rows"]] == [*FIO, *ENGINES]
    assert all(row["gb_s"] > 0 for row in report["rows"])


def test_write_on_several_devices(tmp_path: Path, no_fio: None) -> None:
    report = report_of(write, tmp_path, device="nvmeof-4", engine=["threads"], **SMALL)
    assert list(by_name(report)) == ["kvtier-threads"]


def test_scale(tmp_path: Path, no_fio: None) -> None:
    report = report_of(scale, tmp_path, device="nvmeof-4", engine="threads", **SMALL)
    found = by_name(report)
    assert list(found) == ["kvtier-threads x1", "kvtier-threads x2", "kvtier-threads x4"]
    assert [row["devices"] for row in report["rows"]] == [1, 2, 4]
    assert found["kvtier-threads x1"]["times_one"] == 1.0
    assert all(row["times_one"] > 0 and row["cold"] for row in report["rows"])


@pytest.mark.skipif(not FIO, reason="fio is not installed")
def test_scale_over_directories_beside_fio(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one", "two")]
    for directory in paths:
        directory.mkdir()
    report = report_of(scale, tmp_path, path=paths, **SMALL)
    kinds = ["fio", ENGINES[0]]
    assert list(by_name(report)) == [f"{kind} x{count}" for count in (1, 2) for kind in kinds]
    assert all(row["fraction_of_fio"] > 0 for row in report["rows"])
    assert by_name(report)["fio x2"]["fraction_of_fio"] == 1.0


def test_scale_needs_several_devices(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="--path is given once"):
        scale(path=[tmp_path])


def test_keys(tmp_path: Path) -> None:
    report = report_of(keys, tmp_path, tokens=1000, rounds=2)
    assert [(row["name"], row["chunks"]) for row in report["rows"]] == [("keys-256", 3), ("keys-16", 62)]
    for row in report["rows"]:
        assert min(row["keys_ms"], row["match_ms"]) > 0
        assert row["p99_ms"] >= row["total_ms"]


def test_copy(tmp_path: Path) -> None:
    report = report_of(copy, tmp_path, gib=0.02, rounds=2)
    loops = ["memmove"] if _native.core is None else ["memmove", "copy_many", "copy_hashed"]
    paged = ["gather", "scatter", "gather-4k", "scatter-4k"]
    assert [row["name"] for row in report["rows"]] == [*loops, "kvtier-get", "kvtier-get-checked", *paged]
    assert all(row["fraction_of_best"] > 0 for row in report["rows"])
    with pytest.raises(InvalidRequest, match="--block-kib is 24"):
        copy(block_kib=(24,))


def test_mixed(tmp_path: Path) -> None:
    report = report_of(mixed, tmp_path, path=[tmp_path], seconds=0.3, **SMALL)
    found = by_name(report)
    assert list(found) == ["reads", "reads-under-writes"]
    assert found["reads"]["write_gb_s"] == 0
    assert all(0 < row["p50_ms"] <= row["p99_ms"] for row in report["rows"])
    assert report["p99_ratio"] > 0


def test_the_command_line_takes_lists(tmp_path: Path) -> None:
    words = ["read", "--path", "a", "--path", "b", "--engine", "threads", "--engine", "aio", "--gib", "0.5"]
    words += ["--chunk-mib", "1", "--chunk-mib", "0.25"]
    command, bound, _ = app.parse_args(words)
    assert command is read
    assert bound.arguments == {
        "path": [Path("a"), Path("b")], "engine": ["threads", "aio"], "gib": 0.5, "chunk_mib": (1.0, 0.25)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gib": 0.001}, "below one chunk"),
        ({"gib": 0.003, "chunk_mib": (1.0,), "device": "nvmeof-4"}, "do not go round 4 devices"),
        ({"chunk_mib": (2.0, 0.01)}, "--chunk-mib is 0.01"),
        ({"rounds": 0}, "--rounds is 0"),
        ({"path": [Path("/nowhere")]}, "/nowhere is not a directory"),
        ({"path": [Path("/tmp")], "device": "instant"}, "give either --device or --path"),
        ({"device": "floppy"}, "no profile 'floppy'; there are instant"),
        ({"json": Path("/nowhere/report.json")}, "there is no directory /nowhere"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read(**arguments)


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TierUnavailable, match="lower --gib"):
        read(path=[tmp_path], gib=1e6)
    assert not list(tmp_path.iterdir())


def test_a_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidRequest, match="pip install matplotlib"):
        read(plot=tmp_path / "picture.png")


def test_the_picture_and_what_it_takes(tmp_path: Path, no_fio: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(importlib.import_module(read.__module__), "_LARGEST_WINDOW", 4 << 20)
    picture = tmp_path / "picture.png"
    report = report_of(read, tmp_path, path=[tmp_path], engine=["threads"], plot=picture, **READ)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [size["chunk_mib"] for size in report["chunk_sizes"]] == [1.0, 0.25, 4.0]
    assert all(len(size["rows"]) == len(report["rows"]) for size in report["chunk_sizes"])
    assert report["rows"] == report["chunk_sizes"][0]["rows"]
    assert [point["bytes_in_flight"] >> 20 for point in report["in_flight"]] == [1, 2, 4]
    assert {point["name"] for point in report["in_flight"]} == {"kvtier-threads"}
    assert all(point["gb_s"] > 0 for point in report["in_flight"])
