"""OWNER records: written before the first chunk of an owner, kept by rewrites, and what damage costs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.config import KIB, MIB, StoreConfig
from kvtier.format import (
    JOURNAL_HEADER_BYTES,
    OWNER,
    PUT,
    RECORD,
    RECORD_BYTES,
    Header,
    StoredChunk,
    journal_head,
    owner_records,
    put_records,
    read_owners,
    seal,
    tombstone,
)
from kvtier.index.owners import Owners
from kvtier.index.rows import NO_ROW
from kvtier.owner import Owner, OwnerName
from kvtier.tiers.slab.recovery import replay
from kvtier.tiers.slab.tier import SlabTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CHUNK = 4 * KIB
ACME, BETA = OwnerName(bytes([1]) * 32, "acme"), OwnerName(tenant="bêta" * 8)
HEADER = Header(
    part_bytes=64 * KIB,
    capacity=MIB,
    extent_bytes=64 * KIB,
    chunk_bytes=CHUNK,
    slab_id=bytes(16),
    journal_id=3,
)


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[Callable[..., SlabTier]]:
    tiers: list[SlabTier] = []

    def make(**changes: Any) -> SlabTier:
        settings: dict[str, Any] = {
            "capacity": 4 * MIB, "chunk_bytes": CHUNK, "part_bytes": 64 * KIB, "dram": 0, **changes,
        }  # fmt: skip
        for tier in tiers:
            assert tier.stop(20)
            tier.close()
        tiers[:] = [
            SlabTier(StoreConfig(paths=(tmp_path / "store",), **settings), threading.Lock(), Owners())
        ]
        return tiers[0]

    yield make
    for tier in tiers:
        assert tier.stop(20)
        tier.close()


def put(tier: SlabTier, number: int, name: OwnerName) -> None:
    """As the store does, but for the payload."""
    owner = tier.index.holdings.owners.learn(name)
    offset = tier.reserve(CHUNK, owner)
    assert offset is not None
    tier.write_tombstones()
    write = tier.start_write(number.to_bytes(32, "little"), offset, CHUNK)
    assert write.owner == owner
    write.sums = np.zeros(1, np.uint64)
    with tier.journal.lock:
        tier.journal_puts([write])
        tier.index.unpin(tier.insert(write))


def records(tier: SlabTier) -> np.ndarray[Any, np.dtype[np.void]]:
    data = (tier.path / "journal").read_bytes()
    return np.frombuffer(data, RECORD, offset=JOURNAL_HEADER_BYTES)


def names(tier: SlabTier) -> set[OwnerName]:
    return set(tier.index.holdings.owners.names.values())


def owned(tier: SlabTier) -> dict[int, int]:
    """Chunk number to owner."""
    return {
        int.from_bytes(tier.index.key(row), "little"): tier.index.owner[row]
        for row in tier.index.table.rows().tolist()
    }


def test_a_record_says_who_it_is() -> None:
    made = owner_records([ACME, BETA])
    assert made["kind"].tolist() == [OWNER, OWNER]
    assert made["generation"].tolist() == [0, 0], "of no slot"
    assert read_owners(made) == {ACME.id: ACME, BETA.id: BETA}
    assert made[0]["key"].tobytes() == ACME.namespace
    assert made[1]["sums"].tobytes() == BETA.tenant.encode() + bytes(40 - len(BETA.tenant.encode()))
    assert read_owners(owner_records([])) == {}


@given(
    namespace=st.sampled_from([b"", bytes([9]) * 32]),
    tenant=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=10),
)
def test_every_name_comes_back(namespace: bytes, tenant: str) -> None:
    name = Owner(namespace, tenant).name
    assert read_owners(owner_records([name])) == {name.id: name}


@given(st.binary(min_size=RECORD_BYTES, max_size=RECORD_BYTES))
def test_a_garbled_record_names_nobody(data: bytes) -> None:
    assert read_owners(np.frombuffer(data, RECORD)) == {}


def test_another_names_record_is_not_believed() -> None:
    forged = owner_records([ACME])
    forged["owner"] = BETA.id
    assert read_owners(forged) == {}


@settings(max_examples=200)
@given(data=st.data())
def test_any_damage_costs_at_most_the_names(data: Any) -> None:
    chunks = [
        StoredChunk(
            key=bytes([i]) * 32, generation=i + 1, offset=i * CHUNK, slot_bytes=CHUNK, payload_bytes=CHUNK,
            stored_bytes=CHUNK, sums=np.zeros(1, np.uint64), owner=(ACME.id, BETA.id, 0)[i % 3],
        )
        for i in range(6)
    ]  # fmt: skip
    whole = np.concatenate([owner_records([ACME, BETA]), put_records(chunks), tombstone(99)])
    journal = bytearray(journal_head(HEADER) + seal(whole, HEADER.journal_id, 0))
    place = data.draw(st.integers(0, 2 * RECORD_BYTES - 1))
    journal[JOURNAL_HEADER_BYTES + place] ^= 1 << data.draw(st.integers(0, 7))
    recovered = replay(bytes(journal), HEADER, 10)
    assert (len(recovered.chunks), recovered.damaged, recovered.dropped) == (6, 1, 0)
    assert recovered.owners == ({BETA.id: BETA} if place < RECORD_BYTES else {ACME.id: ACME})
    assert recovered.next_generation == 100
    assert recovered.chunks["owner"].tolist() == [ACME.id, BETA.id, 0] * 2


def test_an_owner_is_recorded_before_its_first_chunk_and_once(open_tier: Any) -> None:
    tier = open_tier()
    for number in range(6):
        put(tier, number, (ACME, BETA, OwnerName())[number % 3])
    kinds = records(tier)["kind"].tolist()
    assert kinds == [OWNER, PUT, OWNER, PUT, PUT, PUT, PUT, PUT]
    tier = open_tier()
    assert names(tier) == {ACME, BETA}
    assert owned(tier) == {number: (ACME.id, BETA.id, 0)[number % 3] for number in range(6)}
    put(tier, 6, ACME)
    assert records(tier)["kind"].tolist() == [*kinds, PUT], "it is known already"


def test_a_rewrite_keeps_the_owners_that_have_chunks(open_tier: Any) -> None:
    tier = open_tier()
    for number, name in enumerate([ACME, BETA, ACME]):
        put(tier, number, name)
    tier.discard(tier.find((1).to_bytes(32, "little")))
    tier.write_tombstones()
    tier.compactor.compact()
    kinds = records(tier)["kind"].tolist()
    assert kinds[:3] == [OWNER, PUT, PUT]
    put(tier, 3, BETA)
    assert records(tier)["owner"][-2:].tolist() == [BETA.id] * 2, "recorded anew"
    tier = open_tier()
    assert names(tier) == {ACME, BETA}
    assert owned(tier) == {0: ACME.id, 2: ACME.id, 3: BETA.id}


@pytest.mark.parametrize("capacity", [MIB, 12 * MIB])
def test_the_journal_holds_its_limit_with_an_owner_for_every_chunk(open_tier: Any, capacity: int) -> None:
    """Owners that come and go cost chunks before they cost room; and the rewrites forget them."""
    tier = open_tier(capacity=capacity)
    stored = min(4000, 4 * tier.journal.max_live)
    for number in range(stored):
        put(tier, number, OwnerName(number.to_bytes(32, "big"), "acme"))
        live = len(tier.index) + len(tier.index.holdings.by_owner)
        assert tier.journal.nbytes + JOURNAL_HEADER_BYTES + live * RECORD_BYTES <= tier.journal.limit, (
            "and a rewrite beside it"
        )
    there = owned(tier)
    assert len(there) >= tier.journal.max_live // 2 - 1
    assert capacity == MIB or len(there) > 1024, "more than are kept for nothing"
    tier = open_tier(capacity=capacity)
    assert owned(tier) == there
    assert names(tier) == {OwnerName(number.to_bytes(32, "big"), "acme") for number in there}


def test_a_journal_of_another_capacity_keeps_the_names(open_tier: Any) -> None:
    tier = open_tier()
    put(tier, 1, ACME)
    put(tier, 2, BETA)
    tier = open_tier(capacity=5 * MIB)
    assert records(tier)["kind"].tolist() == [OWNER, OWNER, PUT, PUT]
    assert names(tier) == {ACME, BETA}


def test_names_that_are_lost_are_written_again(open_tier: Any) -> None:
    tier = open_tier()
    put(tier, 1, ACME)
    journal = tier.path / "journal"
    data = bytearray(journal.read_bytes())
    data[JOURNAL_HEADER_BYTES + 100] ^= 1
    journal.write_bytes(data)
    tier = open_tier()
    assert names(tier) == set()
    assert owned(tier) == {1: ACME.id}
    assert records(tier)["kind"].tolist() == [PUT]
    put(tier, 2, ACME)
    tier = open_tier()
    assert names(tier) == {ACME}


def test_what_is_written_anew_ends_what_was_over(open_tier: Any) -> None:
    """An entry whose time was over when its key was put again, and is not by a clock that was set back."""
    tier = open_tier()
    put(tier, 1, ACME)
    put(tier, 1, BETA)
    assert owned(tier) == {1: BETA.id}
    assert len(tier.index) == 1
    assert tier.find((1).to_bytes(32, "little")) != NO_ROW
    tier.write_tombstones()
    assert tier.index.holdings.by_owner == {BETA.id: CHUNK}
    assert owned(open_tier()) == {1: BETA.id}
