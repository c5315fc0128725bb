"""A run against a server that speaks the protocol, whose cache is said to be in the directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.cli.accept.command import accept
from kvtier.cli.accept.state import State
from kvtier.cli.accept.verdict import Gate, at_least
from kvtier.cli.bench.recovery import counters
from kvtier.cli.bench.recovery.client import EndpointError
from openai_server import Behaviour, Server

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL: dict[str, Any] = {
    "short": True, "model": "tiny", "clear_post": "/clear", "tokens": 20, "output_tokens": 4,
    "concurrency": (1, 3), "settle": 0.0, "name": "server", "ttft_lower": -1e9, "throughput_higher": -1e9,
    "keep_going": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _page_cache_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the whole machine's."""
    monkeypatch.setattr(counters, "_DROP_CACHES", Path("/proc/no such file"))


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


@pytest.fixture
def run(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The main gate alone: the others are no affair of the server's."""
    from kvtier.cli.accept import run as gates

    def sound(context: Any) -> Any:
        return [at_least("sound", 1.0, 1.0)], {}

    for name in ("G1", "G2", "G4"):
        monkeypatch.setitem(gates.GATES, name, sound)
    (tmp_path / "storage").mkdir()

    def call(**options: Any) -> tuple[int, dict[str, Any]]:
        report = tmp_path / "report"
        code = accept(tmp_path / "storage", report=report, url=server.url, **{**SMALL, **options})
        return code, json.loads((report / "report.json").read_text())["gates"][2]

    return call


def checks(gate: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in gate["checks"]}


def test_every_trial_has_sessions_of_its_own(run: Any, server: Server) -> None:
    code, gate = run()
    assert (code, gate["outcome"]) == (0, "passed")
    sent = [json.dumps(body["prompt"]) for body in server.seen if len(body["prompt"]) == 20]
    assert len(sent) == 3 * 2 * 4
    assert {sent.count(prompt) for prompt in sent} == {2}
    found = checks(gate)
    assert found["prompt tokens from the cache"]["value"] == pytest.approx(95.0)
    assert found["sessions with other output"]["value"] == 0
    assert [row["concurrency"] for row in gate["figures"]["rows"]] == [1, 3]
    assert "POST /clear" in gate["figures"]["trials"][0]["forgotten"]


def test_a_server_that_forgets_fails(run: Any, server: Server) -> None:
    server.behaviour.keeps = False
    code, gate = run()
    assert (code, gate["outcome"]) == (1, "failed")
    assert checks(gate)["prompt tokens from the cache"]["ok"] is False


def test_sessions_that_fail_are_counted(run: Any, server: Server) -> None:
    server.behaviour.afterwards = Behaviour(dies_after=1)
    with pytest.raises(EndpointError):  # the probe after the restart says so first
        run()
    server.behaviour = Behaviour()
    assert run()[0] == 0, "the same command goes on"


def test_goodput_counts_what_is_fast_enough(run: Any, server: Server) -> None:
    _, gate = run(max_ttft=100.0, max_tpot_ms=1e6)
    assert {row["good_percent"] for row in gate["figures"]["rows"]} == {100.0}
    assert checks(gate)["goodput, 3 at once"]["value"] > 0
    assert checks(gate)["TTFT p99, 3 at once"]["ok"] is True


def test_nothing_is_fast_enough(run: Any) -> None:
    code, gate = run(max_ttft=1e-9)
    assert code == 1
    assert {row["good_percent"] for row in gate["figures"]["rows"]} == {0.0}
    assert checks(gate)["TTFT p99, 3 at once"]["ok"] is False


def test_a_server_that_is_gone_is_not_the_storage_s_fault(run: Any, server: Server, tmp_path: Path) -> None:
    server.behaviour.status = 500
    with pytest.raises(EndpointError, match="answered 500"):
        run()
    with State(
        tmp_path / "report", json.loads((tmp_path / "report/state.json").read_text())["config"]
    ) as state:
        assert Gate.of(state.get("G2")).outcome == "passed"
        assert state.get("G3") is None
