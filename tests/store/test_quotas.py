"""Quotas: a tenant that reaches its own makes room for itself, and others notice nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtier
from kvtier import InvalidRequest, Owner, Reason
from kvtier.config import KIB, MIB, StoreConfig
from kvtier.tiers.files.directory import OWNERS
from kvtier.tiers.slab.directory import JOURNAL
from small_stores import CHUNK, WallClock
from store_calls import HIT, KNOWN, REFUSED, STORED, got, outcome

if TYPE_CHECKING:
    from pathlib import Path

ACME, BETA = Owner(tenant="acme"), Owner(tenant="beta")
ELSEWHERE = Owner(bytes([1]) * 32, "acme")


def put(store: kvtier.Store, keys: list[Any], owner: Owner, **options: Any) -> kvtier.BatchResult:
    values = np.stack([np.full(CHUNK, key[0], np.uint8) for key in keys])
    return store.put(keys, values, owner=owner, **{"until": "disk", **options}).result(20)


def there(store: kvtier.Store, keys: list[Any]) -> list[int]:
    return [store.match([key]) for key in keys]


@pytest.mark.parametrize("dram", [0, 2 * MIB])
def test_a_tenants_own_oldest_chunks_make_room(open_store: Any, keys: Any, dram: int) -> None:
    store = open_store(dram=dram, quotas={"acme": 4 * CHUNK})
    k = keys(40)
    assert put(store, k[20:40], BETA).ok
    for i in range(10):
        assert put(store, k[i : i + 1], ELSEWHERE if i % 2 else ACME).status.tolist() == [STORED]
        assert store.stats()["tenant.acme.disk_bytes"] == min(i + 1, 4) * CHUNK
    assert there(store, k[:10]) == [0] * 6 + [1] * 4
    assert there(store, k[20:40]) == [1] * 20, "others lose nothing"
    assert got(store, k[6:7])[0].ok
    assert put(store, k[10:11], ACME).ok
    assert there(store, k[:11]) == [0] * 6 + [1, 0, 1, 1, 1], "the least recently used one goes"


def test_a_put_larger_than_the_quota_keeps_its_head(open_store: Any, keys: Any) -> None:
    store = open_store(quotas={"acme": 4 * CHUNK})
    assert put(store, keys(20)[10:12], ACME).ok
    result = put(store, keys(7), ACME)
    assert result.status.tolist() == [STORED] * 4 + [REFUSED] * 3
    assert set(result.reason[4:].tolist()) == {Reason.QUOTA}
    assert store.stats()["put.quota"] == 3
    assert there(store, keys(7)) == [1] * 4 + [0] * 3
    assert there(store, keys(20)[10:12]) == [0, 0]
    assert store.flush().result(20).failed == 3


def test_a_store_in_dram_alone_has_quotas_of_dram(open_store: Any, keys: Any) -> None:
    store = open_store(False, quotas={"acme": 4 * CHUNK})
    k = keys(30)
    assert put(store, k[20:30], BETA, until="dram").ok
    result = put(store, k[:6], ACME, until="dram")
    assert result.status.tolist() == [STORED] * 4 + [REFUSED] * 2
    assert outcome(result, 4) == (REFUSED, Reason.QUOTA)
    assert put(store, k[6:8], ACME, until="dram").ok
    assert there(store, k[:8]) == [1, 1, 0, 0, 0, 0, 1, 1], "the tail of a prefix goes before its head"
    assert there(store, k[20:30]) == [1] * 10
    stats = store.stats()
    assert (stats["tenant.acme.dram_bytes"], stats["tenant.acme.disk_bytes"]) == (4 * CHUNK, 0)


def test_what_a_tenant_has_pinned_cannot_make_room(open_store: Any, keys: Any) -> None:
    store = open_store(False, quotas={"acme": 2 * CHUNK})
    assert put(store, keys(2), ACME, until="dram").ok
    with store.read(keys(2)).result(20):
        assert outcome(put(store, keys(3)[2:], ACME, until="dram")) == (REFUSED, Reason.QUOTA)
        with store.reserve(keys(3)[2:], CHUNK, owner=ACME) as reservation:
            assert outcome(reservation.result) == (REFUSED, Reason.QUOTA)
            assert outcome(reservation.commit().result(20)) == (REFUSED, Reason.QUOTA)
        assert put(store, keys(9)[3:], BETA, until="dram").ok
    assert put(store, keys(3)[2:], ACME, until="dram").ok


def test_in_dram_a_tenant_has_the_same_part_as_on_disk(open_store: Any, keys: Any) -> None:
    store = open_store(capacity=8 * MIB, dram=2 * MIB, quotas={"acme": MIB, "small": CHUNK})
    k = keys(40)
    assert put(store, k[20:30], BETA).ok
    assert put(store, k[:12], ACME).ok
    stats = store.stats()
    assert stats["tenant.acme.dram_bytes"] == 2 * MIB * MIB // (8 * MIB)
    assert stats["tenant.acme.disk_bytes"] == 12 * CHUNK
    result, targets = got(store, k[:12])
    assert result.status.tolist() == [HIT] * 12
    assert [int(target[0]) for target in targets] == [key[0] for key in k[:12]]
    assert store.stats()["tenant.acme.dram_bytes"] == 4 * CHUNK
    with store.read(k[:12]).result(20) as lease:
        held = sum(view is not None for view in lease.views)
        assert held == 4, "a request larger than what a tenant may have keeps its head"
        assert lease.views[3] is not None
    assert put(store, k[12:13], Owner(tenant="small")).ok
    with store.read(k[12:13]).result(20) as lease:
        assert lease.views[0] is not None, "one chunk it may always have"
    dram = store._core.dram
    with store._core.lock:
        assert all(dram.find(key) >= 0 for key in k[20:30]), "others lose nothing"


def test_a_quota_is_in_equal_shares_over_the_paths(open_store: Any, keys: Any, tmp_path: Path) -> None:
    store = open_store([tmp_path / "a", tmp_path / "b"], capacity=16 * MIB, quotas={"acme": 8 * CHUNK})
    k = keys(60)
    assert put(store, k[38:60], BETA).ok
    for i in range(30):
        assert put(store, k[i : i + 1], ACME).ok
        held = [path.tier.index.holdings.by_tenant["acme"] for path in store._core.paths]
        assert max(held) <= 4 * CHUNK
    assert held == [4 * CHUNK] * 2
    assert sum(there(store, k[:30])) == 8
    result = put(store, k[29:40], Owner(bytes([2]) * 32, "acme"))
    assert result.status.tolist() == [KNOWN] + [STORED] * 7 + [REFUSED] + [KNOWN] * 2
    assert there(store, k[38:60]) == [1] * 22


def test_a_path_whose_share_has_room_comes_first(open_store: Any, keys: Any, tmp_path: Path) -> None:
    store = open_store([tmp_path / "a", tmp_path / "b"], capacity=16 * MIB, quotas={"acme": 8 * CHUNK})
    with store._core.lock:
        store._core.paths[1].turn += 1e3  # as if it had been far ahead
    for i in range(8):
        assert put(store, keys(8)[i : i + 1], ACME).ok
    assert there(store, keys(8)) == [1] * 8
    assert store.stats()["disk.evictions"] == 0


def test_a_quota_holds_over_restarts_and_changes(open_store: Any, keys: Any) -> None:
    k = keys(40)
    store = open_store(quotas={"acme": 6 * CHUNK})
    assert put(store, k[:6], ACME).ok
    store.close()
    store = open_store(quotas={"acme": 6 * CHUNK})
    assert store.stats()["tenant.acme.disk_bytes"] == 6 * CHUNK
    assert put(store, k[6:8], ACME).ok
    assert sum(there(store, k[:6])) == 4
    assert there(store, k[6:8]) == [1, 1]
    store.close()
    store = open_store(quotas={"acme": 3 * CHUNK, "beta": CHUNK})
    assert store.stats()["tenant.acme.disk_bytes"] == 6 * CHUNK
    assert put(store, k[8:9], ACME).ok
    assert sum(there(store, k[:9])) == 3, "a lowered one holds from the next put on"
    assert there(store, k[8:9]) == [1]
    assert store.stats()["tenant.acme.disk_bytes"] == 3 * CHUNK
    store.close()
    store = open_store()
    assert put(store, k[10:30], ACME).ok
    assert "tenant.acme.disk_bytes" not in store.stats()


def test_an_owner_whose_name_is_lost_counts_again_once_it_is_known(
    open_store: Any, keys: Any, tmp_path: Path, kind: str
) -> None:
    store = open_store(dram=0, quotas={"acme": 6 * CHUNK})
    k = keys(20)
    assert put(store, k[:6], ACME).ok
    store.close()
    if kind == "files":
        for name in (tmp_path / "store" / OWNERS).iterdir():
            name.unlink()
    else:
        journal = tmp_path / "store" / JOURNAL
        data = bytearray(journal.read_bytes())
        data[data.index(b"acme")] ^= 1
        journal.write_bytes(data)
    store = open_store(dram=0, quotas={"acme": 6 * CHUNK})
    assert there(store, k[:6]) == [1] * 6, "only the name is lost"
    assert store.stats()["tenant.acme.disk_bytes"] == 0
    assert {(row.tenant, row.id) for row in store.owners()} == {("", ACME.id)}
    assert put(store, k[6:8], ACME).ok
    assert store.stats()["tenant.acme.disk_bytes"] == 6 * CHUNK
    assert sum(there(store, k[:8])) == 6
    assert there(store, k[6:8]) == [1, 1]
    store.close()
    store = open_store(dram=0, quotas={"acme": 6 * CHUNK})
    assert {row.tenant for row in store.owners()} == {"acme"}
    assert store.stats()["tenant.acme.disk_bytes"] == 6 * CHUNK


def test_room_in_a_quota_is_that_of_the_slots(open_store: Any, keys: Any) -> None:
    """Encoded chunks take smaller slots, and count for what they take."""
    store = open_store(dram=0, quotas={"acme": 4 * CHUNK})
    flat = np.zeros((10, CHUNK), np.uint8)
    assert store.put(keys(10), flat, until="disk", owner=ACME, codec="lz4").result(20).ok
    assert there(store, keys(10)) == [1] * 10
    assert 0 < store.stats()["tenant.acme.disk_bytes"] <= 4 * CHUNK


def test_what_expired_no_longer_counts(open_store: Any, keys: Any) -> None:
    wall = WallClock()
    store = open_store(quotas={"acme": 4 * CHUNK}, wall=wall)
    assert put(store, keys(4), ACME, ttl=10).ok
    wall.now += 10
    assert there(store, keys(4)) == [0] * 4
    store._core.sweeper.step()
    assert store.stats()["tenant.acme.disk_bytes"] == store.stats()["tenant.acme.dram_bytes"] == 0


@pytest.mark.parametrize(
    ("quotas", "words"),
    [
        ({"acme": 1000}, r"the quota of 'acme' is 1000 bytes, needs room for one chunk of 65536$"),
        ({"": MIB}, "quotas names a tenant ''"),
        ({"x" * 41: MIB}, "at most 40"),
    ],
)
def test_what_cannot_be_a_quota(tmp_path: Path, quotas: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        StoreConfig(paths=(tmp_path,), chunk_bytes=64 * KIB, quotas=quotas)
    with pytest.raises(InvalidRequest, match=r"one chunk of 65536 on each path"):
        StoreConfig(paths=(tmp_path / "a", tmp_path / "b"), chunk_bytes=CHUNK, quotas={"a": CHUNK})
