"""What `kvtier inspect` makes of a store's files, against stores whose use is known."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtier
from kvtier.cli.inspect import inspect as show
from kvtier.cli.usage import SECTIONS, ages, journal, report, room, slots
from kvtier.config import KIB, MIB
from kvtier.tiers.slab.inspection import Inspection, inspect

if TYPE_CHECKING:
    from pathlib import Path

CHUNK = 64 * KIB
SETTINGS: dict[str, Any] = {
    "capacity": 4 * MIB, "dram": 0, "landing": MIB, "chunk_bytes": CHUNK, "part_bytes": CHUNK,
    "io_window": MIB,
}  # fmt: skip


def key(i: int) -> kvtier.ChunkKey:
    return kvtier.ChunkKey(i.to_bytes(32, "little"))


def put(store: kvtier.Store, first: int, count: int, nbytes: int) -> None:
    payloads = [np.zeros(nbytes, np.uint8)] * count
    assert store.put([key(i) for i in range(first, first + count)], payloads, until="disk").result(20).ok


def filled(path: Path, *lots: tuple[int, int], delete: int = 0) -> Inspection:
    """A closed store of `lots` of chunks, count and bytes each, without the first few of them."""
    with kvtier.open(path, **SETTINGS) as store:
        first = 0
        for count, nbytes in lots:
            put(store, first, count, nbytes)
            first += count
        store.delete([key(i) for i in range(delete)]).result(20)
    return inspect(path)


def test_slots_add_up_to_their_extents(tmp_path: Path) -> None:
    found = filled(tmp_path / "store", (5, CHUNK), (7, 5000), (2, CHUNK - 100))
    extent = found.header.extent_bytes
    rows = {row["slot_bytes"]: row for row in slots(found)}
    assert sorted(rows) == [8192, CHUNK]
    for size, row in rows.items():
        assert row["slots"] == row["chunks"] + row["free"] == row["extents"] * (extent // size)
        assert row["payload_bytes"] + row["rounding_bytes"] + row["unused_bytes"] == row["extents"] * extent
    assert rows[CHUNK]["chunks"] == 7
    assert rows[8192]["rounding_bytes"] == 7 * (8192 - 5000) + extent % 8192
    assert rows[CHUNK]["rounding_bytes"] == 2 * 100 + rows[CHUNK]["extents"] * (extent % CHUNK)


@pytest.mark.parametrize("lots", [(), ((3, CHUNK),), ((10, 5000), (9, CHUNK)), ((11, CHUNK - 5000),)])
def test_as_many_chunks_as_it_says_find_room_without_evicting(
    tmp_path: Path, lots: tuple[tuple[int, int], ...]
) -> None:
    path = tmp_path / "store"
    found = room(filled(path, *lots, delete=2))
    assert found["free_share"] == found["free_bytes"] / SETTINGS["capacity"]
    with kvtier.open(path, **SETTINGS) as store:
        for i in range(found["free_chunks"]):
            put(store, 1000 + i, 1, CHUNK)
        assert store.stats()["disk.evictions"] == 0
        put(store, 5000, 1, CHUNK)
        assert store.stats()["disk.evictions"] > 0


def test_ages(tmp_path: Path) -> None:
    before = int(time.time())
    found = ages(filled(tmp_path / "store", (3, CHUNK)))
    assert list(found) == ["oldest_at", "median_at", "newest_at"]
    assert before <= found["oldest_at"] <= found["median_at"] <= found["newest_at"] <= time.time()
    assert set(ages(filled(tmp_path / "empty")).values()) == {None}


def test_journal(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with kvtier.open(path, **SETTINGS) as store:
        put(store, 0, 6, CHUNK)
        store.delete([key(0)]).result(20)
        found = journal(inspect(path))
        tier = store._core.paths[0].tier
        assert not tier.journal.is_due(found["live"])
        tier.journal.records += found["compaction_in_records"]
        assert tier.journal.is_due(found["live"])
        tier.journal.records -= found["compaction_in_records"]
    assert (found["records"], found["live"], found["dead"], found["damaged"]) == (7, 5, 2, 0)
    assert found["limit_bytes"] == tier.journal.limit
    assert found["journal_bytes"] == 8192 + 7 * 128


def test_a_section_that_has_nothing_to_tell_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SECTIONS, "ages", lambda found: None)
    assert set(report(filled(tmp_path / "store"))) == {
        "store",
        "slots",
        "room",
        "owners",
        "journal",
        "faults",
    }


def test_endurance_is_told_where_there_is_a_budget(tmp_path: Path, capsys: Any) -> None:
    assert "endurance" not in report(filled(tmp_path / "without", (3, CHUNK)))
    with kvtier.open(tmp_path / "store", **SETTINGS, endurance=24 * MIB) as store:
        put(store, 0, 3, CHUNK)
        spent = store.stats()["disk.0.endurance_spent"]
    found = report(inspect(tmp_path / "store"))["endurance"]
    assert 3 * CHUNK < spent <= found["spent_bytes"] < spent + CHUNK
    assert MIB - found["spent_bytes"] <= found["left_bytes"] < MIB, "of an hour's worth"
    assert abs(time.time() - found["told_at"]) < 60
    show(tmp_path / "store")
    assert "endurance" in capsys.readouterr().out
