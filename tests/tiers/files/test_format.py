"""Names and ledger records: what was written is read back, what is damaged is nothing."""

from __future__ import annotations

import hashlib

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvtier.config import MIB, PAGE, page_up
from kvtier.errors import IncompatibleStore
from kvtier.owner import NOBODY, OwnerName
from kvtier.tiers.files.format import (
    DELETE,
    EVENT_BYTES,
    EVICT,
    HEADER_BYTES,
    PUT,
    ChunkFile,
    Event,
    LedgerHeader,
    decode_events,
    decode_ledger,
    digest_of,
    encode_events,
    owner_file,
    parse_name,
    parse_owner,
    seed_of,
)

KEY = hashlib.sha256(b"key").digest()
numbers = st.integers(0, 2**64 - 1)
times = st.integers(0, 2**32 - 1)


@st.composite
def files(draw: st.DrawFn) -> ChunkFile:
    payload = draw(st.integers(1, 2**31))
    raw = page_up(payload)
    encoded = draw(st.booleans()) and raw > PAGE
    stored = draw(st.integers(1, raw // PAGE - 1)) * PAGE if encoded else raw
    key = draw(st.binary(min_size=32, max_size=32))
    return ChunkFile(key, payload, stored, int(encoded), draw(numbers), draw(times), draw(numbers))


headers = st.builds(
    LedgerHeader,
    part_bytes=st.sampled_from([64 << 10, MIB]),
    directory_id=st.binary(min_size=16, max_size=16),
    capacity=numbers,
    used=numbers,
    events=st.integers(0, 2**60),
    ring=st.integers(1, 1 << 20),
    dirty=st.booleans(),
)
events = st.builds(Event, st.sampled_from([PUT, EVICT, DELETE]), files(), numbers)


def test_a_name_is_exact_to_the_byte() -> None:
    file = ChunkFile(bytes(range(32)), 5000, 8192, 0, 0xFEDCBA98, 0x6553F100, 0x0123456789ABCDEF)
    name = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    name += ".00001388.00002000.00.00000000fedcba98.6553f100.14.0123456789abcdef.kv1"
    assert file.name(MIB) == name
    assert parse_name(name) == (file, MIB)


def test_a_digest_is_exact_to_the_byte() -> None:
    sums = np.array([1, 2**64 - 1], np.uint64)
    assert seed_of(bytes(range(32))) == 0x14875FE01F852D0E
    assert digest_of(bytes(range(32)), 5000, 8192, 0, 0xFEDCBA98, 0x6553F100, sums) == 0x56022244A6A951C4


@given(files(), st.sampled_from([64 << 10, 256 << 10, MIB]))
def test_a_name_says_what_it_was_made_of(file: ChunkFile, part_bytes: int) -> None:
    assert parse_name(file.name(part_bytes)) == (file, part_bytes)
    assert len(file.name(part_bytes)) < 200


@given(files(), st.integers(0, 120), st.characters(codec="utf-8"))
def test_a_damaged_name_is_none_or_another_chunk(file: ChunkFile, place: int, letter: str) -> None:
    name = file.name(MIB)
    place %= len(name)
    damaged = name[:place] + letter + name[place + 1 :]
    found = parse_name(damaged)
    assert found is None or damaged == name or found != (file, MIB)


@given(st.text())
def test_any_name_is_parsed_or_refused(name: str) -> None:
    assert parse_name(name) is None
    assert parse_owner(name) is None


owners = st.builds(
    OwnerName,
    st.just(b"") | st.binary(min_size=32, max_size=32),
    st.text(st.characters(codec="utf-8"), max_size=10),
).filter(lambda owner: owner.id != NOBODY)


@given(owners)
def test_the_name_of_an_owner_comes_back(owner: OwnerName) -> None:
    name = owner_file(owner)
    assert parse_owner(name) == owner
    assert len(name) < 255


@given(owners, st.integers(0, 120), st.characters(codec="utf-8"))
def test_a_damaged_name_of_an_owner_is_none(owner: OwnerName, place: int, letter: str) -> None:
    name = owner_file(owner)
    place %= len(name)
    damaged = name[:place] + letter + name[place + 1 :]
    assert damaged == name or parse_owner(damaged) is None


def test_the_name_of_an_owner_is_exact_to_the_byte() -> None:
    owner = OwnerName(bytes(range(32)), "acme")
    assert owner_file(owner) == f"{owner.id:016x}.{bytes(range(32)).hex()}.61636d65.kv1"


@pytest.mark.parametrize("field", range(6))
def test_every_number_in_a_name_changes_the_digest(field: int) -> None:
    sums = np.array([5, 6], np.uint64)
    numbers = [KEY, 5000, 8192, 0, 7, 8]
    changed = numbers.copy()
    changed[field] = hashlib.sha256(b"other").digest() if field == 0 else numbers[field] + 1
    assert digest_of(*numbers, sums) != digest_of(*changed, sums)
    assert digest_of(*numbers, sums) != digest_of(*numbers, sums[::-1])
    assert digest_of(*numbers, sums) != digest_of(*numbers, sums[:1])


@given(headers)
def test_a_ledger_header_comes_back(header: LedgerHeader) -> None:
    data = header.encode()
    assert len(data) == HEADER_BYTES
    assert decode_ledger(data, "ledger") == header
    assert decode_ledger(data + b"more", "ledger") == header


@given(headers, st.integers(0, 8 * HEADER_BYTES - 1))
def test_a_flipped_bit_in_a_ledger_header_is_seen(header: LedgerHeader, bit: int) -> None:
    data = bytearray(header.encode())
    data[bit // 8] ^= 1 << bit % 8
    assert decode_ledger(bytes(data), "ledger") is None


@given(st.binary(max_size=256))
def test_any_ledger_header_is_parsed_or_none(data: bytes) -> None:
    assert decode_ledger(data, "ledger") is None


def test_another_version_is_refused() -> None:
    import xxhash

    data = bytearray(LedgerHeader(MIB, bytes(16), 1, 1, 0, 256).encode())
    data[8] = 2
    data[-8:] = xxhash.xxh3_64_intdigest(bytes(data[:-8])).to_bytes(8, "little")
    with pytest.raises(IncompatibleStore, match="format version 2, this kvtier reads version 1"):
        decode_ledger(bytes(data), "ledger")


@given(st.lists(events, max_size=5), st.binary(min_size=16, max_size=16), st.integers(0, 2**60))
def test_events_come_back_at_their_number(some: list[Event], directory: bytes, first: int) -> None:
    data = b"".join(encode_events(some, directory, first))
    assert len(data) == len(some) * EVENT_BYTES
    assert decode_events(data, directory, first) == some
    if some:
        assert decode_events(data, directory, first + 1) is None


@given(events, st.integers(0, 8 * EVENT_BYTES - 1))
def test_a_flipped_bit_in_an_event_is_seen(event: Event, bit: int) -> None:
    data = bytearray(b"".join(encode_events([event], bytes(16), 3)))
    data[bit // 8] ^= 1 << bit % 8
    assert decode_events(bytes(data), bytes(16), 3) is None


@given(st.integers(0, 4), st.data())
def test_any_events_are_parsed_or_none(count: int, data: st.DataObject) -> None:
    drawn = data.draw(st.binary(min_size=count * EVENT_BYTES, max_size=count * EVENT_BYTES))
    assert decode_events(drawn, bytes(16), 0) == (None if count else [])
