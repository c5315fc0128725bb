"""A peer's worker and the driver's end of it, in a process of their own as in a real run."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.peers.worker import Worker
from kvtier.errors import TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

PLAIN = Path(__file__).parent / "plain_worker.py"
CHUNKS, CHUNK_BYTES = 3, 64 << 10


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    """A plain worker that has stored three chunks in `stored`."""
    sources = [tmp_path / f"source-{i}" for i in range(CHUNKS)]
    payloads = [os.urandom(CHUNK_BYTES) for _ in sources]
    for source, payload in zip(sources, payloads, strict=True):
        source.write_bytes(payload)
    (tmp_path / "stored").mkdir()
    with Worker(Path(sys.executable), PLAIN) as running:
        reply = running.ask(
            do="store",
            directory=str(tmp_path / "stored"),
            sources=[str(source) for source in sources],
            sha256=[hashlib.sha256(payload).hexdigest() for payload in payloads],
            chunk_bytes=CHUNK_BYTES,
        )
        assert reply == {"ways": ["plain-files", "plain-remembered", "plain-garbled"]}
        yield running


def script(tmp_path: Path, text: str) -> Path:
    """A worker of that text."""
    file = tmp_path / "odd_worker.py"
    file.write_text(text)
    return file


def test_a_pass_is_timed_and_verified(worker: Worker) -> None:
    for _ in range(2):
        reply = worker.ask(do="load", way="plain-files")
        assert reply["wrong"] == 0
        assert len(reply["latencies"]) == CHUNKS
        assert 0 < sum(reply["latencies"]) <= reply["seconds"]
        assert reply["cpu_seconds"] >= 0
    assert worker.ask(do="load", way="plain-remembered")["latencies"] is None


def test_other_bytes_are_counted(worker: Worker) -> None:
    assert worker.ask(do="load", way="plain-garbled")["wrong"] == 1


def test_bytes_that_changed_on_disk_are_counted(worker: Worker, tmp_path: Path) -> None:
    (tmp_path / "stored/chunk-0").write_bytes(os.urandom(CHUNK_BYTES))
    (tmp_path / "stored/chunk-2").write_bytes(b"short")
    assert worker.ask(do="load", way="plain-files")["wrong"] == 2


def test_a_failure_is_told_and_the_worker_goes_on(worker: Worker, tmp_path: Path) -> None:
    (tmp_path / "stored/chunk-1").rename(tmp_path / "away")
    with pytest.raises(TierUnavailable, match=r"plain_worker: FileNotFoundError: .*chunk-1"):
        worker.ask(do="load", way="plain-files")
    (tmp_path / "away").rename(tmp_path / "stored/chunk-1")
    assert worker.ask(do="load", way="plain-files")["wrong"] == 0


def test_nothing_can_be_loaded_before_it_is_stored() -> None:
    with (
        Worker(Path(sys.executable), PLAIN) as running,
        pytest.raises(TierUnavailable, match="nothing was stored yet"),
    ):
        running.ask(do="load", way="plain-files")


def test_a_worker_that_dies_is_quoted(tmp_path: Path) -> None:
    dying = script(tmp_path, "import no_such_peer")
    with (
        Worker(Path(sys.executable), dying) as running,
        pytest.raises(TierUnavailable, match=r"exit status 1: .*No module named 'no_such_peer'"),
    ):
        running.ask(do="store")


def test_a_worker_that_hangs_is_ended(tmp_path: Path) -> None:
    hanging = script(tmp_path, "import time; time.sleep(1000)")
    with Worker(Path(sys.executable), hanging, timeout=0.2) as running:
        with pytest.raises(TierUnavailable, match=r"did not answer within 0\.2 s"):
            running.ask(do="store")
        running.close()
        assert not Path(f"/proc/{running.pid}").exists()


def test_a_worker_does_not_import_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    telling = script(tmp_path, "import os, sys; sys.exit(f'path {os.environ.get(\"PYTHONPATH\")}')")
    with (
        Worker(Path(sys.executable), telling) as running,
        pytest.raises(TierUnavailable, match="path None"),
    ):
        running.ask(do="store")
