"""Plans: which operations a batch of chunks becomes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.io.base import CHECKSUM, OP, SHORT, Batch
from kvtier.io.plan import MAX_OP_BYTES, Plan

PAGE = 4096
PARTS = st.sampled_from([64 << 10, 128 << 10, 1 << 20])
CHUNKS = st.lists(st.tuples(st.integers(1, 700), st.booleans()), min_size=1, max_size=8)


def ignore(batch: Batch) -> None:
    """Nobody waits."""


def build(plan: Plan, chunks: list[tuple[int, bool]], part: int) -> list[dict[str, Any]]:
    """Add chunks of so many pages, reads or writes, at made-up places; returns what was added."""
    added = []
    for number, (pages, write) in enumerate(chunks):
        nbytes = pages * PAGE
        parts = -(-nbytes // part)
        sums = None if write else np.arange(parts + 3, dtype=np.uint64) + 1000 * number
        item = {
            "offset": PAGE * (1 + 1000 * number),
            "address": (1 + number) << 32,
            "nbytes": nbytes,
            "seed": 2**64 - 2 - number,
            "sums": sums,
        }
        plan.add(**item)
        added.append(item)
    return added


@given(chunks=CHUNKS, part=PARTS, limit=st.sampled_from([1, 64 << 10, 300 << 10, MAX_OP_BYTES]))
def test_operations_cover_every_byte_once_in_whole_parts(
    chunks: list[tuple[int, bool]], part: int, limit: int
) -> None:
    plan = Plan(fd=5, part_bytes=part, max_op_bytes=limit)
    added = build(plan, chunks, part)
    batch = plan.batch(ignore, "context")
    assert batch.ops.dtype == OP
    assert (len(plan), plan.nbytes) == (len(added), sum(item["nbytes"] for item in added))
    assert batch.context == "context"
    assert batch.results.tolist() == [0] * len(batch.ops)
    ops = iter(batch.ops)
    first_sum = 0
    for item, (_, write) in zip(added, chunks, strict=True):
        done = 0
        while done < item["nbytes"]:
            op = next(ops)
            assert (op["offset"], op["address"]) == (item["offset"] + done, item["address"] + done)
            assert (op["fd"], op["write"], op["part_bytes"]) == (5, write, part)
            assert op["length"] % PAGE == 0
            assert 0 < op["length"] <= max(part, limit)
            assert done % part == 0, "it begins on a part"
            assert op["seed"] == (item["seed"] + done // part) % 2**64
            assert op["sums"] == first_sum + done // part
            done += int(op["length"])
        assert done == item["nbytes"]
        parts = -(-done // part)
        expected = [0] * parts if write else item["sums"][:parts].tolist()
        assert batch.sums[first_sum : first_sum + parts].tolist() == expected
        first_sum += parts
    assert next(ops, None) is None
    assert len(batch.sums) == first_sum


@given(chunks=CHUNKS, part=PARTS, data=st.data())
def test_an_outcome_is_the_first_that_went_wrong(
    chunks: list[tuple[int, bool]], part: int, data: st.DataObject
) -> None:
    plan = Plan(fd=5, part_bytes=part, max_op_bytes=part)
    added = build(plan, chunks, part)
    batch = plan.batch(ignore, None)
    results = data.draw(
        st.lists(
            st.sampled_from([0, 0, 0, 5, SHORT, CHECKSUM]),
            min_size=len(batch.ops),
            max_size=len(batch.ops),
        )
    )
    batch.results[:] = results
    expected = []
    left = list(results)
    for item in added:
        parts = -(-item["nbytes"] // part)
        own, left = left[:parts], left[parts:]
        expected.append(next((result for result in own if result), 0))
    assert plan.outcomes(batch) == expected


@given(chunks=CHUNKS, part=PARTS)
def test_sums_are_handed_back_per_chunk(chunks: list[tuple[int, bool]], part: int) -> None:
    plan = Plan(fd=5, part_bytes=part)
    added = build(plan, chunks, part)
    batch = plan.batch(ignore, None)
    batch.sums[:] = np.arange(len(batch.sums))
    back = plan.sums(batch)
    assert [len(sums) for sums in back] == [-(-item["nbytes"] // part) for item in added]
    assert np.concatenate(back).tolist() == list(range(len(batch.sums)))


@pytest.mark.parametrize("pages", [1, 1024, 1025, 5000])
def test_no_operation_is_larger_than_pays(pages: int) -> None:
    plan = Plan(fd=0, part_bytes=1 << 20)
    build(plan, [(pages, True)], 1 << 20)
    lengths = plan.batch(ignore, None).ops["length"].tolist()
    assert lengths == [MAX_OP_BYTES] * (pages // 1024) + [pages % 1024 * PAGE] * bool(pages % 1024)


def test_the_sums_expected_are_a_copy() -> None:
    table = np.ones((4, 2), np.uint64)
    plan = Plan(fd=0, part_bytes=64 << 10)
    plan.add(offset=0, address=0, nbytes=128 << 10, seed=0, sums=table[1])
    batch = plan.batch(ignore, None)
    table[:] = 7
    assert batch.sums.tolist() == [1, 1]
