"""SlotAllocator against a plain model of intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.config import page_up
from kvtier.index.slots import UNASSIGNED, SlotAllocator

PAGE = 4096
EXTENT = 16 * PAGE
SIZES = st.sampled_from([1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE, 5 * PAGE, 8 * PAGE, 9 * PAGE, EXTENT])


class SlotMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.slots = SlotAllocator(5 * EXTENT + PAGE, EXTENT)
        self.dealt: dict[int, int] = {}  # offset -> bytes asked for

    @rule(nbytes=SIZES, count=st.integers(1, 6))
    def allocate(self, nbytes: int, count: int) -> None:
        for _ in range(count):
            size = self.slots.size_for(nbytes)
            assert nbytes <= size <= page_up(nbytes) + page_up(nbytes) // 8
            has_free = self.slots.has_free(nbytes)
            offset = self.slots.allocate(nbytes)
            assert has_free == (offset is not None)
            if offset is None:
                assert self.full_for(size)
                return
            assert offset not in self.dealt
            assert self.slots.size_at(offset) == size
            self.dealt[offset] = nbytes

    @precondition(lambda self: self.dealt)
    @rule(data=st.data(), count=st.integers(1, 8))
    def free(self, data: Any, count: int) -> None:
        for _ in range(min(count, len(self.dealt))):
            offset = data.draw(st.sampled_from(sorted(self.dealt)))
            del self.dealt[offset]
            self.slots.free(offset)

    @rule()
    def free_all(self) -> None:
        while self.dealt:
            self.slots.free(self.dealt.popitem()[0])
        assert self.slots.slot_bytes.tolist() == [UNASSIGNED] * 5

    @rule()
    def load_into_another(self) -> None:
        """A new allocator that is told of the same slots has the same room."""
        other = SlotAllocator(5 * EXTENT + PAGE, EXTENT)
        offsets = np.array(list(self.dealt), np.int64)
        other.load(self.slots.slot_bytes.copy(), offsets)
        self.slots = other

    def full_for(self, size: int) -> bool:
        used: dict[int, int] = {}
        for offset in self.dealt:
            used[offset // EXTENT] = used.get(offset // EXTENT, 0) + 1
        return len(used) == 5 and all(
            count == EXTENT // self.slots.slot_bytes[extent]
            for extent, count in used.items()
            if self.slots.slot_bytes[extent] == size
        )

    @invariant()
    def slots_lie_inside_extents_and_do_not_overlap(self) -> None:
        end = 0
        for offset in sorted(self.dealt):
            size = self.slots.size_at(offset)
            assert offset >= end
            assert size >= self.dealt[offset]
            assert offset % EXTENT % size == 0
            assert offset % EXTENT + size <= EXTENT
            end = offset + size
        used = {offset // EXTENT for offset in self.dealt}
        assert {i for i, size in enumerate(self.slots.slot_bytes) if size != UNASSIGNED} == used


TestSlots = SlotMachine.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=25)


@pytest.mark.parametrize("pages", [1, 3, 5, 16])
def test_an_area_holds_as_many_slots_as_fit(pages: int) -> None:
    slots = SlotAllocator(3 * EXTENT, EXTENT)
    offsets = []
    while (offset := slots.allocate(pages * PAGE)) is not None:
        offsets.append(offset)
    assert len(offsets) == 3 * (16 // pages)
    assert offsets == sorted(offsets)
    for offset in offsets:
        slots.free(offset)
    assert slots.allocate(pages * PAGE) == 0


def test_a_payload_above_an_extent_is_an_error() -> None:
    with pytest.raises(ValueError, match=f"{EXTENT + 1} bytes do not fit"):
        SlotAllocator(4 * EXTENT, EXTENT).size_for(EXTENT + 1)


def test_a_size_in_use_that_wastes_little_is_taken() -> None:
    slots = SlotAllocator(8 * EXTENT, 8 * EXTENT)
    slots.allocate(9 * PAGE)
    assert slots.size_for(8 * PAGE) == 9 * PAGE
    assert slots.size_for(7 * PAGE) == 7 * PAGE
    assert slots.size_for(9 * PAGE) == 9 * PAGE


def test_an_area_below_an_extent_has_no_room() -> None:
    slots = SlotAllocator(EXTENT - 1, EXTENT)
    assert slots.extents == 0
    assert slots.allocate(1) is None


@given(st.lists(st.integers(0, 15), unique=True, min_size=1, max_size=16), st.sampled_from([1, 2, 3, 5, 16]))
def test_what_load_leaves_free_is_dealt_out_once(taken: list[int], pages: int) -> None:
    per_extent = 16 // pages
    taken = sorted({i % per_extent for i in taken})
    slots = SlotAllocator(EXTENT, EXTENT)
    size = pages * PAGE
    slots.load(np.array([size], np.int64), np.array([i * size for i in taken], np.int64))
    free = []
    while (offset := slots.allocate(size)) is not None:
        free.append(offset // size)
    assert sorted(free + taken) == list(range(per_extent))
