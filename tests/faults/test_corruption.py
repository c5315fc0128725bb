"""Invariant 1: whatever happens to the files, a HIT is what was put, and all else a counted miss."""

from __future__ import annotations

import os
import random
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xxhash

import kvtier
from kvtier import Reason, Status
from kvtier.format import HEADER, JOURNAL_HEADER_BYTES, RECORD, RECORD_BYTES, SLAB_HEADER_BYTES

if TYPE_CHECKING:
    from pathlib import Path

KIB, MIB = 1 << 10, 1 << 20
PART = 64 * KIB
SIZES = [200 * KIB + 100, 5000, 256 * KIB, 130 * KIB, 1, 600 * KIB]  # one to ten parts; two in MORE records
MISSED = (Reason.ABSENT, Reason.CHECKSUM, Reason.SHORT_READ)
SETTINGS: dict[str, Any] = {"capacity": 12 * MIB, "chunk_bytes": 640 * KIB, "landing": 2 * MIB}


class Filled:
    """A closed store, to be damaged, opened and judged again and again."""

    def __init__(self, path: Path, open_store: Any, payloads: list[Any], keys: list[Any]) -> None:
        self.path = path
        self.open_store = open_store
        self.payloads = payloads
        self.keys = keys
        with open_store(path, **SETTINGS) as store:
            for key, value in zip(keys, payloads, strict=True):
                assert store.put([key], [value], until="disk").result(20).ok
        self.files = {name: (path / name).read_bytes() for name in ("slab", "journal")}

    def restore(self) -> None:
        for name, data in self.files.items():
            (self.path / name).write_bytes(data)

    @property
    def slots(self) -> list[tuple[int, int]]:
        """Per chunk: offset in the slab's file, and bytes stored."""
        records = np.frombuffer(self.files["journal"], RECORD, offset=JOURNAL_HEADER_BYTES)
        records = records[records["kind"] == 1]
        found = {
            r["key"].tobytes(): (SLAB_HEADER_BYTES + int(r["offset"]), int(r["stored_bytes"]))
            for r in records
        }
        return [found[key] for key in self.keys]

    def judge(self, store: Any) -> list[Reason]:
        """Get everything, put what is missing, get it again. The reason of each chunk's first get."""
        before = store.stats()
        targets = [np.empty(len(value), np.uint8) for value in self.payloads]
        result = store.get(self.keys, into=targets).result(20)
        reasons = [Reason(reason) for reason in result.reason.tolist()]
        for i, reason in enumerate(reasons):
            if reason is Reason.NONE:
                assert result.status[i] == Status.HIT
                assert (targets[i] == self.payloads[i]).all(), "wrong bytes"
            else:
                assert result.status[i] == Status.MISS
                assert reason in MISSED
        after = store.stats()
        for reason in MISSED:
            name = f"get.{reason.name.lower()}"
            assert after[name] - before[name] == reasons.count(reason)
        put = store.put(self.keys, self.payloads, until="disk").result(20)
        assert put.ok
        assert [s == Status.STORED for s in put.status.tolist()] == [r is not Reason.NONE for r in reasons]
        targets = [np.empty(len(value), np.uint8) for value in self.payloads]
        assert store.get(self.keys, into=targets).result(20).ok
        for target, value in zip(targets, self.payloads, strict=True):
            assert (target == value).all()
        return reasons

    def reopen(self) -> list[Reason]:
        """Open the damaged files, judge, and once more after closing: all is mended then."""
        with self.open_store(self.path, **SETTINGS) as store:
            reasons = self.judge(store)
        with self.open_store(self.path, **SETTINGS) as store:
            assert self.judge(store) == [Reason.NONE] * len(self.keys)
        return reasons


@pytest.fixture
def filled(tmp_path: Path, open_store: Any, payload: Any, key: Any) -> Filled:
    keys = [key(i) for i in range(len(SIZES))]
    return Filled(tmp_path / "store", open_store, [payload(i, n) for i, n in enumerate(SIZES)], keys)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ random.Random(offset).randint(1, 255)]))


def all_but(i: int, reason: Reason) -> list[Reason]:
    return [reason if j == i else Reason.NONE for j in range(len(SIZES))]


def test_nothing_is_damaged(filled: Filled) -> None:
    assert filled.reopen() == [Reason.NONE] * len(SIZES)


def test_invariant_1_any_byte_of_a_payload(filled: Filled) -> None:
    """First, last, edges of parts, padding, and some between: each costs its own chunk only."""
    rng = random.Random(1)
    for i, (offset, stored) in enumerate(filled.slots):
        places = {0, stored - 1, min(SIZES[i] - 1, stored - 1), min(SIZES[i], stored - 1)}
        places |= {p for e in range(PART, stored, PART) for p in (e - 1, e)}
        for place in [*rng.sample(sorted(places), min(4, len(places))), rng.randrange(stored)]:
            filled.restore()
            flip(filled.path / "slab", offset + place)
            with filled.open_store(filled.path, **SETTINGS) as store:
                assert filled.judge(store) == all_but(i, Reason.CHECKSUM), f"chunk {i}, byte {place}"


def test_invariant_1_any_byte_of_a_payload_while_the_store_is_open(filled: Filled) -> None:
    rng = random.Random(2)
    with filled.open_store(filled.path, **SETTINGS) as store:
        assert filled.judge(store) == [Reason.NONE] * len(SIZES)
        for _ in range(30):
            i = rng.randrange(len(SIZES))
            row = store._core.paths[0].tier.find(filled.keys[i])
            offset = SLAB_HEADER_BYTES + store._core.paths[0].tier.index.offset[row]
            flip(filled.path / "slab", offset + rng.randrange(SIZES[i]))
            assert filled.judge(store) == all_but(i, Reason.CHECKSUM)


def test_invariant_1_a_slab_cut_short(filled: Filled) -> None:
    cuts = {0, 1, 127, 128, 129, SLAB_HEADER_BYTES - 1, SLAB_HEADER_BYTES}
    for offset, stored in filled.slots:
        cuts |= {offset, offset + 1, offset + stored // 2, offset + stored - 1}
    for cut in sorted(cuts):
        filled.restore()
        os.truncate(filled.path / "slab", cut)
        reasons = filled.reopen()
        # The file grows again with zeros, so that padding cut off is no loss.
        whole = [offset + size <= cut for (offset, _), size in zip(filled.slots, SIZES, strict=True)]
        assert [reason is Reason.NONE for reason in reasons] == whole, f"cut at {cut}"


def test_invariant_1_a_slab_cut_short_while_the_store_is_open(filled: Filled) -> None:
    for i in (0, 3, 5):
        filled.restore()
        offset, stored = filled.slots[i]
        with filled.open_store(filled.path, **SETTINGS) as store:
            os.truncate(filled.path / "slab", offset + stored // 2 // 4096 * 4096)
            reasons = filled.judge(store)
            assert reasons[i] is Reason.SHORT_READ
        filled.reopen()


def test_invariant_1_a_journal_cut_anywhere(filled: Filled) -> None:
    length = len(filled.files["journal"])
    cuts = {0, 1, 8, 127, 128, 4096, *range(JOURNAL_HEADER_BYTES, length, RECORD_BYTES)}
    cuts |= {cut + delta for cut in list(cuts) for delta in (1, 60) if cut + delta < length}
    for cut in sorted(cuts):
        filled.restore()
        os.truncate(filled.path / "journal", cut)
        reasons = filled.reopen()
        assert set(reasons) <= {Reason.NONE, Reason.ABSENT}, f"cut at {cut}"
        expected = chunks_whole_in(filled, cut)
        assert [reason is Reason.NONE for reason in reasons] == expected, f"cut at {cut}"


def chunks_whole_in(filled: Filled, cut: int) -> list[bool]:
    records = np.frombuffer(filled.files["journal"], RECORD, offset=JOURNAL_HEADER_BYTES)
    whole = dict.fromkeys(filled.keys, False)
    for number, record in enumerate(records):
        if record["kind"] == 1:
            more = (int(record["parts"]) - 1) // 7
            end = JOURNAL_HEADER_BYTES + (number + more + 1) * RECORD_BYTES
            whole[record["key"].tobytes()] = end <= cut
    return [whole[key] for key in filled.keys]


@pytest.mark.parametrize("seed", range(3))
def test_invariant_1_a_journal_garbled_anywhere(filled: Filled, seed: int) -> None:
    rng = random.Random(seed)
    length = len(filled.files["journal"])
    for _ in range(20):
        filled.restore()
        data = bytearray(filled.files["journal"])
        for _ in range(rng.choice([1, 1, 3])):
            start = rng.randrange(length)
            for place in range(start, min(length, start + rng.choice([1, 8, 128, 300]))):
                data[place] ^= rng.randrange(1, 256)
        (filled.path / "journal").write_bytes(data)
        assert set(filled.reopen()) <= set(MISSED) | {Reason.NONE}


def test_invariant_1_one_garbled_record_costs_one_chunk(filled: Filled) -> None:
    records = np.frombuffer(filled.files["journal"], RECORD, offset=JOURNAL_HEADER_BYTES)
    for number, record in enumerate(records):
        filled.restore()
        flip(filled.path / "journal", JOURNAL_HEADER_BYTES + number * RECORD_BYTES + 20)
        assert filled.reopen().count(Reason.ABSENT) == 1, f"record {number} of kind {record['kind']}"


def test_invariant_1_records_swapped_doubled_and_moved(filled: Filled) -> None:
    """Whole records in other places: each is numbered, so none of them counts."""
    data = filled.files["journal"]
    head, body = data[:JOURNAL_HEADER_BYTES], data[JOURNAL_HEADER_BYTES:]
    records = [body[i : i + RECORD_BYTES] for i in range(0, len(body), RECORD_BYTES)]
    for changed in (records[::-1], records + records, records[1:], [records[-1], *records]):
        filled.restore()
        (filled.path / "journal").write_bytes(head + b"".join(changed))
        assert set(filled.reopen()) <= {Reason.NONE, Reason.ABSENT}


def test_invariant_1_two_slots_swapped(filled: Filled, payload: Any, key: Any) -> None:
    with filled.open_store(filled.path, **SETTINGS) as store:  # of one size, so that they can be swapped
        more = [key(100), key(101)]
        assert store.put(more, [payload(100), payload(101)], until="disk").result(20).ok
        disk = store._core.paths[0].tier
        first, second = (SLAB_HEADER_BYTES + disk.index.offset[disk.find(k)] for k in more)
    slab = bytearray((filled.path / "slab").read_bytes())
    n = 64 * KIB
    slab[first : first + n], slab[second : second + n] = slab[second : second + n], slab[first : first + n]
    (filled.path / "slab").write_bytes(slab)
    with filled.open_store(filled.path, **SETTINGS) as store:
        result = store.get(more, into=[np.empty(n, np.uint8), np.empty(n, np.uint8)]).result(20)
        assert result.reason.tolist() == [Reason.CHECKSUM] * 2
        assert filled.judge(store) == [Reason.NONE] * len(SIZES)


@pytest.fixture
def other(tmp_path: Path, open_store: Any, payload: Any, filled: Filled) -> Filled:
    """A store of the same keys and sizes, with other payloads."""
    payloads = [payload(1000 + i, n) for i, n in enumerate(SIZES)]
    return Filled(tmp_path / "other", open_store, payloads, filled.keys)


@pytest.mark.parametrize("name", ["slab", "journal"])
def test_invariant_1_a_file_of_another_store(filled: Filled, other: Filled, name: str) -> None:
    shutil.copy(other.path / name, filled.path / name)
    assert filled.reopen() == [Reason.CHECKSUM] * len(SIZES)


@pytest.mark.parametrize("name", ["slab", "journal"])
def test_invariant_1_a_file_of_another_store_before_it_was_full(
    filled: Filled, tmp_path: Path, name: str
) -> None:
    with filled.open_store(tmp_path / "empty", **SETTINGS):
        pass
    shutil.copy(tmp_path / "empty" / name, filled.path / name)
    reason = Reason.CHECKSUM if name == "slab" else Reason.ABSENT
    assert filled.reopen() == [reason] * len(SIZES)


def test_invariant_1_an_older_slab_of_the_same_store(filled: Filled, payload: Any) -> None:
    """Stale content under the same keys: another generation, so another seed."""
    with filled.open_store(filled.path, **SETTINGS) as store:
        store.delete(filled.keys).result(20)
        anew = [payload(2000 + i, n) for i, n in enumerate(SIZES)]
        for key, value in zip(filled.keys, anew, strict=True):
            assert store.put([key], [value], until="disk").result(20).ok
    old, filled.payloads = filled.files["slab"], anew
    (filled.path / "slab").write_bytes(old)
    assert set(filled.reopen()) == {Reason.CHECKSUM}


@pytest.mark.parametrize("name", ["slab", "journal"])
@pytest.mark.parametrize("how", ["deleted", "empty", "zeros"])
def test_invariant_1_a_file_lost(filled: Filled, name: str, how: str) -> None:
    path = filled.path / name
    if how == "deleted":
        path.unlink()
    else:
        path.write_bytes(bytes(len(filled.files[name]) if how == "zeros" else 0))
    reasons = filled.reopen()
    assert Reason.NONE not in reasons
    assert set(reasons) == {Reason.ABSENT if name == "journal" else Reason.CHECKSUM}


def test_both_files_lost_is_a_new_store(filled: Filled) -> None:
    for name in filled.files:
        (filled.path / name).unlink()
    assert filled.reopen() == [Reason.ABSENT] * len(SIZES)


def versioned(data: bytes, version: int) -> bytes:
    """The file with a header of another format version, its check valid."""
    header = np.frombuffer(data[:RECORD_BYTES], HEADER).copy()
    header["version"] = version
    body = header.tobytes()[:-8]
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little") + data[RECORD_BYTES:]


@pytest.mark.parametrize("names", [["slab"], ["journal"], ["slab", "journal"]])
@pytest.mark.parametrize("version", [0, 1, 3, 2**32 - 1])
def test_another_format_version_is_left_alone(filled: Filled, names: list[str], version: int) -> None:
    for name in names:
        (filled.path / name).write_bytes(versioned(filled.files[name], version))
    before = {name: (filled.path / name).read_bytes() for name in filled.files}
    with pytest.raises(kvtier.IncompatibleStore, match=rf"version {version}.*on_incompatible='discard'"):
        filled.open_store(filled.path, **SETTINGS)
    assert {name: (filled.path / name).read_bytes() for name in filled.files} == before
    with filled.open_store(filled.path, **SETTINGS, on_incompatible="discard") as store:
        assert store.match(filled.keys[:1]) == 0
        filled.judge(store)
    assert filled.reopen() == [Reason.NONE] * len(SIZES)


@pytest.mark.parametrize("names", [["slab"], ["journal"], ["slab", "journal"]])
@pytest.mark.parametrize("content", [b"#!/bin/sh\n", b"precious\n" * 4000, b"KVTSLAB\0" + b"?" * 500])
def test_foreign_files_are_left_alone(
    open_store: Any, tmp_path: Path, names: list[str], content: bytes
) -> None:
    path = tmp_path / "mine"
    path.mkdir()
    for name in names:
        (path / name).write_bytes(content)
    with pytest.raises(kvtier.IncompatibleStore, match=r"choose another directory|discard"):
        open_store(path, **SETTINGS)
    assert all((path / name).read_bytes() == content for name in names)
    with open_store(path, **SETTINGS, on_incompatible="discard") as store:
        assert store.put([bytes(32)], [np.ones(10, np.uint8)], until="disk").result(5).ok
