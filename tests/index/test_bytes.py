"""The index that counts bytes: one order of recency over all sizes, and nothing evicted in vain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvtier.index.bytes import ByteCache
from kvtier.index.rows import NO_ROW

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = 4096


def add(cache: ByteCache, key: bytes, pages: int) -> int:
    offset = cache.reserve(pages * PAGE)
    assert offset is not None
    assert cache.slots.size_at(offset) == pages * PAGE
    row = cache.insert(key, offset, pages * PAGE)
    cache.unpin(row)
    return row


def test_the_oldest_goes_whatever_its_size(keys: Callable[..., list[Any]]) -> None:
    cache = ByteCache(10 * PAGE)
    names = keys(5)
    for name, pages in zip(names, (1, 5, 2, 2), strict=False):
        add(cache, name, pages)
    add(cache, names[4], 3)
    assert [cache.find(name) != NO_ROW for name in names] == [False, False, True, True, True]
    assert cache.used_bytes == 7 * PAGE
    assert cache.evicted == 2


def test_nothing_is_evicted_in_vain(keys: Callable[..., list[Any]]) -> None:
    cache = ByteCache(10 * PAGE)
    names = keys(2)
    cache.pin(add(cache, names[0], 6))
    add(cache, names[1], 3)
    assert cache.reserve(5 * PAGE) is None
    assert cache.evicted == 0
    assert cache.reserve(4 * PAGE) is not None
    assert cache.evicted == 1


@pytest.mark.parametrize("pins", [0, 1])
def test_what_is_adopted_takes_room_that_is_not_there(pins: int, keys: Callable[..., list[Any]]) -> None:
    cache = ByteCache(4 * PAGE)
    names = keys(3)
    add(cache, names[0], 3)
    row = cache.adopt(names[1], 3 * PAGE, 7, stored_bytes=3 * PAGE, codec=0)
    if not pins:
        cache.unpin(row)
    assert cache.slots.left == -2 * PAGE
    assert (cache.reserve(2 * PAGE) is not None) == (not pins)
    assert cache.evicted == 2 * (not pins)


def test_a_slot_can_be_made_smaller() -> None:
    cache = ByteCache(4 * PAGE)
    offset = cache.reserve(4 * PAGE)
    assert offset is not None
    offset = cache.shrink(offset, PAGE + 1)
    assert cache.used_bytes == cache.slots.size_at(offset) == 2 * PAGE
    cache.release(offset)
    assert (cache.used_bytes, cache.pinned(), cache.slots.left) == (0, 0, 4 * PAGE)


@given(st.lists(st.tuples(st.sampled_from(["put", "pin", "unpin", "drop"]), st.integers(0, 9)), max_size=80))
def test_bytes_add_up_and_what_is_pinned_stays(steps: list[tuple[str, int]]) -> None:
    cache = ByteCache(12 * PAGE)
    pinned: dict[int, int] = {}
    for what, number in steps:
        key = bytes([number]) * 32
        row = cache.find(key)
        if what == "put" and row == NO_ROW:
            if (offset := cache.reserve((1 + number % 4) * PAGE)) is not None:
                cache.unpin(cache.insert(key, offset, cache.slots.size_at(offset)))
        elif what == "pin" and row != NO_ROW and number not in pinned:
            cache.pin(row)
            pinned[number] = row
        elif what == "unpin" and number in pinned:
            cache.unpin(pinned.pop(number))
        elif what == "drop" and row != NO_ROW and number not in pinned:
            cache.discard(row)
        rows = cache.table.rows().tolist()
        assert cache.used_bytes == sum(cache.slots.size_at(cache.offset[row]) for row in rows) <= 12 * PAGE
        assert cache.slots.left == 12 * PAGE - cache.used_bytes
        assert set(pinned.values()) <= set(rows)
        assert cache.pinned() == len(pinned)
