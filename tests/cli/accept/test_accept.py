"""The faster of two devices is accepted against the slower; what is wrong with one fails at its gate."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.cli.accept import run as gates
from kvtier.cli.accept import stability
from kvtier.errors import InvalidRequest
from kvtier.testing.faults import Fault

from .conftest import CAPACITY, ENVIRONMENT, FAST, MIB, SECONDS, SLOW, arguments

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvtier.cli.accept.context import Context
    from kvtier.testing.emulated import EmulatedDevice

    from .conftest import Run

pytestmark = pytest.mark.timeout(600)
long = pytest.mark.skipif(
    os.environ.get("ACCEPT") != "long", reason="some minutes of whole runs: set ACCEPT=long for them"
)


def test_the_faster_device_is_accepted_against_the_slower(fast_run: Run, slow_run: Run) -> None:
    assert (fast_run.code, fast_run.outcomes) == (0, ["passed"] * 4), fast_run.report["gates"]
    report = fast_run.report
    assert (report["format"], report["version"], report["passed"]) == ("kvtier-accept", 1, True)
    checks = {check["name"]: check for gate in report["gates"] for check in gate["checks"]}
    slow = {row["concurrency"]: row for row in slow_run.report["gates"][2]["figures"]["rows"]}
    fast = {row["concurrency"]: row for row in report["gates"][2]["figures"]["rows"]}
    for count in (2,):
        lower = 100 * (1 - fast[count]["ttft_p50_s"] / slow[count]["ttft_p50_s"])
        assert checks[f"TTFT lower, {count} at once"]["value"] == pytest.approx(lower)
        assert checks[f"TTFT lower, {count} at once"]["limit"] == 25.0
        assert checks[f"throughput higher, {count} at once"]["limit"] == 29.0
        assert len(fast[count]["ttft_of_trials"]) == 3
    assert checks["read from the device"]["value"] > 3 * 2 * 127 * 65536 / 1e9
    assert checks["reads are cold"]["value"] == 1.0
    assert checks["chunks read and compared"]["value"] > 0
    assert checks["hours of load"]["value"] == pytest.approx(SECONDS / 3600)
    assert len(report["gates"][3]["figures"]["measured"]) == 2
    assert report["target"]["precision"] == "float32"
    assert report["target"]["kv_bytes_per_token"] == 65536
    assert report["settings"]["tokens"] == 128
    assert report["runs"][0]["device"]["emulated"] == "fast-0"


def test_nothing_stays_in_the_directory(fast_run: Run, fast: EmulatedDevice) -> None:
    assert list(fast.paths[0].iterdir()) == []


@long
def test_a_device_as_slow_as_the_baseline_fails_at_the_main_gate(
    accept: Callable[..., Run], mount: Callable[..., EmulatedDevice], slow_run: Run, tmp_path: Path
) -> None:
    found = accept(mount(SLOW), tmp_path / "report", name="same", baseline=slow_run.folder / "report.json")
    assert (found.code, found.outcomes) == (1, ["passed", "passed", "failed", "not run"])
    assert "TTFT lower, 2 at once" in found.failing(3)
    assert "throughput higher, 2 at once" in found.failing(3)


@long
def test_a_device_slower_than_the_baseline_fails_on_the_single_machine(
    accept: Callable[..., Run], mount: Callable[..., EmulatedDevice], fast_run: Run, tmp_path: Path
) -> None:
    found = accept(
        mount(SLOW), tmp_path / "report", baseline=fast_run.folder / "report.json", baseline_tolerance=0.8
    )
    assert found.outcomes == ["passed", "failed", "not run", "not run"]
    assert found.failing(2) >= {"cold reads"}


def test_a_device_slower_than_was_stated_fails_at_arrival(
    accept: Callable[..., Run], mount: Callable[..., EmulatedDevice], tmp_path: Path
) -> None:
    found = accept(mount(SLOW), tmp_path / "report", stated_read="100MB/s")
    assert found.outcomes == ["failed", "not run", "not run", "not run"]
    assert found.failing(1) == {"read"}


def test_a_small_device_fails_at_arrival(
    accept: Callable[..., Run], mount: Callable[..., EmulatedDevice], tmp_path: Path
) -> None:
    found = accept(mount(FAST, CAPACITY - 100 * MIB), tmp_path / "report")
    assert found.outcomes == ["failed", "not run", "not run", "not run"]
    assert found.failing(1) >= {"free space", "capacity reserved"}


@pytest.mark.parametrize(
    ("fault", "failing"),
    [
        (Fault(capacity=300 * MIB), {"capacity reserved"}),
        (Fault(op="read", file="slab", flip_bit=12345, nth=3, count=1), {"wrong blocks", "data verified"}),
        (Fault(op="write", file="slab", torn=4096, nth=2, count=1), {"wrong blocks", "data verified"}),
        (Fault(op="read", file="slab", errno=errno.EIO, count=1), {"errors", "data verified"}),
        (Fault.gone(), None),
    ],
    ids=["smaller than it says", "corrupting reads", "torn writes", "dying", "gone"],
)
def test_a_bad_device_fails_at_arrival(
    accept: Callable[..., Run], fast: EmulatedDevice, tmp_path: Path, fault: Fault, failing: set[str] | None
) -> None:
    fast.inject(fault)
    found = accept(fast, tmp_path / "report")
    fast.clear_faults()
    assert (found.code, found.outcomes) == (1, ["failed", "not run", "not run", "not run"])
    assert found.report["gates"][0]["error"] if failing is None else found.failing(1) >= failing


@long
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault(op="read", file="slab", flip_bit=4321, nth=5), "get.miss.checksum"),
        (Fault(op="read", file="slab", errno=errno.EIO, nth=5, count=3), "get.failed"),
        (Fault(op="any", errno=errno.ENODEV, nth=200), ""),
    ],
    ids=["corrupting", "dying", "gone"],
)
def test_a_device_that_gets_bad_later_fails_at_stability(
    accept: Callable[..., Run],
    fast: EmulatedDevice,
    fast_run: Run,
    slow_run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
    words: str,
) -> None:
    stretch = stability._stretch

    def bad(context: Context, record: dict[str, Any], seconds: float) -> None:
        fast.inject(fault)
        stretch(context, record, seconds)

    monkeypatch.setattr(stability, "_stretch", bad)
    report = fast_run.without("G4", tmp_path / "report")
    found = accept(fast, report, name="fast", baseline=slow_run.folder / "report.json")
    fast.clear_faults()
    assert (found.code, found.outcomes) == (1, ["passed", "passed", "passed", "failed"])
    notes = " ".join(check["note"] for check in found.report["gates"][3]["checks"] if check["ok"] is False)
    assert words in notes
    assert "broken promises" in found.failing(4)
    assert len(found.report["runs"]) == 2


@long
def test_a_device_that_gets_slow_fails_at_stability(
    accept: Callable[..., Run],
    fast: EmulatedDevice,
    fast_run: Run,
    slow_run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measure = stability._measure

    def slower(context: Context, record: dict[str, Any]) -> None:
        if len(record["measured"]) == 1:
            fast.inject(Fault(op="read", file="slab", delay=0.3))
        measure(context, record)
        fast.clear_faults()

    monkeypatch.setattr(stability, "_measure", slower)
    report = fast_run.without("G4", tmp_path / "report", bandwidth_drop=70.0)
    baseline = slow_run.folder / "report.json"
    found = accept(fast, report, name="fast", baseline=baseline, max_drop=70)
    assert found.outcomes == ["passed", "passed", "passed", "failed"]
    assert found.failing(4) == {"read measured again, worst below the median"}


def command(device: EmulatedDevice, folder: Path, model: Path, **options: Any) -> list[str]:
    # Where the tests run in the background SIGINT is ignored, which children inherit.
    script = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from kvtier.cli import main; main()"
    )
    return [sys.executable, "-P", "-c", script, *arguments(device, folder, model, **options)]


@long
def test_killed_and_stopped_it_goes_on_where_it_was(
    fast: EmulatedDevice, fast_run: Run, slow_run: Run, model: Path, tmp_path: Path
) -> None:
    report = fast_run.without("G4", tmp_path / "report")
    environment = {**os.environ, **ENVIRONMENT}
    call = command(fast, report, model, name="fast", baseline=slow_run.folder / "report.json")
    for number, (sent, code) in enumerate(((signal.SIGKILL, -9), (signal.SIGINT, 130))):
        with subprocess.Popen(
            call, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
        ) as process:
            while f'"run": {number + 2}' not in (report / "state.json").read_text():
                assert process.poll() is None
                time.sleep(0.05)
            time.sleep(0.5)
            process.send_signal(sent)
            said = process.communicate(timeout=120)[0].decode()
        assert process.returncode == code, said
    done = subprocess.run(call, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "going on with the run" in " ".join(done.stderr.split())
    found = fast_run.__class__(0, report)
    assert len(found.report["runs"]) == 4
    runs = {stretch["run"] for stretch in found.report["gates"][3]["figures"]["stretches"]}
    assert runs == {2, 3, 4}
    assert found.report["gates"][2] == fast_run.report["gates"][2], "what was done is not done again"


def test_a_finished_run_is_told_again(
    accept: Callable[..., Run], fast: EmulatedDevice, fast_run: Run, slow_run: Run, tmp_path: Path
) -> None:
    report = fast_run.without("nothing", tmp_path / "report")
    found = accept(fast, report, name="fast", baseline=slow_run.folder / "report.json")
    assert found.code == 0
    assert found.report["gates"] == fast_run.report["gates"]


def test_other_settings_are_refused(
    fast: EmulatedDevice, fast_run: Run, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = fast_run.without("nothing", tmp_path / "report")
    done = subprocess.run(
        command(fast, report, model, name="fast", tokens=64), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "tokens was 128 and is 64" in " ".join(done.stderr.split())
    assert os.listdir(fast.paths[0]) == []


def test_a_baseline_that_asked_for_other_things_is_refused(
    accept: Callable[..., Run], fast: EmulatedDevice, fast_run: Run, tmp_path: Path
) -> None:
    baseline = fast_run.folder / "report.json"
    with pytest.raises(InvalidRequest, match="tokens: 128, here 64"):
        accept(fast, tmp_path / "report", baseline=baseline, tokens=64)
    with pytest.raises(InvalidRequest, match=r"has no \[3\] sessions at once, only \[2\]"):
        accept(fast, tmp_path / "report", baseline=baseline, concurrency=[2, 3])
    assert not (tmp_path / "report").exists()


def test_every_gate_is_there() -> None:
    assert list(gates.GATES) == ["G1", "G2", "G3", "G4"]
