"""Whatever lies in a directory: opening it ends in documented errors or in a store that serves exact bytes.

Some hundred examples of each; many more, at random, with

    FUZZ=long HYPOTHESIS_RANDOM=1 pytest tests/tiers/slab/test_fuzz.py
"""

from __future__ import annotations

import os
import shutil
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

import kvtier
from kvtier import Status
from kvtier.config import KIB, MIB, PAGE, extent_area, journal_limit
from kvtier.errors import KVTierError
from kvtier.format import (
    JOURNAL_MAGIC,
    MORE,
    PUT,
    RECORD,
    RECORD_BYTES,
    SLAB_MAGIC,
    TOMBSTONE,
    Header,
    decode_header,
    seal,
)
from kvtier.index.cache import COLUMNS, SlotCache
from kvtier.tiers.slab.inspection import inspect
from kvtier.tiers.slab.recovery import Recovered, replay, sums_shape
from small_stores import SMALL, numbered_key, pinned_slots, random_payload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

LONG = os.environ.get("FUZZ") == "long"
pytestmark = pytest.mark.timeout(3600 if LONG else 120)
HEADER = Header(
    part_bytes=64 * KIB, capacity=8 * MIB, extent_bytes=448 * KIB, chunk_bytes=64 * KIB,
    slab_id=bytes(range(16)), journal_id=2**64 - 5, next_generation=7,
)  # fmt: skip
EXTENTS = extent_area(HEADER.capacity, HEADER.chunk_bytes) // HEADER.extent_bytes
EDGES = sorted(
    {
        edge + step
        for edge in (0, 1, 7, PAGE, 64 * KIB, 128 * KIB, HEADER.extent_bytes, EXTENTS * HEADER.extent_bytes,
                     HEADER.capacity, 2**15, 2**16, 2**31, 2**32, 2**63, 2**64)
        for step in (-1, 0, 1)
    }
)  # fmt: skip


def numbers(bits: int) -> st.SearchStrategy[int]:
    """Values of a field: those at the edges of what makes sense, and any."""
    edges = [edge for edge in EDGES if 0 <= edge < 1 << bits]
    pages = st.integers(0, 2 * EXTENTS).map(lambda n: n * 64 * KIB % (1 << bits))
    return st.sampled_from(edges) | pages | st.integers(0, (1 << bits) - 1)


def examples(count: int) -> Any:
    return settings(max_examples=count * 12 if LONG else count)


def with_some(sound: st.SearchStrategy[dict[str, Any]], bits: dict[str, int]) -> Any:
    """Sound fields, or with up to two of those in `bits` replaced by anything of so many bits."""
    absurd = st.sampled_from(sorted(bits)).flatmap(lambda name: st.tuples(st.just(name), numbers(bits[name])))
    some = st.just([]) | st.lists(absurd, max_size=2)
    return st.tuples(sound, some).map(lambda both: {**both[0], **dict(both[1])})


def sound_record(slot: int, generation: int, number: int, kind: int, parts: int) -> dict[str, int]:
    extent, rest = divmod(slot, 3)
    size = 64 * KIB * parts
    return {
        "kind": kind, "codec": 0, "parts": parts, "payload_bytes": size, "stored_bytes": size,
        "slot_bytes": size, "generation": generation, "number": number,
        "offset": extent * HEADER.extent_bytes + rest * size,
    }  # fmt: skip


RECORDS = st.lists(
    with_some(
        st.builds(
            sound_record,
            st.integers(0, 3 * EXTENTS - 1), st.integers(1, 40), st.integers(0, 30),
            st.sampled_from([PUT] * 8 + [TOMBSTONE, MORE]), st.sampled_from([1, 1, 1, 2]),
        ),
        {"kind": 8, "codec": 8, "parts": 16, "payload_bytes": 32, "stored_bytes": 32, "slot_bytes": 32,
         "generation": 64, "offset": 64},
    ),
    max_size=25,
)  # fmt: skip


def encoded(records: list[dict[str, int]]) -> np.ndarray:
    made = np.zeros(len(records), RECORD)
    for i, record in enumerate(records):
        for name, value in record.items():
            if name == "number":
                made[i]["key"] = np.void(numbered_key(value))
            else:
                made[i][name] = value
    return made


def check_recovered(recovered: Recovered, header: Header, extents: int, nbytes: int) -> None:
    """What the rest of the store takes on trust, and no more memory than the records can account for."""
    chunks = recovered.chunks
    offset, size = chunks["offset"].astype(np.int64), chunks["slot_bytes"].astype(np.int64)
    assert (offset >= 0).all()
    assert (offset + size <= extents * header.extent_bytes).all()
    order = np.argsort(offset)
    assert (offset[order][1:] >= (offset + size)[order][:-1]).all(), "slots overlap"
    assert len({chunk["key"].tobytes() for chunk in chunks}) == len(chunks)
    assert (size % PAGE == 0).all()
    assert (offset % PAGE == 0).all()
    stored, payload = chunks["stored_bytes"].astype(np.int64), chunks["payload_bytes"].astype(np.int64)
    assert ((stored > 0) & (stored <= size) & (stored % PAGE == 0)).all()
    assert ((payload > 0) & (payload <= header.extent_bytes)).all()
    assert (chunks["codec"] <= 2).all()
    assert header.next_generation <= recovered.next_generation <= 2**62
    assert (chunks["generation"] < recovered.next_generation).all()
    for extent, table in recovered.sums.items():
        slot_bytes = int(recovered.slot_bytes[extent])
        assert table.shape == sums_shape(slot_bytes, header.extent_bytes, header.part_bytes)
    assert recovered.records <= nbytes // RECORD_BYTES
    index = SlotCache(extents * header.extent_bytes, header.extent_bytes)
    columns = {name: chunks["payload_bytes" if name == "nbytes" else name] for name in COLUMNS}
    index.load(recovered.keys, recovered.slot_bytes, columns)
    assert len(index) == len(chunks)


@examples(300)
@given(st.binary(max_size=300), st.sampled_from([JOURNAL_MAGIC, SLAB_MAGIC]), st.booleans())
def test_any_bytes_are_a_header_or_refused(data: bytes, magic: bytes, begins_well: bool) -> None:
    with pytest.raises(kvtier.IncompatibleStore):
        decode_header(magic + data if begins_well else data, magic, "file")


HEADERS = with_some(
    st.just({name: getattr(HEADER, name) for name in HEADER.__slots__}),
    {"part_bytes": 32, "capacity": 64, "extent_bytes": 64, "chunk_bytes": 64, "journal_id": 64,
     "next_generation": 64},
).map(lambda fields: Header(**fields))  # fmt: skip


@examples(300)
@given(HEADERS)
def test_a_header_with_any_fields_is_one_that_can_be_used_or_refused(header: Header) -> None:
    data = header.encode()
    try:
        decoded = decode_header(data, data[:8], "file")
    except kvtier.IncompatibleStore:
        event("refused")
        return
    assert decoded == header
    assert 0 < decoded.chunk_bytes <= decoded.extent_bytes
    assert decoded.extent_bytes % PAGE == decoded.chunk_bytes % PAGE == 0
    assert 64 * KIB <= decoded.part_bytes <= MIB
    decoded.for_journal(decoded.next_generation).encode()


@examples(200)
@given(st.binary(max_size=3000))
def test_any_bytes_behind_a_header_are_survived(data: bytes) -> None:
    check_recovered(replay(HEADER.encode() + data, HEADER, EXTENTS), HEADER, EXTENTS, len(data))


@examples(600)
@given(RECORDS)
def test_records_with_any_fields_are_survived(records: list[dict[str, int]]) -> None:
    data = HEADER.encode() + seal(encoded(records), HEADER.journal_id, 0)
    recovered = replay(data, HEADER, EXTENTS)
    check_recovered(recovered, HEADER, EXTENTS, len(data))
    event(f"{min(len(recovered.chunks), 3)} chunks found")


@examples(30)
@given(RECORDS)
def test_records_with_any_fields_take_no_absurd_memory(records: list[dict[str, int]]) -> None:
    data = HEADER.encode() + seal(encoded(records), HEADER.journal_id, 0)
    replay(data, HEADER, EXTENTS)  # what is imported and cached once
    tracemalloc.start()
    try:
        replay(data, HEADER, EXTENTS)
        assert tracemalloc.get_traced_memory()[1] < 2 * MIB
    finally:
        tracemalloc.stop()


COUNT = 40
SIZES = [64 * KIB, 200 * KIB, 1000, 448 * KIB]
CONFIG = {**SMALL, "dram": 0, "chunk_bytes": 448 * KIB}


def value(i: int) -> np.ndarray:
    """The payload of chunk `i`: of one of several sizes, half of them compressible."""
    payload = random_payload(i, SIZES[i % len(SIZES)]).copy()
    payload[: len(payload) // 2] = i
    return payload


def put_all(store: kvtier.Store, order: list[int]) -> None:
    for i in order:
        codec = "lz4" if i % 3 == 0 else "raw"
        result = store.put([numbered_key(i)], [value(i)], until="disk", codec=codec).result(20)
        assert result.ok, result


def get_all(store: kvtier.Store, chunks: Iterable[int] = range(COUNT)) -> set[int]:
    """Which chunks are hits; every hit has exactly the bytes of its key."""
    hits = set()
    for i in chunks:
        target = np.zeros(len(value(i)), np.uint8)
        if store.get([numbered_key(i)], into=[target]).result(20).status[0] == Status.HIT:
            assert (target == value(i)).all(), f"wrong bytes under key {i}"
            hits.add(i)
    return hits


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two stores that were used, deleted from and evicted from; the second for splicing."""
    paths = []
    for start in (0, 20):
        path = tmp_path_factory.mktemp("made") / "store"
        with kvtier.open(path, **CONFIG) as store:
            put_all(store, [(start + i) % COUNT for i in range(COUNT)])
            store.delete([numbered_key(i) for i in range(start, start + 4)]).result(20)
            put_all(store, [start, start + 2])
            assert len(get_all(store)) > 10
        paths.append(path)
    return paths[0], paths[1]


FIELDS = ["kind", "codec", "parts", "stored_bytes", "slot_bytes", "generation", "offset"]
RECORD_CHANGES = st.one_of(
    st.tuples(st.just("field"), st.integers(0, 10**6), st.sampled_from(FIELDS), numbers(64)),
    st.tuples(st.just("payload"), st.integers(0, 10**6), st.sampled_from([0, 2**32 - 1, 2**31])),
    st.tuples(st.just("swap"), st.integers(0, 10**6), st.integers(0, 10**6)),
    st.tuples(st.just("repeat"), st.integers(0, 10**6), st.integers(0, 10**6)),
    st.tuples(st.just("drop"), st.integers(0, 10**6)),
    st.tuples(st.just("key"), st.integers(0, 10**6), st.integers(0, COUNT - 1)),
    st.tuples(st.just("splice"), st.integers(0, 10**6), st.integers(0, 10**6)),
    st.tuples(st.just("sum"), st.integers(0, 10**6), numbers(64)),
)
BYTE_CHANGES = st.one_of(
    st.tuples(st.just("flip"), st.integers(0, 10**8), st.integers(1, 255)),
    st.tuples(st.just("cut"), st.integers(0, 10**8)),
    st.tuples(st.just("extend"), st.binary(min_size=1, max_size=300)),
    st.tuples(st.just("lengthen"), st.sampled_from([1, PAGE, MIB, 1 << 40])),
    st.tuples(st.just("zero"), st.integers(0, 10**8), st.integers(1, 10**5)),
    st.tuples(st.just("foreign"), st.sampled_from([b"", b"#!/bin/sh\n", bytes(8192), b"KVTSLAB\0" * 512])),
    st.tuples(st.just("other")),
    st.tuples(st.just("remove")),
)


def change_records(records: np.ndarray, others: np.ndarray, changes: list[tuple[Any, ...]]) -> np.ndarray:
    """The records changed as somebody would who can compute their checks."""
    records = records.copy()
    for kind, *arguments in changes:
        if not len(records):
            break
        at = arguments[0] % len(records)
        if kind == "field":
            name, number = arguments[1:]
            records[at][name] = number % (1 << 8 * RECORD[name].itemsize)
        elif kind == "payload":
            records[at]["payload_bytes"] = arguments[1]
        elif kind in ("swap", "repeat"):
            other = arguments[1] % len(records)
            records[[at, other]] = records[[other, at if kind == "swap" else other]]
        elif kind == "drop":
            records = np.delete(records, at)
        elif kind == "key":
            old = int.from_bytes(records[at]["key"].tobytes(), "little")  # of a payload of the same size
            new = arguments[1] - arguments[1] % len(SIZES) + old % len(SIZES)
            records[at]["key"] = np.void(numbered_key(new))
        elif kind == "splice":
            records = np.insert(records, at, others[arguments[1] % len(others)])
        elif kind == "sum":
            records[at]["sums"][0] = arguments[1]
    return records


def change_bytes(file: Path, other: Path, changes: list[tuple[Any, ...]]) -> None:
    for kind, *arguments in changes:
        size = file.stat().st_size if file.exists() else 0
        if kind == "remove":
            file.unlink(missing_ok=True)
        elif kind == "other":
            shutil.copyfile(other, file)
        elif kind == "foreign":
            file.write_bytes(arguments[0])
        elif kind == "lengthen":
            with file.open("ab"):
                os.truncate(file, min(size + arguments[0], 1 << 41))
        elif kind == "extend":
            with file.open("ab") as opened:
                opened.write(arguments[0])
        elif size and kind == "cut":
            os.truncate(file, arguments[0] % size)
        elif size:
            at = arguments[0] % min(size, 64 * MIB)
            with file.open("r+b") as opened:
                opened.seek(at)
                old = opened.read(1 if kind == "flip" else min(arguments[1], size - at))
                opened.seek(at)
                opened.write(bytes([old[0] ^ arguments[1]]) if kind == "flip" else bytes(len(old)))


def check_store(path: Path) -> None:
    """Open what is there: exact bytes or misses; then it can be used as any store, within its bounds."""
    try:
        inspect(path)
    except KVTierError:
        event("inspect refuses")
    try:
        store = kvtier.open(path, **CONFIG)
    except KVTierError as error:
        event(f"open refuses: {type(error).__name__}")
        if isinstance(error, kvtier.InvalidRequest):
            return  # a sound store that these settings do not fit: nothing is changed, whatever it held
        store = kvtier.open(path, **CONFIG, on_incompatible="discard")
    try:
        event(f"{len(get_all(store)) // 10 * 10} or more hits")
        for i in range(10):  # which may evict others, where extents are few
            put_all(store, [i])
            assert get_all(store, [i]) == {i}
        there = get_all(store)
        assert not pinned_slots(store)
        held = sum(file.stat().st_blocks * 512 for file in path.iterdir())
        assert held <= CONFIG["capacity"]
        assert (path / "journal").stat().st_size <= journal_limit(CONFIG["capacity"], CONFIG["chunk_bytes"])
    finally:
        store.close()
    with kvtier.open(path, **CONFIG) as store:
        assert there <= get_all(store)


@pytest.fixture(scope="module")
def on_a_copy(made: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """`on_a_copy(change)`: apply `change(path, other)` to a copy of the first store, and check that."""
    place = tmp_path_factory.mktemp("copy") / "store"

    def run(change: Callable[[Path, Path], None]) -> None:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(made[0], place)
        change(place, made[1])
        check_store(place)

    return run


@examples(40)
@given(st.lists(RECORD_CHANGES, min_size=1, max_size=6))
def test_a_store_with_a_journal_of_absurd_records(
    on_a_copy: Callable[..., None], changes: list[tuple[Any, ...]]
) -> None:
    def change(path: Path, other: Path) -> None:
        data, others = (path / "journal").read_bytes(), (other / "journal").read_bytes()
        header = decode_header(data, JOURNAL_MAGIC, "journal")
        records = np.frombuffer(data, RECORD, offset=RECORD_BYTES)
        changed = change_records(records, np.frombuffer(others, RECORD, offset=RECORD_BYTES), changes)
        (path / "journal").write_bytes(data[:RECORD_BYTES] + seal(changed, header.journal_id, 0))

    on_a_copy(change)


@examples(40)
@given(
    st.lists(st.tuples(st.sampled_from(["journal", "slab", "lock", "journal.new"]), BYTE_CHANGES), min_size=1,
             max_size=4)
)  # fmt: skip
def test_a_store_with_files_that_were_changed(
    on_a_copy: Callable[..., None], changes: list[tuple[str, tuple[Any, ...]]]
) -> None:
    def change(path: Path, other: Path) -> None:
        for name, what in changes:
            change_bytes(path / name, other / ("slab" if name == "slab" else "journal"), [what])

    on_a_copy(change)


@examples(40)
@given(HEADERS, st.sampled_from(["journal", "slab", "both"]))
def test_a_store_with_headers_of_any_fields(
    on_a_copy: Callable[..., None], header: Header, name: str
) -> None:
    """With the check right: only who writes one on purpose gets there."""

    def change(path: Path, other: Path) -> None:
        for file in ("journal", "slab") if name == "both" else (name,):
            made = header if file == "journal" else Header(
                **{**{f: getattr(header, f) for f in header.__slots__}, "journal_id": 0}
            )  # fmt: skip
            with (path / file).open("r+b") as opened:
                opened.write(made.encode())

    on_a_copy(change)
