"""Reservations: memory of the store that the caller fills in place, then commits or aborts."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier import Reason
from kvtier.config import MIB
from small_stores import CHUNK
from store_calls import KNOWN, REFUSED, STORED, got


@pytest.mark.parametrize("dram", [0, 2 * MIB])
def test_a_reservation_is_filled_in_place(open_store: Any, keys: Any, payloads: Any, dram: int) -> None:
    store = open_store(dram=dram)
    k, p = keys(4), payloads(4)
    store.put(k[1:2], p[1:2], until="disk").result(20)
    with store.reserve(k, CHUNK) as reservation:
        assert [view is None for view in reservation.views] == [False, True, False, False]
        assert reservation.result.status.tolist() == [STORED, KNOWN, STORED, STORED]
        for i, view in enumerate(reservation.views):
            if view is not None:
                view[:] = p[i]
        assert store.match(k) == 0, "not before it is committed"
        result = reservation.commit(until="disk").result(20)
    assert result.status.tolist() == [STORED, KNOWN, STORED, STORED]
    assert (got(store, k)[1] == p).all()
    store.close()
    assert (got(open_store(dram=dram), k)[1] == p).all()


def test_an_aborted_reservation_leaves_nothing(open_store: Any, keys: Any) -> None:
    store = open_store()
    with store.reserve(keys(4), CHUNK):
        assert store.stats()["dram.pinned_slots"] == 4
    assert store.stats()["dram.pinned_slots"] == 0
    assert store.match(keys(4)) == 0
    assert store.stats()["put.requested"] == 0


def test_a_put_overtakes_a_reservation(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store()
    reservation = store.reserve(keys(1), CHUNK)
    assert store.put(keys(1), payloads(1), until="disk").result(20).ok
    reservation.views[0][:] = 0
    assert reservation.commit(until="disk").result(20).status.tolist() == [KNOWN]
    assert (got(store, keys(1))[1] == payloads(1)).all()


def test_a_reservation_takes_what_there_is(open_store: Any, keys: Any) -> None:
    store = open_store(dram=MIB)
    with store.reserve(keys(20), CHUNK) as reservation:
        assert reservation.result.status.tolist() == [STORED] * 16 + [REFUSED] * 4
        assert reservation.result.reason.tolist() == [0] * 16 + [Reason.NO_SPACE] * 4
