"""`kvtier bench cold-recovery` against a real HTTP server that speaks the protocol, rightly and wrongly."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.cli.bench.recovery import counters
from kvtier.cli.bench.recovery.client import Endpoint, EndpointError, hit_tokens
from kvtier.cli.bench.recovery.command import cold_recovery
from kvtier.cli.bench.recovery.counters import DeviceReads, drop_files
from kvtier.cli.bench.recovery.course import plan_waves
from kvtier.cli.bench.recovery.sessions import make_prompts
from kvtier.errors import InvalidRequest, TierUnavailable
from kvtier.testing.emulated import EmulatedDevice
from openai_server import Behaviour, Server

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL: dict[str, Any] = {
    "model": "tiny", "concurrency": (1, 3), "tokens": 20, "output_tokens": 4, "settle": 0.0,
    "clear_post": "/clear",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _page_cache_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the whole machine's."""
    monkeypatch.setattr(counters, "_DROP_CACHES", Path("/proc/no such file"))


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


def run(server: Server, tmp_path: Path, **arguments: Any) -> dict[str, Any]:
    """Run it, and load what it wrote."""
    cold_recovery(url=server.url, json=tmp_path / "report.json", **{**SMALL, **arguments})
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    return report


def test_every_session_is_stored_once_and_asked_for_once(server: Server, tmp_path: Path) -> None:
    run(server, tmp_path)
    sent = [json.dumps(body["prompt"]) for body in server.seen if len(body["prompt"]) == 20]
    assert len(sent) == 8
    assert {sent.count(prompt) for prompt in sent} == {2}
    assert sorted(sent[:4]) == sorted(sent[4:])
    assert all(body["temperature"] == 0 and body["stream"] for body in server.seen)


def test_report(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(server, tmp_path)
    names = [row["name"] for row in report["rows"]]
    assert names == [f"{verb}, {n} at once" for verb in ("storing", "recovering") for n in (1, 3)]
    for row in report["rows"]:
        assert 0 < row["ttft_p50_s"] <= row["ttft_p90_s"] <= row["ttft_p99_s"]
        assert row["ttft_mean_s"] > 0
        assert row["tpot_ms"] > 0
        assert row["tokens_per_s"] > 0
        assert row["failed"] == 0
        assert row["cached_by"] == "usage"
        assert row["read_gb"] is None
    stored, recovered = report["rows"][:2], report["rows"][2:]
    assert [row["cached_tokens"] for row in stored] == [0, 0]
    assert [row["cached_tokens"] for row in recovered] == [19, 57]
    assert [row["cached_fraction"] for row in recovered] == [0.95, 0.95]
    assert [row["same_tokens"] for row in recovered] == [True, True]
    assert [gain["concurrency"] for gain in report["gains"]] == [1, 3]
    assert report["cleared"] == "after POST /clear"
    assert "page cache not dropped" in report["page_cache"]
    shown = capsys.readouterr().out
    assert "times sooner than when stored" in shown
    assert "not proved" in shown


def test_a_server_that_forgets_has_no_hits(server: Server, tmp_path: Path) -> None:
    server.behaviour.keeps = False
    report = run(server, tmp_path)
    assert [row["cached_tokens"] for row in report["rows"]] == [0, 0, 0, 0]


def test_more_sessions_than_the_waves_need_are_stored_only(server: Server, tmp_path: Path) -> None:
    report = run(server, tmp_path, sessions=9)
    assert [row["sessions"] for row in report["rows"]] == [1, 3, 3, 2, 1, 3]


def test_a_restart_command_runs_between(server: Server, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    command = f"{sys.executable} -c \"open('{mark}', 'w').write('ran')\""
    report = run(server, tmp_path, clear_post=None, restart_command=command)
    assert mark.read_text() == "ran"
    assert report["cleared"].endswith(command)


def test_a_restart_command_that_fails(server: Server, tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match="ended with 3"):
        run(server, tmp_path, clear_post=None, restart_command="exit 3")


def test_other_tokens_are_told(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.behaviour.afterwards = Behaviour(other_tokens=True)
    report = run(server, tmp_path)
    assert [row["same_tokens"] for row in report["rows"][2:]] == [False, False]
    assert report["rows"][3]["different"] == [1, 2, 3]
    assert "sessions [1, 2, 3]" in capsys.readouterr().out


def test_without_usage_the_metrics_tell_hits(server: Server, tmp_path: Path) -> None:
    server.behaviour.tells_usage, server.behaviour.has_metrics = False, True
    recovered = run(server, tmp_path)["rows"][2:]
    assert [(row["cached_tokens"], row["cached_by"]) for row in recovered] == [
        (19, "/metrics"),
        (57, "/metrics"),
    ]
    assert [row["cached_fraction"] for row in recovered] == [None, None]


def test_without_usage_and_metrics_hits_are_unknown(server: Server, tmp_path: Path) -> None:
    server.behaviour.tells_usage = False
    for row in run(server, tmp_path)["rows"]:
        assert row["cached_tokens"] is row["cached_fraction"] is None
        assert row["tokens_per_s"] > 0


def test_a_server_of_the_bare_standard(server: Server, tmp_path: Path) -> None:
    server.behaviour.takes_extensions = False
    report = run(server, tmp_path)
    assert [row["same_tokens"] for row in report["rows"][2:]] == [True, True], "compared as text"


def test_chat_and_text(server: Server, tmp_path: Path) -> None:
    report = run(server, tmp_path, api="chat", prompt="text")
    assert [row["cached_tokens"] for row in report["rows"][2:]] == [19, 57]


def test_a_server_that_dies_while_it_stores(server: Server, tmp_path: Path) -> None:
    prompts = make_prompts(1, 5, "ids", vocabulary=100, seed=0)
    Endpoint(server.url, "tiny").probe(prompts[0])
    server.behaviour.dies_after = 2
    with pytest.raises(
        EndpointError, match=r"session \d could not be stored: the stream ended before its end"
    ):
        run(server, tmp_path)


def test_a_server_that_dies_after_the_restart(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.behaviour.afterwards = Behaviour(dies_after=3)
    with pytest.raises(EndpointError, match="4 of the sessions failed"):
        run(server, tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert [row["failed"] for row in report["rows"]] == [0, 0, 1, 3]
    assert report["rows"][2]["ttft_p50_s"] is None
    assert "did the server die?" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (Behaviour(streams=False), "does not stream"),
        (Behaviour(status=500), "answered 500: out of order"),
        (Behaviour(status=404), "answered 404: out of order"),
        (Behaviour(says=b"{not json"), "holds what is no event"),
        (Behaviour(says=b"[1]"), "holds what is no event"),
        (Behaviour(says=b'{"error": {"message": "no memory"}}'), "no memory"),
        (Behaviour(dies_after=0), "ended before its end"),
    ],
)
def test_a_server_that_answers_wrongly(
    server: Server, tmp_path: Path, behaviour: Behaviour, message: str
) -> None:
    server.behaviour = behaviour
    with pytest.raises(EndpointError, match=message):
        run(server, tmp_path)


def test_no_server() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(EndpointError, match="no server answers"):
        cold_recovery(url=url, **SMALL)
    with pytest.raises(EndpointError, match="not ready again after 0 s: no server answers"):
        Endpoint(url, "tiny").wait(0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": "localhost:8000"}, "needs to be such as http://localhost:8000"),
        ({"clear_post": None}, "say how the server loses its caches"),
        ({"restart_command": "true"}, "by one of"),
        ({"clear_post": "clear"}, "needs a path"),
        ({"clear_post": None, "pause": True}, "there is no terminal"),
        ({"sessions": 3}, "waves of 1, 3 need 4"),
        ({"concurrency": ()}, "needs different numbers"),
        ({"concurrency": (2, 2)}, "needs different numbers"),
        ({"concurrency": (0,)}, "from 1 up"),
        ({"tokens": 0}, "need at least 1"),
        ({"vocabulary": 1}, "needs at least 2"),
        ({"api": "chat"}, "add --prompt text"),
        ({"path": [Path("/no/such/directory")]}, "is no directory"),
        ({"json": Path("/no/such/directory/file.json")}, "there is no directory"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        cold_recovery(**{"url": "http://127.0.0.1:1", **SMALL, **arguments})


def test_a_model_that_is_not_served(server: Server) -> None:
    with pytest.raises(EndpointError, match="does not serve 'huge'; it serves 'tiny'"):
        cold_recovery(url=server.url, **{**SMALL, "model": "huge"})


def test_a_url_may_have_its_version(server: Server) -> None:
    Endpoint(f"{server.url}/v1/", "tiny").check_model()


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_picture(server: Server, tmp_path: Path) -> None:
    run(server, tmp_path, plot=tmp_path / "picture.png", sessions=7)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_prompts_are_distinct_and_the_same_again() -> None:
    for kind in ("ids", "text"):
        prompts = make_prompts(20, 10, kind, vocabulary=1000, seed=1)  # type: ignore[arg-type]
        heads = {prompt[0] if isinstance(prompt, list) else prompt.split()[0] for prompt in prompts}
        assert len(heads) == 20
        assert prompts == make_prompts(20, 10, kind, vocabulary=1000, seed=1)  # type: ignore[arg-type]
        assert prompts != make_prompts(20, 10, kind, vocabulary=1000, seed=2)  # type: ignore[arg-type]
    assert all(
        250 <= token < 1000
        for prompt in make_prompts(3, 50, "ids", vocabulary=1000, seed=0)
        for token in prompt
    )


def test_waves_share_no_session() -> None:
    assert plan_waves((1, 2)) == [[0], [1, 2]]
    assert plan_waves((1, 2), 6) == [[0], [1, 2], [3, 4], [5]]


def test_hits_by_metrics() -> None:
    lines = [
        'vllm:prefix_cache_hits_total{m="a"} 3.0',
        'vllm:external_prefix_cache_hits_total{m="a"} 4.0',
        "x 1",
    ]
    assert hit_tokens(lines) == 7.0
    assert hit_tokens(['sglang:cached_tokens_total{m="a"} 5']) == 5.0
    assert hit_tokens(["vllm:prefix_cache_queries_total 3.0"]) is None


def test_reads_of_an_emulated_device_are_counted() -> None:
    try:
        device = EmulatedDevice(size="16MiB")
    except TierUnavailable as error:
        pytest.skip(str(error))
    with device:
        file = device.paths[0] / "file"
        file.write_bytes(bytes(1 << 20))
        reads = DeviceReads([device.paths[0]])
        assert drop_files([device.paths[0]]) == "page cache dropped of 1 of 1 files"
        before = reads.read()
        file.read_bytes()
        after = reads.read()
        assert before is not None
        assert after is not None
        assert after - before >= 1 << 20


def test_reads_of_a_block_device_are_counted(tmp_path: Path) -> None:
    reads = DeviceReads([tmp_path])
    if reads.why_not:
        pytest.skip(reads.why_not)
    file = tmp_path / "file"
    file.write_bytes(bytes(4 << 20))
    drop_files([tmp_path])
    before = reads.read()
    file.read_bytes()
    after = reads.read()
    assert before is not None
    assert after is not None
    assert after - before >= 4 << 20


def test_no_counter_says_why() -> None:
    assert DeviceReads([]).why_not == "no --path was given"
    memory = Path("/dev/shm")
    if memory.is_dir():
        assert "no block device" in DeviceReads([memory]).why_not
        assert DeviceReads([memory]).read() is None
