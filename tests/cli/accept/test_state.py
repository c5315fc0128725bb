"""What a run has done stays done, and is not mixed with another's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.cli.accept.state import FORMAT, VERSION, ReportError, State, write_whole
from kvtier.errors import InvalidRequest

if TYPE_CHECKING:
    from pathlib import Path

CONFIG: dict[str, Any] = {"tokens": 512, "concurrency": (2, 4), "model": None}


def test_a_step_is_run_once(tmp_path: Path) -> None:
    ran: list[str] = []

    def work() -> dict[str, Any]:
        ran.append("once")
        return {"gb_s": 1.5, "rounds": [1, 2]}

    with State(tmp_path / "new" / "report", CONFIG) as state:
        state.begin({"started": "then"})
        assert not state.is_resumed
        assert state.step("G1", work) == {"gb_s": 1.5, "rounds": [1, 2]}
    with State(tmp_path / "new" / "report", CONFIG) as state:
        state.begin({"started": "now"})
        assert state.is_resumed
        assert state.step("G1", work) == {"gb_s": 1.5, "rounds": [1, 2]}
        assert state.get("G2") is None
        assert [run["started"] for run in state.runs] == ["then", "now"]
    assert ran == ["once"]


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    with State(tmp_path, CONFIG) as state:
        state.put("G1", 1)
    with pytest.raises(InvalidRequest, match=r"tokens was 512 and is 1024\).*another --report"):
        State(tmp_path, {**CONFIG, "tokens": 1024})
    with State(tmp_path, CONFIG) as state:
        assert state.get("G1") == 1


@pytest.mark.parametrize(
    "text", ["{", "[]", json.dumps({"format": FORMAT, "version": VERSION + 1}), '{"format": "another"}']
)
def test_what_is_no_state_of_this_version_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(ReportError, match="give another --report"):
        State(tmp_path, CONFIG)
    assert (tmp_path / "state.json").read_text() == text


def test_two_runs_do_not_share_a_report(tmp_path: Path) -> None:
    with State(tmp_path, CONFIG), pytest.raises(ReportError, match="another run writes"):
        State(tmp_path, CONFIG)
    State(tmp_path, CONFIG).close()


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match="cannot write the report"):
        State(tmp_path / "file" / "report", CONFIG)
    with pytest.raises(ReportError, match="cannot write"):
        write_whole(tmp_path / "absent" / "file", "text")


def test_a_kill_leaves_a_whole_state(tmp_path: Path) -> None:
    """Killed while it saves again and again, each state larger than the last."""
    script = (
        "import sys; from pathlib import Path; from kvtier.cli.accept.state import State\n"
        "state = State(Path(sys.argv[1]), {})\n"
        "for i in range(10**9):\n"
        "    state.put(str(i % 50), [i] * 5000)\n"
        "    if i == 20: print('going', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"going\n"
        os.kill(process.pid, signal.SIGKILL)
    with State(tmp_path, {}) as state:
        for i in range(20):
            assert len(state.get(str(i))) == 5000
