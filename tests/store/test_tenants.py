"""Owners: whom chunks count for, what is told of them, and how all of one is deleted."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtier
from kvtier import InvalidRequest, Namespace, Owner, Reason
from kvtier.config import MIB
from kvtier.store import tenants
from small_stores import CHUNK, WallClock
from store_calls import HIT, KNOWN, MISS, STORED, got, idle, outcome

if TYPE_CHECKING:
    from pathlib import Path

LAYOUT = kvtier.KVLayout(layers=2, kv_heads=2, head_dim=8, dtype="bfloat16", chunk_tokens=16)
TOKENS = list(range(64))


def namespace(salt: str) -> Namespace:
    return Namespace(model="m", weights=bytes(32), layout=LAYOUT, salt=salt)


ACME, BETA = Owner(namespace("acme's").digest(), "acme"), Owner(namespace("beta's").digest(), "beta")
OTHER = Owner(namespace("another").digest(), "acme")  # the same tenant in another namespace


def held(store: kvtier.Store, tier: str) -> dict[tuple[str, str], tuple[int, int]]:
    """Chunks and bytes by namespace's public name and tenant."""
    return {
        (row.namespace, row.tenant): (row.chunks, row.nbytes) for row in store.owners() if row.tier == tier
    }


def named(owner: Owner) -> tuple[str, str]:
    return owner.name.namespace.hex(), owner.tenant


def test_an_owner_is_the_same_everywhere() -> None:
    assert Owner().id == 0
    assert Owner(tenant="acme").id == 0x2404DE01938A9D4
    assert Owner(bytes(range(32)), "acme").id == 0xCDE77D5A870CC47
    assert Owner(bytes(range(32))).id == 0xA1AEFAF08C6630DF
    public = "2612811ae04b5d66eeb46f4a47bf7ff0556a61e14928b494fbd4fe23eeddbe7b"
    assert Owner(bytes(range(32)), "acme").name.namespace.hex() == public
    assert Owner(tenant="acme").name.namespace == b""


def test_owners_differ_by_namespace_and_by_tenant() -> None:
    ids = [owner.id for owner in (ACME, BETA, OTHER, Owner(ACME.namespace), Owner(tenant="acme"), Owner())]
    assert len(set(ids)) == len(ids)


def test_an_owner_does_not_show_what_makes_keys() -> None:
    assert ACME.namespace.hex() not in repr(ACME)
    assert str(ACME.namespace) not in repr(ACME)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"namespace": b"short"}, "namespace is 5 bytes"),
        ({"namespace": "text"}, "namespace is str"),
        ({"tenant": "x" * 41}, "of 41 bytes, needs at most 40"),
        ({"tenant": "é" * 21}, "of 42 bytes"),
        ({"tenant": "a\0"}, "no NUL"),
        ({"tenant": "\ud800"}, "that UTF-8 can spell"),
        ({"tenant": b"acme"}, "tenant is bytes"),
    ],
)
def test_what_cannot_be_an_owner(arguments: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        Owner(**arguments)


def test_wrong_owners_are_refused_before_anything_happens(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store()
    with pytest.raises(InvalidRequest, match=r"owner is str, needs a kvtier.Owner"):
        store.put(keys(1), payloads(1), owner="acme")
    with pytest.raises(InvalidRequest, match="owner is bytes"):
        store.reserve(keys(1), CHUNK, owner=b"acme")
    assert store.stats()["put.requested"] == 0


@pytest.mark.parametrize("dram", [0, MIB])
def test_invariant_12_what_is_stored_under_a_salt_is_unreachable_without_it(
    open_store: Any, payloads: Any, tmp_path: Path, dram: int
) -> None:
    """In every tier, by every call, after a restart too; and what is told of owners makes no key of it."""
    mine, first = namespace("secret"), payloads(4)
    owner = Owner(mine.digest(), "acme")
    store = open_store(dram=dram)
    assert store.put(mine.chunk_keys(TOKENS), first, until="disk", owner=owner).result(20).ok
    for _ in range(2):
        public = {bytes.fromhex(row.namespace) for row in store.owners() if row.namespace}
        assert public == {owner.name.namespace}
        guesses = [namespace(salt).digest() for salt in ("", "Secret", "secret ", "acme")]
        for digest in [*guesses, *public]:
            foreign = kvtier.chunk_keys(TOKENS, namespace=digest, chunk_tokens=16)
            assert store.match(foreign) == 0
            result, targets = got(store, foreign)
            assert {outcome(result, i) for i in range(4)} == {(MISS, Reason.ABSENT)}
            assert not targets.any()
            with store.read(foreign).result(20) as lease:
                assert lease.views == [None] * 4
            assert store.prefetch(foreign).result(20).status.tolist() == [MISS] * 4
            with store.pin(foreign) as pinned:
                assert pinned == 0
            assert store.delete(foreign).result(20) == 0
            assert store.delete_all(namespace=digest).result(20) == 0
        result, targets = got(store, mine.chunk_keys(TOKENS))
        assert result.status.tolist() == [HIT] * 4
        assert (targets == first).all()
        store.close()
        store = open_store(dram=dram)
    told = repr(store.owners()) + repr(store.stats())
    secrets = [mine.digest(), *mine.chunk_keys(TOKENS)]
    assert "secret" not in told
    assert not [secret for secret in secrets if secret.hex() in told or repr(secret) in told]
    store.close()
    files = [file for file in (tmp_path / "store").rglob("*") if file.is_file()]
    on_disk = b"".join(file.name.encode() + file.read_bytes() for file in files)
    assert mine.digest() not in on_disk
    assert b"secret" not in on_disk


def test_owners_tells_what_each_holds_in_each_tier(
    open_store: Any, keys: Any, payloads: Any, kind: str
) -> None:
    wall = WallClock(1000.0)
    store = open_store(wall=wall)
    k, p = keys(9), payloads(9)
    assert store.owners() == []
    assert store.put(k[:2], p[:2], until="disk", owner=ACME).result(20).ok
    wall.now = 1007.5
    assert store.put(k[2:5], p[2:5], until="disk", owner=ACME, codec="lz4").result(20).ok
    assert store.put(k[5:6], p[5:6], until="disk", owner=OTHER).result(20).ok
    with store.reserve(k[6:8], CHUNK, owner=BETA) as reservation:
        for view, payload in zip(reservation.views, p[6:], strict=False):
            view[:] = payload
        assert reservation.commit(until="disk").result(20).ok
    assert store.put(k[8:], p[8:], until="disk").result(20).ok
    expected = {
        named(ACME): (5, 5 * CHUNK), named(OTHER): (1, CHUNK), named(BETA): (2, 2 * CHUNK),
        ("", ""): (1, CHUNK),
    }  # fmt: skip
    assert held(store, "dram") == held(store, "disk") == expected
    rows = {(row.tier, row.namespace, row.tenant): row for row in store.owners()}
    for tier in ("dram", "disk") if kind == "slab" else ("dram",):  # a file's time is the device's
        row = rows[(tier, *named(ACME))]
        assert (row.oldest, row.median, row.newest, row.expired, row.id) == (1000, 1007, 1007, 0, ACME.id)
    store.close()
    store = open_store(wall=wall)
    assert held(store, "dram") == {}
    assert held(store, "disk") == expected
    assert got(store, k)[0].ok
    assert held(store, "dram") == expected, "what is read into DRAM keeps its owner"
    if kind == "slab":
        assert {row.oldest for row in store.owners() if row.tenant == "beta"} == {1007}, "and its age"


def test_owners_adds_up_over_paths(open_store: Any, keys: Any, payloads: Any, tmp_path: Path) -> None:
    store = open_store([tmp_path / "a", tmp_path / "b", tmp_path / "c"], capacity=24 * MIB)
    assert store.put(keys(12), payloads(12), until="disk", owner=ACME).result(20).ok
    assert all(path.tier.index.used_bytes for path in store._core.paths)
    assert held(store, "disk") == {named(ACME): (12, 12 * CHUNK)}
    assert store.delete_all(tenant="acme").result(20) == 12
    assert store.owners() == []


def test_a_known_chunk_keeps_its_owner(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store()
    assert store.put(keys(1), payloads(1), until="disk", owner=ACME).result(20).status.tolist() == [STORED]
    assert store.put(keys(1), payloads(1), until="disk", owner=BETA).result(20).status.tolist() == [KNOWN]
    assert held(store, "disk") == held(store, "dram") == {named(ACME): (1, CHUNK)}
    assert store.delete_all(tenant="beta").result(20) == 0
    assert store.match(keys(1)) == 1


def test_a_chunk_written_again_from_dram_keeps_its_owner(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store()
    assert store.put(keys(1), payloads(1), until="disk", owner=ACME, ttl=1000).result(20).ok
    with store._core.lock:
        tier = store._core.paths[0].tier
        tier.discard(tier.find(keys(1)[0]))
    assert store.put(keys(1), payloads(1), until="disk", owner=BETA).result(20).status.tolist() == [KNOWN]
    assert held(store, "disk") == {named(ACME): (1, CHUNK)}
    with store._core.lock:
        assert tier.index.expires_at[tier.find(keys(1)[0])] > 0


DELETIONS: list[tuple[dict[str, Any], set[Owner]]] = [
    ({"tenant": "acme"}, {ACME, OTHER}),
    ({"tenant": "beta"}, {BETA}),
    ({"namespace": ACME.namespace}, {ACME}),
    ({"namespace": ACME.name.namespace.hex()}, {ACME}),
    ({"namespace": OTHER.namespace, "tenant": "acme"}, {OTHER}),
    ({"namespace": ACME.namespace, "tenant": "beta"}, set()),
    ({"namespace": bytes(32)}, set()),
    ({"tenant": "nobody"}, set()),
]


@pytest.mark.parametrize(("which", "expected"), DELETIONS)
@pytest.mark.parametrize("dram", [0, 2 * MIB])
def test_all_of_an_owner_is_deleted_and_nothing_else(
    open_store: Any, keys: Any, payloads: Any, which: dict[str, Any], expected: set[Owner], dram: int
) -> None:
    owners = [ACME, OTHER, BETA, Owner()]
    batches = [keys(12)[i * 3 : i * 3 + 3] for i in range(4)]
    store = open_store(dram=dram)
    for batch, owner in zip(batches, owners, strict=True):
        assert store.put(batch, payloads(3), until="disk", owner=owner).result(20).ok
    assert store.delete_all(**which).result(20) == 3 * len(expected)
    for _ in range(2):
        for batch, owner in zip(batches, owners, strict=True):
            assert store.match(batch) == (0 if owner in expected else 3)
            assert got(store, batch)[0].ok == (owner not in expected)
        assert store.stats()["disk.chunks"] == 12 - 3 * len(expected)
        store.close()
        store = open_store(dram=dram)


def test_a_deletion_survives_a_crash(open_store: Any, keys: Any, payloads: Any, tmp_path: Path) -> None:
    store = open_store()
    assert store.put(keys(5), payloads(5), until="disk", owner=ACME).result(20).ok
    assert store.put(keys(8)[5:], payloads(3), until="disk", owner=BETA).result(20).ok
    assert store.delete_all(tenant="acme").result(20) == 5
    shutil.copytree(tmp_path / "store", tmp_path / "left")  # as `kill -9` leaves it
    found = open_store(tmp_path / "left")
    assert found.match(keys(1)) == 0
    assert found.match(keys(8)[5:]) == 3
    assert held(found, "disk") == {named(BETA): (3, 3 * CHUNK)}


def test_puts_under_way_are_deleted_too(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store(capacity=16 * MIB)
    puts = [store.put(keys(60), payloads(60), until="disk", owner=ACME) for _ in range(3)]
    others = store.put(keys(70)[60:], payloads(10), until="disk", owner=BETA)
    store.delete_all(tenant="acme").result(20)
    assert store.match(keys(1)) == 0
    for put in puts:
        for i in range(60):
            assert outcome(put.result(20), i) in [
                (STORED, Reason.NONE), (KNOWN, Reason.NONE), (kvtier.Status.FAILED, Reason.DELETED)
            ]  # fmt: skip
    assert others.result(20).ok
    idle(store)
    assert [store.match([key]) for key in keys(70)] == [0] * 60 + [1] * 10
    assert held(store, "disk") == {named(BETA): (10, 10 * CHUNK)}


def test_what_is_leased_outlives_its_deletion(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store()
    assert store.put(keys(2), payloads(2), until="disk", owner=ACME).result(20).ok
    with store.read(keys(2)).result(20) as lease:
        assert store.delete_all(namespace=ACME.namespace).result(20) == 2
        assert store.match(keys(2)) == 0
        assert store.put(keys(2), np.zeros((2, CHUNK), np.uint8), owner=BETA).result(20).ok
        assert (np.stack(lease.views) == payloads(2)).all()
    assert held(store, "dram") == {named(BETA): (2, 2 * CHUNK)}


def test_a_deletion_leaves_alone_what_took_the_place_of_a_chunk(
    open_store: Any, keys: Any, payloads: Any
) -> None:
    """Others get the lock in between: a row may be free by then, or somebody else's."""
    store = open_store(dram=0)
    k, p = keys(4), payloads(4)
    assert store.put(k[:2], p[:2], until="disk", owner=ACME).result(20).ok
    core, tier = store._core, store._core.paths[0].tier
    with core.lock:
        rows = tier.index.rows_of({ACME.id})
    assert store.delete(k[:2]).result(20) == 2
    with core.lock:
        assert not any(tenants._drop(core, tier, row, {ACME.id}) for row in rows)
    assert store.put(k[2:], p[2:], until="disk", owner=BETA).result(20).ok
    with core.lock:
        assert set(tier.index.rows_of({BETA.id})) == set(rows), "the same rows"
        assert not any(tenants._drop(core, tier, row, {ACME.id}) for row in rows)
    assert store.match(k[2:]) == 2


def test_a_deletion_needs_to_know_of_whom(open_store: Any) -> None:
    store = open_store()
    for arguments, words in [
        ({}, "neither namespace nor tenant"),
        ({"tenant": 3}, "tenant is int"),
        ({"tenant": "x" * 50}, "at most 40"),
        ({"namespace": b"short"}, "needs the 32 bytes"),
        ({"namespace": "zz" * 32}, "needs the 32 bytes"),
        ({"namespace": "abcd"}, "64 hex digits"),
    ]:
        with pytest.raises(InvalidRequest, match=words):
            store.delete_all(**arguments)


def test_nothing_is_counted_for_nobody(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store()
    assert store.put(keys(3), payloads(3), until="disk").result(20).ok
    assert store._core.paths[0].tier.index.holdings.by_owner == {}
    assert held(store, "disk") == {("", ""): (3, 3 * CHUNK)}
    assert store.delete_all(namespace=b"", tenant="").result(20) == 0, "nobody is no owner"
