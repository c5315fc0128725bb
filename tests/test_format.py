"""The disk format to the byte. docs/FORMAT.md says the same in words."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config import KIB, MAX_PAYLOAD_BYTES
from kvtier.errors import IncompatibleStore
from kvtier.format import (
    JOURNAL_MAGIC,
    MORE,
    PUT,
    RECORD,
    RECORD_BYTES,
    SLAB_MAGIC,
    TOMBSTONE,
    DamagedHeader,
    Header,
    StoredChunk,
    decode_header,
    decode_journal_head,
    intact,
    journal_head,
    put_records,
    records_for,
    seal,
    tombstone,
)

SLAB = Header(
    part_bytes=1 << 20,
    capacity=64 << 30,
    extent_bytes=256 << 20,
    chunk_bytes=4 << 20,
    slab_id=bytes(range(16)),
)
JOURNAL = Header(
    part_bytes=1 << 20,
    capacity=64 << 30,
    extent_bytes=256 << 20,
    chunk_bytes=4 << 20,
    slab_id=bytes(range(16)),
    journal_id=0x1122334455667789,
    next_generation=42,
)
SLAB_BYTES = bytes.fromhex(
    "4b5654534c414200" "02000000" "00001000" "000102030405060708090a0b0c0d0e0f" "0000000000000000"
    "0000000010000000" "0000001000000000" "0000400000000000" "0100000000000000" + "00" * 48
    + "be1261b34784c0c0"
)  # fmt: skip
JOURNAL_BYTES = bytes.fromhex(
    "4b56544a524e4c00" "02000000" "00001000" "000102030405060708090a0b0c0d0e0f" "8977665544332211"
    "0000000010000000" "0000001000000000" "0000400000000000" "2a00000000000000" + "00" * 48
    + "0241ef5b9536fdeb"
)  # fmt: skip
PUT_BYTES = bytes.fromhex(
    "8b6c681658e0f5cd" "01" "00" "0300" "05002000" "00102000" "00004000" "2a00000000000000"
    "0000401000000000" "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    "8877665544332211" "00f15365" "80426d65"
    "0b00000000000000" "1600000000000000" "2100000000000000" + "00" * 16
)  # fmt: skip


def put(**changes: Any) -> np.ndarray:
    values: dict[str, Any] = {
        "key": bytes(range(32)),
        "generation": 42,
        "offset": (256 << 20) + (4 << 20),
        "slot_bytes": 4 << 20,
        "payload_bytes": (2 << 20) + 5,
        "stored_bytes": (2 << 20) + 4096,
        "sums": np.array([11, 22, 33], np.uint64),
        "owner": 0x1122334455667788,
        "stored_at": 1_700_000_000,
        "expires_at": 1_701_659_264,
    }
    return put_records([StoredChunk(**{**values, **changes})])


@pytest.mark.parametrize(
    ("header", "data", "magic"), [(SLAB, SLAB_BYTES, SLAB_MAGIC), (JOURNAL, JOURNAL_BYTES, JOURNAL_MAGIC)]
)
def test_golden_headers(header: Header, data: bytes, magic: bytes) -> None:
    assert len(data) == 128
    assert header.encode() == data
    assert decode_header(data, magic, "file") == header
    assert decode_header(data + b"more", magic, "file") == header


def test_a_golden_journal_head() -> None:
    page = JOURNAL_BYTES + bytes(3968)
    assert journal_head(JOURNAL) == page + page
    assert decode_journal_head(page + page, "file") == (JOURNAL, True)


def test_a_golden_put_record() -> None:
    assert len(PUT_BYTES) == RECORD_BYTES
    assert seal(put(), JOURNAL.journal_id, 5) == PUT_BYTES


@pytest.mark.parametrize("field", ["part_bytes", "extent_bytes", "chunk_bytes"])
@pytest.mark.parametrize("header", [SLAB, JOURNAL])
def test_a_header_that_divides_by_nothing_is_damaged(header: Header, field: str) -> None:
    data = dataclasses.replace(header, **{field: 0}).encode()
    with pytest.raises(DamagedHeader, match=r"slab has parts of .* to empty it"):
        decode_header(data, data[:8], "slab")


@given(st.lists(st.integers(1, 30), max_size=6))
def test_records_of_many_chunks_are_those_of_each(parts: list[int]) -> None:
    chunks = [
        StoredChunk(
            bytes([i]) * 32,
            100 + i,
            i << 22,
            4 << 20,
            count,
            count + 7,
            np.arange(count, dtype=np.uint64) + i,
            i % 3,
        )
        for i, count in enumerate(parts)
    ]
    alone = [put_records([chunk]) for chunk in chunks]
    joined = np.concatenate(alone) if alone else np.empty(0, RECORD)
    assert put_records(chunks).tobytes() == joined.tobytes()


def test_new_headers_have_an_identity_of_their_own() -> None:
    made = [Header.new(part_bytes=65536, capacity=1, extent_bytes=1, chunk_bytes=1) for _ in range(2)]
    assert made[0].slab_id != made[1].slab_id
    journals = [made[0].for_journal(9) for _ in range(50)]
    assert len({journal.journal_id for journal in journals}) == 50
    assert all(journal.journal_id % 2 for journal in journals)
    assert {journal.slab_id for journal in journals} == {made[0].slab_id}
    assert journals[0].next_generation == 9


@pytest.mark.parametrize("at", range(128))
def test_a_flipped_byte_of_a_header_is_noticed(at: int) -> None:
    for flip in (1, 0x80, 0xFF):
        data = bytearray(JOURNAL_BYTES)
        data[at] ^= flip
        with pytest.raises(DamagedHeader):
            decode_header(bytes(data), JOURNAL_MAGIC, "file")


@pytest.mark.parametrize("data", [b"", JOURNAL_BYTES[:127], SLAB_BYTES, bytes(128), b"#!/bin/sh\n" * 20])
def test_what_is_not_ours_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(DamagedHeader, match="/a/journal is not a file of a kvtier store: choose another"):
        decode_header(data, JOURNAL_MAGIC, "/a/journal")


@pytest.mark.parametrize("version", [0, 1, 3, 2**32 - 1])
def test_another_version_is_refused_with_what_to_do(version: int) -> None:
    body = JOURNAL_BYTES[:8] + version.to_bytes(4, "little") + JOURNAL_BYTES[12:120]
    data = body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
    with pytest.raises(
        IncompatibleStore, match=f"version {version}, .* reads version 2: .*'discard'"
    ) as caught:
        decode_header(data, JOURNAL_MAGIC, "file")
    assert not isinstance(caught.value, DamagedHeader)


@pytest.mark.parametrize(
    ("parts", "count"), [(0, 1), (1, 1), (5, 1), (6, 2), (10, 2), (11, 3), (4096, 820), (65535, 13107)]
)
def test_sums_beyond_five_go_to_more_records(parts: int, count: int) -> None:
    assert records_for(parts) == count
    if not parts:
        return
    records = put(sums=np.arange(1, parts + 1, dtype=np.uint64))
    assert len(records) == count
    assert records["kind"].tolist() == [PUT] + [MORE] * (count - 1)
    assert records["parts"].tolist() == [parts] + [5 * i for i in range(1, count)]
    assert set(records["generation"].tolist()) == {42}
    assert records["sums"].reshape(-1)[:parts].tolist() == list(range(1, parts + 1))
    assert not records["sums"].reshape(-1)[parts:].any()
    more = records[1:]
    assert not more["offset"].any()
    assert not more["payload_bytes"].any()


def test_the_largest_payload_fits_a_record_in_the_smallest_parts() -> None:
    parts = -(-MAX_PAYLOAD_BYTES // (64 * KIB))
    records = put(
        sums=np.zeros(parts, np.uint64), payload_bytes=MAX_PAYLOAD_BYTES, stored_bytes=MAX_PAYLOAD_BYTES
    )
    assert records[0]["parts"] == parts


def test_a_tombstone_names_its_generation_and_nothing_else() -> None:
    (record,) = tombstone(2**64 - 1)
    assert (record["kind"], record["generation"]) == (TOMBSTONE, 2**64 - 1)
    assert record.tobytes().strip(b"\0") == b"\x02" + bytes(15) + b"\xff" * 8


@given(st.lists(st.integers(1, 2**63), max_size=12), st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_sealed_records_are_intact_where_they_were_written(
    generations: list[int], journal_id: int, first: int
) -> None:
    records = np.concatenate([tombstone(g) for g in generations]) if generations else np.empty(0, RECORD)
    data = seal(records, (journal_id + first) % 2**64, 0)
    assert data == seal(records, journal_id, first)
    if generations:
        assert intact(memoryview(data), (journal_id + first) % 2**64).all()
        assert not intact(memoryview(data), (journal_id + first + 1) % 2**64).any()


@pytest.mark.parametrize("at", range(2 * RECORD_BYTES))
def test_a_flipped_byte_of_a_record_is_noticed_in_that_record_only(at: int) -> None:
    data = bytearray(seal(np.concatenate([put(), put(), put()]), 7, 0))
    data[RECORD_BYTES + at] ^= 0x10
    expected = [True] * 3
    expected[1 + at // RECORD_BYTES] = False
    assert intact(memoryview(data), 7).tolist() == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"part_bytes": 32 * KIB},
        {"part_bytes": 2 << 20},
        {"extent_bytes": 4097},
        {"extent_bytes": 4 << 30},
        {"chunk_bytes": 4095},
        {"chunk_bytes": 512 << 20},  # above the extents
        {"capacity": 2**62},
        {"next_generation": 2**64 - 1},
    ],
)
def test_a_header_that_no_store_writes_is_damaged(changes: dict[str, int]) -> None:
    data = dataclasses.replace(JOURNAL, **changes).encode()
    with pytest.raises(DamagedHeader, match="that no store has: open with"):
        decode_header(data, JOURNAL_MAGIC, "journal")
