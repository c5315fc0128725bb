"""Replaying a journal: what is found, and what damage costs."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config import KIB, MIB
from kvtier.format import (
    JOURNAL_HEADER_BYTES,
    RECORD,
    RECORD_BYTES,
    Header,
    StoredChunk,
    journal_head,
    put_records,
    seal,
    tombstone,
)
from kvtier.index.slots import UNASSIGNED
from kvtier.tiers.slab.recovery import Recovered, replay

EXTENT = 4 * MIB
EXTENTS = 4
PART = 64 * KIB
HEADER = Header(
    part_bytes=PART,
    capacity=32 * MIB,
    extent_bytes=EXTENT,
    chunk_bytes=PART,
    slab_id=bytes(range(16)),
    journal_id=2**64 - 3,
    next_generation=1,
)


def put(
    number: int,
    *,
    slot: int,
    generation: int | None = None,
    parts: int = 1,
    extent: int = 0,
    slot_parts: int | None = None,
) -> np.ndarray:
    """Records of chunk `number` in slot `slot` of `extent`, whose slots have `slot_parts` parts."""
    size = (slot_parts or parts) * PART
    chunk = StoredChunk(
        key=number.to_bytes(32, "big"),
        generation=generation or number,
        offset=extent * EXTENT + slot * size,
        slot_bytes=size,
        payload_bytes=parts * PART - 1,
        stored_bytes=parts * PART,
        sums=np.arange(parts, dtype=np.uint64) + 1000 * (number % 2**32),
    )
    return put_records([chunk])


def journal(*records: np.ndarray, header: Header = HEADER) -> bytes:
    joined = np.concatenate(records) if records else np.empty(0, RECORD)
    return journal_head(header) + seal(joined, header.journal_id, 0)


def recover(data: bytes, extents: int = EXTENTS) -> Recovered:
    return replay(data, HEADER, extents)


def found(recovered: Recovered) -> dict[int, int]:
    """Chunk number to generation, oldest first."""
    return {
        int.from_bytes(chunk["key"].tobytes(), "big"): int(chunk["generation"]) for chunk in recovered.chunks
    }


def test_an_empty_journal_holds_nothing() -> None:
    for data in (journal(), b"", journal()[:50]):
        recovered = recover(data)
        assert found(recovered) == {}
        assert recovered.keys == b""
        assert recovered.next_generation == 1
        assert (recovered.records, recovered.damaged, recovered.dropped) == (0, 0, 0)
        assert recovered.slot_bytes.tolist() == [UNASSIGNED] * EXTENTS
        assert recovered.sums == {}


def test_chunks_come_back_whole_and_in_order() -> None:
    recovered = recover(journal(put(3, slot=5), put(1, slot=0), put(2, slot=2, extent=2, parts=3)))
    assert list(found(recovered)) == [3, 1, 2]
    assert recovered.keys == b"".join(n.to_bytes(32, "big") for n in (3, 1, 2))
    assert recovered.chunks["offset"].tolist() == [5 * PART, 0, 2 * EXTENT + 2 * 3 * PART]
    assert recovered.chunks["payload_bytes"].tolist() == [PART - 1, PART - 1, 3 * PART - 1]
    assert recovered.slot_bytes.tolist() == [PART, 0, 3 * PART, 0]
    assert sorted(recovered.sums) == [0, 2]
    assert recovered.sums[0].shape == (EXTENT // PART, 1)
    assert recovered.sums[0][5, 0] == 3000
    assert recovered.sums[2].shape == (EXTENT // (3 * PART), 3)
    assert recovered.sums[2][2].tolist() == [2000, 2001, 2002]
    assert recovered.next_generation == 4


def test_live_records_count_all_that_a_chunk_takes() -> None:
    """Else every opening would take the journal of large chunks for one that is mostly dead."""
    dead = put(4, slot=3, extent=1, parts=6)
    whole = [put(1, slot=0, parts=15), put(2, slot=0, extent=1, parts=6), put(3, slot=0, extent=2), dead]
    recovered = recover(journal(*whole, tombstone(4)))
    assert recovered.live_records == 3 + 2 + 1
    assert recovered.records == 3 + 2 + 1 + 2 + 1
    assert recover(journal()).live_records == 0


def test_a_later_put_of_a_key_wins() -> None:
    recovered = recover(journal(put(1, slot=0, generation=1), put(1, slot=1, generation=7)))
    assert found(recovered) == {1: 7}
    assert recovered.dropped == 1


def test_a_later_put_into_a_slot_wins() -> None:
    recovered = recover(journal(put(1, slot=0), put(2, slot=0)))
    assert found(recovered) == {2: 2}
    assert recovered.sums[0][0, 0] == 2000


def test_keys_that_share_their_first_bytes_are_told_apart() -> None:
    records = [put(1 << 64 | number, slot=number, generation=number) for number in range(1, 20)]
    assert len(found(recover(journal(*records)))) == 19


@pytest.mark.parametrize("before", [False, True])
def test_a_tombstone_ends_its_generation_only(before: bool) -> None:
    dead, again = put(1, slot=0, generation=1), put(1, slot=0, generation=2)
    order = (tombstone(1), dead, again) if before else (dead, tombstone(1), again)
    recovered = recover(journal(*order, tombstone(99)))
    assert found(recovered) == {1: 2}
    assert recovered.dropped == 0
    assert recovered.next_generation == 100


def test_an_extent_is_unassigned_once_all_in_it_is_dead() -> None:
    recovered = recover(journal(put(1, slot=0, extent=1), tombstone(1)))
    assert recovered.slot_bytes.tolist() == [UNASSIGNED] * EXTENTS
    assert recovered.sums == {}


def test_an_extent_has_the_size_of_its_last_use() -> None:
    recovered = recover(journal(put(1, slot=3), tombstone(1), put(2, slot=1, parts=4)))
    assert found(recovered) == {2: 2}
    assert recovered.slot_bytes[0] == 4 * PART


def test_a_chunk_of_an_extent_that_has_another_size_by_now_is_dropped() -> None:
    recovered = recover(journal(put(1, slot=3), put(2, slot=1, parts=4)))
    assert found(recovered) == {2: 2}
    assert recovered.dropped == 1


@pytest.mark.parametrize("parts", [1, 6, 7, 8, 14, 15, 50])
def test_sums_beyond_the_first_record_are_found(parts: int) -> None:
    recovered = recover(journal(put(1, slot=0, slot_parts=60), put(2, slot=0, extent=1, parts=parts)))
    assert recovered.sums[1][0].tolist() == [2000 + i for i in range(parts)]
    assert recovered.sums[0][0].tolist() == [1000] + [0] * 59


def test_chunks_outside_the_slab_are_dropped_when_it_shrank() -> None:
    data = journal(*(put(1 + extent, slot=0, extent=extent) for extent in range(EXTENTS)))
    assert found(recover(data, extents=2)) == {1: 1, 2: 2}
    assert recover(data, extents=2).dropped == 2
    grown = recover(data, extents=9)
    assert len(found(grown)) == EXTENTS
    assert grown.slot_bytes.tolist() == [PART] * 4 + [UNASSIGNED] * 5


WRONG_FIELDS = {
    "not at a slot": {"offset": PART // 2},
    "behind the extents": {"offset": EXTENTS * EXTENT},
    "no slot size": {"slot_bytes": 0},
    "slot above the extent": {"slot_bytes": EXTENT + PART},
    "stored above the slot": {"stored_bytes": 2 * PART, "parts": 2},
    "payload above stored": {"payload_bytes": PART + 1},
    "too many parts": {"parts": 2},
    "no parts": {"parts": 0},
}


@pytest.mark.parametrize("kind", WRONG_FIELDS)
def test_a_record_that_makes_no_sense_costs_its_chunk_only(kind: str) -> None:
    odd = put(1, slot=3, extent=1)
    for name, value in WRONG_FIELDS[kind].items():
        odd[name] = value
    recovered = recover(journal(put(2, slot=1), odd, put(3, slot=2)))
    assert found(recovered) == {2: 2, 3: 3}
    assert recovered.dropped == 1


def test_invariant_6_a_tail_torn_at_any_byte_costs_the_last_chunk_only() -> None:
    whole = [put(1, slot=0), put(2, slot=1), tombstone(1), put(3, slot=0, extent=1, parts=15)]
    data = journal(*whole)
    last = 3 * RECORD_BYTES
    for cut in range(1, last + 1):
        recovered = recover(data[:-cut])
        assert found(recovered) == {2: 2}
        assert recovered.damaged == 0
        assert recovered.next_generation == (4 if cut <= 2 * RECORD_BYTES else 3)


def test_invariant_6_a_garbled_tail_costs_the_last_chunk_only() -> None:
    data = bytearray(journal(put(1, slot=0), put(2, slot=1)))
    data[-RECORD_BYTES:] = random.Random(1).randbytes(RECORD_BYTES)
    assert found(recover(bytes(data))) == {1: 1}
    assert recover(bytes(data)).damaged == 1
    assert found(recover(bytes(data) + bytes(5 * RECORD_BYTES))) == {1: 1}


def history(seed: int) -> tuple[list[np.ndarray], list[set[int]], dict[int, int]]:
    """A plausible journal: the records, whose chunks each belongs to, and what is alive at its end."""
    rng = random.Random(seed)
    parts = dict.fromkeys(range(EXTENTS), 1)
    records: list[np.ndarray] = []
    owners: list[set[int]] = []
    alive: dict[int, tuple[int, int, int]] = {}  # number -> generation, extent, slot
    for generation in range(1, 40):
        number = rng.randint(1, 25)
        if number in alive:
            former, _, _ = alive.pop(number)
            records.append(tombstone(former))
            owners.append({number})
            continue
        extent = rng.randrange(EXTENTS)
        taken = {slot for _, other, slot in alive.values() if other == extent}
        if not taken:
            parts[extent] = rng.choice([1, 2, 9])
        slot = next(i for i in range(100) if i not in taken)
        if slot >= EXTENT // (parts[extent] * PART):
            continue
        chunk = put(number, slot=slot, generation=generation, extent=extent, parts=parts[extent])
        records.append(chunk)
        owners += [{number}] * len(chunk)
        alive[number] = (generation, extent, slot)
    return records, owners, {number: generation for number, (generation, _, _) in alive.items()}


@given(seed=st.integers(0, 1000), data=st.data())
def test_invariant_1_a_flipped_byte_costs_at_most_the_chunk_of_its_record(seed: int, data: Any) -> None:
    records, owners, alive = history(seed)
    whole = journal(*records)
    assert found(recover(whole)) == alive
    at = data.draw(st.integers(JOURNAL_HEADER_BYTES, len(whole) - 1))
    flip = data.draw(st.integers(1, 255))
    garbled = bytearray(whole)
    garbled[at] ^= flip
    recovered = recover(bytes(garbled))
    hurt = owners[(at - JOURNAL_HEADER_BYTES) // RECORD_BYTES]
    after = found(recovered)
    assert recovered.damaged == 1
    assert {n: g for n, g in after.items() if n not in hurt} == {
        n: g for n, g in alive.items() if n not in hurt
    }
    _check_consistent(recovered)


def _check_consistent(recovered: Recovered) -> None:
    """Every chunk has a slot of its own inside an extent of its size, and its sums are in the table."""
    assert len(set(recovered.chunks["offset"].tolist())) == len(recovered.chunks)
    assert len({chunk["key"].tobytes() for chunk in recovered.chunks}) == len(recovered.chunks)
    used = set()
    for chunk in recovered.chunks:
        extent, rest = divmod(int(chunk["offset"]), EXTENT)
        used.add(extent)
        size = int(recovered.slot_bytes[extent])
        assert size == int(chunk["slot_bytes"])
        number = int.from_bytes(chunk["key"].tobytes(), "big")
        parts = int(chunk["parts"])
        assert recovered.sums[extent][rest // size, :parts].tolist() == [
            1000 * number + i for i in range(parts)
        ]
    assert {i for i, size in enumerate(recovered.slot_bytes.tolist()) if size != UNASSIGNED} == used
    assert set(recovered.sums) == used


@given(seed=st.integers(0, 300), noise=st.binary(min_size=1, max_size=600), data=st.data())
def test_a_stretch_of_garbage_never_invents_a_chunk(seed: int, noise: bytes, data: Any) -> None:
    records, _, _ = history(seed)
    whole = bytearray(journal(*records))
    at = data.draw(st.integers(JOURNAL_HEADER_BYTES, len(whole) - 1))
    whole[at : at + len(noise)] = noise
    recovered = recover(bytes(whole))
    put_generations = {
        (int.from_bytes(r[0]["key"].tobytes(), "big"), int(r[0]["generation"]))
        for r in records
        if r[0]["kind"] == 1
    }
    assert set(found(recovered).items()) <= put_generations
    _check_consistent(recovered)


def test_records_of_another_journal_are_damaged() -> None:
    data = journal_head(HEADER) + seal(put(1, slot=0), HEADER.journal_id + 1, 0)
    assert found(recover(data)) == {}
    assert recover(data).damaged == 1


def test_records_moved_to_another_place_are_damaged() -> None:
    data = journal(put(1, slot=0), put(2, slot=1))
    head, body = data[:JOURNAL_HEADER_BYTES], data[JOURNAL_HEADER_BYTES:]
    first, second = body[:RECORD_BYTES], body[RECORD_BYTES:]
    assert recover(head + second + first).damaged == 2
    assert recover(head + first + first).damaged == 1


def test_of_two_chunks_with_one_generation_the_last_counts() -> None:
    """Else the tombstone of the one would end the other. No store writes that, but a journal may say it."""
    recovered = recover(journal(put(1, slot=0, generation=5), put(2, slot=1, generation=5)))
    assert found(recovered) == {2: 5}
    assert recovered.dropped == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("offset", 2**64 - PART),  # as a signed number just before the first slot
        ("offset", 2**63),
        ("offset", EXTENTS * EXTENT),
        ("slot_bytes", 0),
        ("slot_bytes", 12345),
        ("slot_bytes", 2**32 - 1),
        ("stored_bytes", 0),
        ("stored_bytes", 100),
        ("stored_bytes", 2 * PART),
        ("payload_bytes", 0),
        ("payload_bytes", PART + 1),
        ("parts", 0),
        ("parts", 65535),
        ("codec", 200),
        ("generation", 2**62),
        ("generation", 2**64 - 1),
    ],
)
def test_a_record_with_a_field_that_no_store_writes_costs_its_own_chunk_only(field: str, value: int) -> None:
    absurd = put(1, slot=0)
    absurd[field] = value
    recovered = recover(journal(put(2, slot=3, extent=1), absurd, put(3, slot=4, extent=2)))
    assert found(recovered) == {2: 2, 3: 3}
    assert recovered.next_generation < 2**62
    HEADER.for_journal(recovered.next_generation).encode()


def test_an_encoded_payload_larger_than_any_slot_is_dropped() -> None:
    absurd = put(1, slot=0)
    absurd["codec"], absurd["payload_bytes"] = 1, 2**32 - 1
    assert found(recover(journal(absurd))) == {}
