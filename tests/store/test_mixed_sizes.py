"""Payloads of several sizes: extents change their slot size, and all that hangs on it follows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

KIB, MIB = 1 << 10, 1 << 20


def test_an_extent_changes_to_slots_of_more_parts(open_store: Any, key: Any, payload: Any) -> None:
    store = open_store(capacity=3 * MIB, chunk_bytes=224 * KIB, landing=MIB, dram=0, close_timeout=0.2)
    small, large = 132 * KIB, 200 * KIB  # one slot to an extent either way; three parts and four
    first = payload(1, small)
    assert store.put([key(1)], [first], until="disk").result(5).ok
    store.delete([key(1)]).result(5)
    second = payload(2, large)
    try:
        assert store.put([key(2)], [second], until="disk").result(3).ok
    except TimeoutError:
        store.close()
        raise
    target = np.empty(large, np.uint8)
    assert store.get([key(2)], into=[target]).result(5).ok
    assert (target == second).all()


@pytest.mark.parametrize("other", [100, 64 * KIB])
def test_invariant_4_a_chunk_only_in_dram_keeps_its_length_on_disk(
    open_store: Any, key: Any, payload: Any, other: int
) -> None:
    store = open_store(capacity=MIB, dram=4 * MIB)
    first = payload(0, 5000)
    assert store.put([key(0)], [first], until="disk").result(5).ok
    for i in range(1, 41):  # push it out of the disk
        assert store.put([key(i)], [payload(i)], until="disk").result(5).ok
    assert store._core.paths[0].tier.find(key(0)) == -1
    assert store._core.dram.find(key(0)) != -1
    assert store.put([key(0)], [payload(99, other)], until="disk").result(5).ok
    store.close()
    store = open_store(capacity=MIB, dram=0)
    with store.read([key(0)]).result(5) as lease:
        assert lease.views[0] is not None
        assert len(lease.views[0]) == 5000
        assert (lease.views[0] == first).all()
