"""`kvtier bench` on small sizes: what its reports hold, and what it proves. No figure is judged here."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvtier.cli.bench import app, fio
from kvtier.cli.bench.copy import copy
from kvtier.cli.bench.data import Amount, Data
from kvtier.cli.bench.keys import keys
from kvtier.cli.bench.measure import Contender, Meter, Sample, interleave, rows
from kvtier.cli.bench.mixed import mixed
from kvtier.cli.bench.place import ReadCounter
from kvtier.cli.bench.read import read
from kvtier.cli.bench.write import write
from kvtier.errors import InvalidRequest, TierUnavailable
from kvtier.io import uring_obstacle
from kvtier.testing.emulated import device_stats

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL: dict[str, Any] = {"gib": 0.02, "chunk_mib": 1.0, "rounds": 1}
FIELDS = {"name", "gb_s", "fraction_of_fio", "cpu_s_per_gb", "p50_ms", "p99_ms", "cold"}
ENGINES = [*([] if uring_obstacle() else ["kvtier-uring"]), "kvtier-threads", "kvtier-aio"]
AIOFILES = ["aiofiles"] if importlib.util.find_spec("aiofiles") else []
FIO = ["fio"] if fio.is_installed() else []
ROWS = [*FIO, "serial", "threads32", *AIOFILES, *ENGINES, *(f"{name}-leased" for name in ENGINES)]


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
    return report


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in report["rows"]}


def test_read_reports_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(read, tmp_path, path=[tmp_path], **SMALL)
    assert [row["name"] for row in report["rows"]] == ROWS
    assert report["machine"]["cores"] == os.cpu_count()
    assert report["machine"]["device"].startswith(str(tmp_path))
    assert report["command"].startswith("kvtier")
    assert report["checksum_cpu_s_per_gb"] > 0
    for row in report["rows"]:
        assert row.keys() >= FIELDS
        assert row["gb_s"] > 0
        assert row["cpu_s_per_gb"] >= 0
        assert row["cold"] is not False
        assert (row["fraction_of_fio"] is not None) == bool(FIO)
        if row["name"].endswith("-leased"):
            assert row["p50_ms"] is row["p99_ms"] is None
        else:
            assert 0 < row["p50_ms"] <= row["p99_ms"]
    shown = capsys.readouterr().out
    assert all(name in shown for name in ROWS)
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"], "the data is removed"


def test_reads_are_cold_by_the_counters_of_the_device(tmp_path: Path) -> None:
    report = report_of(read, tmp_path, device="instant", **SMALL)
    assert [row["name"] for row in report["rows"]] == ROWS
    assert {row["cold"] for row in report["rows"]} == {True}
    assert report["machine"]["device"] == "emulated instant"


def test_several_devices(tmp_path: Path, no_fio: None) -> None:
    report = report_of(read, tmp_path, device="nvmeof-4", **SMALL, engine=["threads"])
    assert {row["cold"] for row in report["rows"]} == {True}
    assert report["machine"]["device"] == "emulated nvmeof-4 (4 devices)"


@pytest.mark.skipif(not FIO, reason="fio is not installed")
def test_fio_reads_several_directories(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    report = report_of(read, tmp_path, path=[tmp_path / "one", tmp_path / "two"], engine=["threads"], **SMALL)
    assert by_name(report)["fio"]["fraction_of_fio"] == 1.0
    assert report["fio_probe"]


def test_without_counters_nothing_is_called_cold(tmp_path: Path, no_fio: None) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir():
        pytest.skip("no tmpfs here")
    report = report_of(read, tmp_path, path=[memory], engine=["threads"], **SMALL)
    assert {row["cold"] for row in report["rows"]} == {None}


def test_without_fio_its_row_is_absent(tmp_path: Path, no_fio: None) -> None:
    report = report_of(read, tmp_path, path=[tmp_path], engine=["threads"], **SMALL)
    assert "fio" not in by_name(report)
    assert "apt-get install fio" in report["absent"]["fio"]
    assert {row["fraction_of_fio"] for row in report["rows"]} == {None}


def test_engines_can_be_chosen(tmp_path: Path, no_fio: None) -> None:
    report = report_of(read, tmp_path, path=[tmp_path], engine=["threads", "aio"], **SMALL)
    ours = [name for name in by_name(report) if name.startswith("kvtier")]
    assert ours == ["kvtier-threads", "kvtier-aio", "kvtier-threads-leased", "kvtier-aio-leased"]
    assert report["absent"]["kvtier-uring"] == "not asked for"


def test_without_the_native_core(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; from kvtier.cli.bench.read import read;"
        f"read(path=[Path({str(tmp_path)!r})], gib=0.02, chunk_mib=1, rounds=1, json=Path('report.json'))"
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


def test_keys(tmp_path: Path) -> None:
    report = report_of(keys, tmp_path, tokens=1000, rounds=2)
    assert [(row["name"], row["chunks"]) for row in report["rows"]] == [("keys-256", 3), ("keys-16", 62)]
    for row in report["rows"]:
        assert min(row["keys_ms"], row["match_ms"]) > 0
        assert row["p99_ms"] >= row["total_ms"]


def test_copy(tmp_path: Path) -> None:
    report = report_of(copy, tmp_path, gib=0.02, rounds=2)
    found = by_name(report)
    assert {"memmove", "kvtier-get"} <= found.keys()
    assert found.keys() | report["absent"].keys() >= {"copy_many", "gather", "scatter"}
    assert all(row["fraction_of_best"] > 0 for row in report["rows"])


def test_mixed(tmp_path: Path) -> None:
    report = report_of(mixed, tmp_path, path=[tmp_path], seconds=0.3, **SMALL)
    found = by_name(report)
    assert list(found) == ["reads", "reads-under-writes"]
    assert found["reads"]["write_gb_s"] == 0
    assert all(0 < row["p50_ms"] <= row["p99_ms"] for row in report["rows"])
    assert report["p99_ratio"] > 0


def test_the_command_line_takes_lists(tmp_path: Path) -> None:
    words = ["read", "--path", "a", "--path", "b", "--engine", "threads", "--engine", "aio", "--gib", "0.5"]
    command, bound, _ = app.parse_args(words)
    assert command is read
    assert bound.arguments == {"path": [Path("a"), Path("b")], "engine": ["threads", "aio"], "gib": 0.5}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gib": 0.001}, "below one chunk"),
        ({"gib": 0.003, "chunk_mib": 1.0, "device": "nvmeof-4"}, "do not go round 4 devices"),
        ({"chunk_mib": 0.01}, "--chunk-mib is 0.01"),
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


def test_the_picture(tmp_path: Path, no_fio: None) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    read(path=[tmp_path], engine=["threads"], plot=picture, **SMALL)
    assert picture.read_bytes().startswith(b"\x89PNG")


class Counter(ReadCounter):
    """Counts what it is told."""

    def __init__(self, *counts: int | None) -> None:
        self._next = iter(counts)
        self.slack = 0.0

    def read(self) -> int | None:
        return next(self._next)


@pytest.mark.parametrize(
    ("after", "cold"), [(1500, True), (1499, False), (1501, False), (500, False), (None, None)]
)
def test_cold_is_what_the_device_delivered(after: int | None, cold: bool | None) -> None:
    with Meter(Counter(500, after), 1000) as meter:
        pass
    assert meter.sample().cold is cold


def test_a_file_system_without_counters_counts_nothing() -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or device_stats(memory):
        pytest.skip("no tmpfs here")
    assert ReadCounter([memory]).read() is None


def test_rounds_are_interleaved_and_the_first_is_discarded() -> None:
    order: list[str] = []
    contenders = [Contender(name, lambda: Sample(10**9, len(order))) for name in ("fio", "one", "two")]
    samples = interleave(contenders, 4, 1, order.append)
    assert all(len(found) == 4 for found in samples.values())
    passes = [order[i : i + 3] for i in range(0, 15, 3)]
    assert all(sorted(names) == ["fio", "one", "two"] for names in passes)
    assert len({tuple(names) for names in passes}) > 1


def test_fractions_are_medians_of_ratios() -> None:
    seconds = {"fio": (1.0, 2.0, 4.0), "one": (2.0, 2.0, 2.0)}
    contenders = [Contender(name, lambda: Sample(0, 1)) for name in seconds]
    samples = {name: [Sample(10**9, wall, cold=True) for wall in walls] for name, walls in seconds.items()}
    samples["one"][2] = Sample(10**9, 2.0, cold=False, latencies_s=[0.001, 0.003])
    found = {row.name: row for row in rows(contenders, samples)}
    assert found["one"].fraction_of_fio == 1.0
    assert found["one"].gb_s == 0.5
    assert found["one"].cold is False
    assert found["fio"].cold is True
    assert found["one"].p50_ms is not None
    assert math.isclose(found["one"].p50_ms, 2.0)


def test_bytes_that_were_not_read_are_noticed(tmp_path: Path) -> None:
    data = Data([tmp_path], Amount(4, 64 << 10), lambda: None)
    memory = np.stack([np.fromfile(file, np.uint8) for file in data.files])
    data.check(memory)
    data.smudge(memory[2:3])
    with pytest.raises(AssertionError, match="chunk 2 was not read"):
        data.check(memory)
