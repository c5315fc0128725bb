"""The peers' run, with a peer that is always there: what is measured, proved and skipped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers import registry
from benchmarks.peers.registry import PEERS, Environments, Peer, chosen
from kvtier.cli.bench import fio
from kvtier.errors import InvalidRequest, TierUnavailable
from kvtier.io import uring_obstacle

HERE = Path(__file__).parent
SMALL: dict[str, Any] = {"gib": 0.01, "chunk_mib": 1.0, "rounds": 1}
FIO = ["fio"] if fio.is_installed() else []
OURS = ["serial", "threads32", *([] if uring_obstacle() else ["kvtier-uring"]), "kvtier-threads"]


class PlainPeer(Peer):
    """A peer whose worker lies beside the tests."""

    @property
    def worker(self) -> Path:
        return HERE / "plain_worker.py"

    @property
    def requirements(self) -> Path:
        return Path(os.devnull)


def plain(*ways: str) -> Peer:
    return PlainPeer("plain", "plain==1", dict.fromkeys(ways, "for tests"), copies=2)


PLAIN = plain("plain-files", "plain-remembered", "plain-garbled")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little memory to populate, and few ways of fio to try."""
    monkeypatch.setenv("KVTIER_LANDING", "4MiB")
    monkeypatch.setattr(fio, "_POINTS", (("psync", 4),))
    monkeypatch.setattr(fio, "_AGAIN", 1)


@pytest.fixture
def envs(tmp_path: Path) -> Path:
    """Environments in which the plain peer is installed, and nothing else."""
    home = tmp_path / "envs/plain"
    (home / "bin").mkdir(parents=True)
    (home / "bin/python").symlink_to(sys.executable)
    (home / registry._STAMP).write_text(registry._pins(PLAIN))
    return tmp_path / "envs"


def report_of(monkeypatch: pytest.MonkeyPatch, envs: Path, peers: tuple[Peer, ...], **arguments: Any) -> Any:
    """Run it, and load what it wrote. Skips where FUSE cannot be had."""
    monkeypatch.setattr(registry, "PEERS", peers)
    file = envs.parent / "report.json"
    try:
        command.run(envs=envs, json=file, **{**SMALL, **arguments})
    except TierUnavailable as error:
        if "device" not in arguments:
            raise
        pytest.skip(str(error))
    return json.loads(file.read_text())


def test_peers_are_measured_beside_kvtier(
    monkeypatch: pytest.MonkeyPatch, envs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(monkeypatch, envs, (PLAIN, PEERS[0]), path=tmp_path)
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == [*FIO, *OURS, *PLAIN.ways]
    assert {name: row["verified"] for name, row in rows.items()} == {
        **dict.fromkeys(FIO),
        **dict.fromkeys(OURS, True),
        "plain-files": True,
        "plain-remembered": True,
        "plain-garbled": False,
    }
    for row in report["rows"]:
        assert row["gb_s"] > 0
        assert row["cpu_s_per_gb"] >= 0
        if "kvtier-uring" in rows:
            assert row["uring_times"] > 0
            assert rows["kvtier-uring"]["uring_times"] == 1.0
    assert 0 < rows["plain-files"]["p50_ms"] <= rows["plain-files"]["p99_ms"]
    assert rows["plain-remembered"]["p50_ms"] is None
    reason = f"not installed in {envs}: python -m benchmarks.peers install lmcache"
    assert report["absent"].items() >= dict.fromkeys(PEERS[0].ways, reason).items()
    assert ("fio" in report["absent"]) == (not FIO)
    assert report["bench"] == "peers"
    assert report["peers"] == {"plain": "plain==1", "lmcache": "lmcache==0.5.6"}
    assert report["machine"]["cores"] == os.cpu_count()
    shown = capsys.readouterr().out
    assert "plain-garbled gave back other bytes than were stored" in shown
    assert f"lmcache-disk is absent: {reason}" in shown
    assert {file.name for file in tmp_path.iterdir()} == {"envs", "report.json"}, "the data is removed"


def test_cold_is_proved_by_the_device(monkeypatch: pytest.MonkeyPatch, envs: Path) -> None:
    report = report_of(monkeypatch, envs, (PLAIN,), device="instant")
    cold = {row["name"]: row["cold"] for row in report["rows"]}
    assert cold.pop("plain-remembered") is False, "it read nothing"
    assert set(cold.values()) == {True}
    assert report["machine"]["device"] == "emulated instant"


def test_cold_is_proved_by_the_worker_s_own_counter(
    monkeypatch: pytest.MonkeyPatch, envs: Path, tmp_path: Path
) -> None:
    report = report_of(monkeypatch, envs, (PLAIN,), path=tmp_path)
    cold = {row["name"]: row["cold"] for row in report["rows"]}
    if cold["serial"] is None:
        pytest.skip("the file system of temporary files is not counted")
    assert cold["plain-files"] is True
    assert cold["plain-remembered"] is False


def test_without_counters_nothing_is_called_cold(monkeypatch: pytest.MonkeyPatch, envs: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir():
        pytest.skip("no tmpfs here")
    report = report_of(monkeypatch, envs, (PLAIN,), path=memory)
    assert {row["cold"] for row in report["rows"]} == {None}


def test_a_worker_that_fails_is_skipped_with_its_words(
    monkeypatch: pytest.MonkeyPatch, envs: Path, tmp_path: Path
) -> None:
    (envs / "plain/bin/python").unlink()
    (envs / "plain/bin/python").write_text("#!/bin/sh\necho the loader is broken >&2\nexit 3\n")
    (envs / "plain/bin/python").chmod(0o755)
    report = report_of(monkeypatch, envs, (PLAIN,), path=tmp_path)
    assert {row["name"] for row in report["rows"]} == {*FIO, *OURS}
    assert "ended with exit status 3: the loader is broken" in report["absent"]["plain-files"]


def test_an_environment_that_lost_its_interpreter_is_skipped(
    monkeypatch: pytest.MonkeyPatch, envs: Path, tmp_path: Path
) -> None:
    (envs / "plain/bin/python").unlink()
    report = report_of(monkeypatch, envs, (PLAIN,), path=tmp_path)
    assert (
        report["absent"]["plain-files"] == f"cannot start {envs}/plain/bin/python: No such file or directory"
    )


def test_ways_that_do_not_match_are_refused(
    monkeypatch: pytest.MonkeyPatch, envs: Path, tmp_path: Path
) -> None:
    report = report_of(monkeypatch, envs, (plain("plain-files"),), path=tmp_path)
    assert "does not read in the ways" in report["absent"]["plain-files"]


def test_an_environment_of_other_versions_is_refused(envs: Path) -> None:
    (envs / "plain" / registry._STAMP).write_text("plain==0\n")
    assert "was made of other versions" in str(Environments(envs).obstacle(PLAIN))


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_peer_has_a_worker_and_pins(peer: Peer) -> None:
    text = peer.worker.read_text()
    assert all(way in text for way in peer.ways)
    pins = peer.requirements.read_text().splitlines()
    assert pins
    assert all("==" in pin for pin in [*pins, peer.package])


@pytest.mark.slow
def test_install_makes_an_environment_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "plain-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("plain.py", "VERSION = 1\n")
        archive.writestr("plain-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: plain\nVersion: 1\n")
        archive.writestr("plain-1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("plain-1.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    environments = Environments(tmp_path / "envs")
    peer = PlainPeer("plain", str(wheel), {}, copies=1)
    assert "not installed" in str(environments.obstacle(peer))
    environments.install(peer)
    assert environments.obstacle(peer) is None
    python = environments.python(peer)
    subprocess.run([python, "-c", "import plain; assert plain.VERSION == 1"], check=True)
    with pytest.raises(TierUnavailable, match="failed with exit status"):
        environments.install(PlainPeer("plain", "no-such-wheel==1", {}, copies=1))
    assert environments.obstacle(peer) is not None, "a half-made environment is not used"


def test_install_removes_no_other_directory(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/precious").touch()
    with pytest.raises(InvalidRequest, match="is not a virtual environment"):
        Environments(tmp_path).install(PLAIN)
    assert (tmp_path / "plain/precious").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"peer": ["nobody"]}, "no peer 'nobody'; there are lmcache, nixl, sglang"),
        ({"device": "nvmeof-4"}, "--device nvmeof-4 has 4 devices"),
        ({"rounds": 0}, "--rounds is 0"),
        ({"json": Path("/nowhere/report.json")}, "there is no directory /nowhere"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        command.run(**arguments)


def test_peers_can_be_chosen() -> None:
    assert [peer.name for peer in chosen(["sglang", "lmcache"])] == ["sglang", "lmcache"]
    assert chosen([]) == list(PEERS)


def test_the_command_runs_from_the_checkout() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers", "--peer", "nobody"],
        cwd=HERE.parents[1], env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("no peer 'nobody'")
