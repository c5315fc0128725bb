"""The fault matrix in its short form: every fault, every engine, every moment at least once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .__main__ import collect
from .cases import CASES, ENGINES, KNOWN, MOMENTS, Cell, all_cells, short_cells
from .page import verdict

if TYPE_CHECKING:
    from .workers import Results

CELLS = short_cells()


@pytest.fixture(scope="module")
def results() -> Results:
    return collect(CELLS, repetitions=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_no_wrong_byte_no_hang_no_leak_no_poisoned_key(cell: Cell, results: Results) -> None:
    state, why = verdict(cell, results[cell.id])
    if state == "not run":
        pytest.skip(why)
    if state == "known":
        pytest.xfail(why)
    assert state == "green", why


def test_the_short_form_leaves_out_no_fault_engine_or_moment() -> None:
    assert {cell.case.fault for cell in CELLS} == {case.fault for case in CASES}
    assert {cell.engine for cell in CELLS} == set(ENGINES)
    assert {cell.moment for cell in CELLS} == set(MOMENTS)


def test_cells_have_names_of_their_own_and_known_faults_have_cells() -> None:
    cells = all_cells()
    assert len({cell.id for cell in cells}) == len(cells)
    assert all(any(known.is_about(cell) for cell in cells) for known in KNOWN)
