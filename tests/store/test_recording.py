"""Store.record: what it writes can be replayed, tells nothing else, and never hurts the store."""

from __future__ import annotations

import json
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtier
from kvtier.errors import InvalidRequest, StoreClosed, TierUnavailable
from kvtier.replay import formats
from kvtier.replay.run import replay
from kvtier.store import recording

if TYPE_CHECKING:
    from pathlib import Path

SMALL = {"dram": "1MiB", "chunk_bytes": "4KiB"}


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def turn(store: kvtier.Store, keys: list[Any]) -> None:
    """As an engine does it: what is stored is read, what is not is computed and put."""
    found = store.match(keys)
    if found:
        assert store.get(keys[:found], into=np.empty((found, 4096), np.uint8)).result(20).ok
    if found < len(keys):
        assert store.put(keys[found:], np.ones((len(keys) - found, 4096), np.uint8)).result(20).ok


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_recording_is_replayed_as_the_requests_that_were_made(tmp_path: Path, keys: Any, name: str) -> None:
    with kvtier.open(**SMALL) as store, store.record(tmp_path / name) as made:
        for count in (3, 5, 5, 8):
            turn(store, keys(count))
        with store.reserve(keys(10)[8:], 4096) as reservation:
            reservation.commit().result(20)
    assert (made.dropped, made.error, made.is_closed) == (0, None, True)
    [trace] = formats.read([tmp_path / name])
    assert trace.requests[:4] == [list(range(3)), list(range(5)), list(range(5)), list(range(8))]
    assert trace.unique == 10
    row = replay(trace, trace.keys(), "lru", 100)
    assert row["hits"] == 3 + 5 + 5


def test_neither_keys_nor_anything_comparable_is_in_it(tmp_path: Path, keys: Any) -> None:
    names = keys(4)
    with kvtier.open(**SMALL) as store:
        for name in ("a", "b"):
            with store.record(tmp_path / name):
                store.match(names)
    head, line, end = read_lines(tmp_path / "a")
    assert head["kvtier_trace"] == 1
    assert (line["op"], len(line["keys"]), {len(key) for key in line["keys"]}) == ("match", 4, {16})
    assert end == {"end": end["end"], "dropped": 0}
    assert not set(line["keys"]) & set(read_lines(tmp_path / "b")[1]["keys"])
    text = (tmp_path / "a").read_text()
    assert not any(key.hex()[:16] in text for key in names)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_closing_the_store_ends_it(tmp_path: Path, keys: Any) -> None:
    store = kvtier.open(**SMALL)
    made = store.record(tmp_path / "a")
    turn(store, keys(2))
    store.close()
    assert made.is_closed
    assert "end" in read_lines(tmp_path / "a")[-1]
    assert not [thread for thread in threading.enumerate() if thread.name == "kvtier-record"]
    with pytest.raises(StoreClosed):
        store.record(tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_what_comes_too_fast_is_dropped_and_counted(
    tmp_path: Path, keys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "_MOST_KEYS", 10)
    monkeypatch.setattr(recording, "_PAUSE", 60.0)
    with kvtier.open(**SMALL) as store:
        made = store.record(tmp_path / "a")
        for _ in range(50):
            store.match(keys(4))
        made.close()
    assert made.dropped == 48
    *lines, end = read_lines(tmp_path / "a")
    assert (len(lines) - 1, end["dropped"]) == (2, 48)


def test_a_full_disk_ends_the_recording_and_not_the_store(tmp_path: Path, keys: Any) -> None:
    with kvtier.open(**SMALL) as store:
        with pytest.raises(InvalidRequest, match="exists"):
            store.record("/dev/full")
        made = store.record(tmp_path / "a")
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, made._fd)
        os.close(full)
        turn(store, keys(3))
        made._thread.join(20)
        assert made.is_closed
        assert isinstance(made.error, OSError)
        turn(store, keys(5))


def test_wrong_calls(tmp_path: Path) -> None:
    with kvtier.open(**SMALL) as store:
        (tmp_path / "there").touch()
        with pytest.raises(InvalidRequest, match="exists: give the recording a new name"):
            store.record(tmp_path / "there")
        with pytest.raises(InvalidRequest, match="there is no directory"):
            store.record(tmp_path / "none" / "a")
        with pytest.raises(TierUnavailable, match="cannot create"):
            store.record(tmp_path / ("a" * 300))
        with store.record(tmp_path / "a"), pytest.raises(InvalidRequest, match="already"):
            store.record(tmp_path / "b")
        store.record(tmp_path / "b").close()
