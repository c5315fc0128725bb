"""`check_dram`: chunks in DRAM are checked at every get."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvtier import Reason
from small_stores import CHUNK
from store_calls import HIT, MISS, STORED, got


def flip(store: Any, key: bytes) -> None:
    """One bit of a cached chunk, as memory that goes bad would."""
    dram = store._core.dram
    dram.view(dram.index.offset[dram.find(key)], CHUNK)[777] ^= 4


@pytest.mark.parametrize("source", ["put", "commit", "disk"])
def test_invariant_1_a_bit_that_flips_in_dram_is_a_miss(
    open_store: Any, keys: Any, payloads: Any, source: str
) -> None:
    store = open_store(check_dram=True)
    if source == "commit":
        with store.reserve(keys(4), CHUNK) as reservation:
            for view, payload in zip(reservation.views, payloads(4), strict=True):
                view[:] = payload
            reservation.commit(until="disk").result(20)
    else:
        store.put(keys(4), payloads(4), until="disk").result(20)
    if source == "disk":
        store.close()
        store = open_store(check_dram=True)
        assert store.prefetch(keys(4)).result(20).ok
    assert got(store, keys(4))[0].ok
    flip(store, keys(4)[1])
    result, targets = got(store, keys(4))
    assert result.status.tolist() == [HIT, MISS, HIT, HIT]
    assert result.reason[1] == Reason.CHECKSUM
    assert (targets[[0, 2, 3]] == payloads(4)[[0, 2, 3]]).all()
    assert store.stats()["dram.chunks"] == 3
    again, targets = got(store, keys(4))
    assert again.ok, "the disk still has it"
    assert (targets == payloads(4)).all()


def test_rows_are_checked_against_their_own_chunk_after_evictions(
    open_store: Any, keys: Any, payloads: Any
) -> None:
    store = open_store(check_dram=True, dram=1 << 20)
    for start in range(0, 80, 8):
        names, values = keys(80)[start : start + 8], payloads(80)[start : start + 8]
        assert set(store.put(names, values).result(20).status.tolist()) == {STORED}
        result, targets = got(store, names)
        assert result.ok
        assert (targets == values).all()
    assert store.stats()["get.checksum"] == 0


@pytest.mark.parametrize("nbytes", [1, 240, 241, 5000])
def test_payloads_of_any_length_are_checked(open_store: Any, key: Any, payload: Any, nbytes: int) -> None:
    store = open_store(check_dram=True, path=False)
    store.put([key(1)], [payload(1, nbytes)]).result(20)
    target = np.zeros(nbytes, np.uint8)
    assert store.get([key(1)], into=[target]).result(20).ok
    store._core.dram.view(store._core.dram.index.offset[store._core.dram.find(key(1))], nbytes)[0] ^= 1
    assert store.get([key(1)], into=[target]).result(20).reason.tolist() == [Reason.CHECKSUM]
    assert store.match([key(1)]) == 0
