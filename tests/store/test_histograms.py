"""How long chunks stay and when they are wanted again, as a store tells it."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier import StoreClosed
from kvtier.config import MIB
from small_stores import WallClock
from store_calls import got

START = 1_000_000_000.0


def told(store: Any, name: str) -> tuple[int, int]:
    histogram = store.histograms()[name]
    return histogram.total, sum(histogram.counts)


@pytest.mark.parametrize(("path", "tier"), [(None, "disk"), (False, "dram")])
def test_a_gap_is_from_the_put_or_the_last_get(
    open_store: Any, keys: Any, payloads: Any, path: Any, tier: str
) -> None:
    wall = WallClock(START)
    store = open_store(path, dram=0 if path is None else 2 * MIB, wall=wall)
    k, p = keys(3), payloads(3)
    assert store.put(k, p, until=tier).result(20).ok
    wall.now += 100
    assert got(store, k[:2])[0].ok
    assert told(store, f"{tier}.reuse_gap") == (200, 2)
    wall.now += 7
    assert store.put(k, p, until=tier).result(20).ok  # known already: that is no get
    assert got(store, k)[0].ok
    assert told(store, f"{tier}.reuse_gap") == (200 + 7 + 7 + 107, 5)
    other = "dram" if tier == "disk" else "disk"
    assert told(store, f"{other}.reuse_gap") == told(store, f"{tier}.residence") == (0, 0)
    store.close()
    with pytest.raises(StoreClosed):
        store.histograms()


def test_residence_is_until_a_chunk_makes_room(open_store: Any, keys: Any, payloads: Any) -> None:
    wall = WallClock(START)
    store = open_store(False, dram=MIB, wall=wall)
    k, p = keys(40), payloads(40)
    for i in range(40):
        assert store.put(k[i : i + 1], p[i : i + 1]).result(20).ok
        wall.now += 10
    evicted = store.stats()["dram.evictions"]
    held = 40 - evicted
    assert evicted > 0
    assert told(store, "dram.residence") == (evicted * held * 10, evicted)
