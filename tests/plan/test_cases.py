"""The published case: its times from bandwidth alone, and which of its figures follow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import InvalidRequest
from kvtier.plan import accounting, cases, checks, inputs

if TYPE_CHECKING:
    from kvtier.plan.sheet import Sheet

PRINTED = {  # bandwidth in GB/s and TTFT in seconds, as published
    "local": {8: (5.99, 10.17), 16: (6.17, 17.31), 32: (6.42, 35.73)},
    "array": {8: (7.49, 7.53), 16: (8.12, 11.85), 32: (9.29, 26.35)},
}
MARKS = {
    "KV of a session": "near",
    "throughput of the array over the local disk, at least": "follows",
    "TTFT of the array under the local disk's, at least": "follows",
    "more tokens an hour": "follows",
    "what they earn an hour": "does not follow",
    "hardware an hour": "does not follow",
    "energy a request, recomputed": "does not follow",
    "energy a year, recomputed": "does not follow",
    "energy a year, with the array": "does not follow",
    "cards for 100 tokens a second, recomputing": "near",
    "cards for 100 tokens a second, with the array": "follows",
    "price per TB": "does not follow",
}


@pytest.fixture(scope="module")
def case() -> tuple[Sheet, dict[str, list[checks.Result]]]:
    read = inputs.build(cases.read("fx100"), Path())
    sheet = accounting.work_out(read)
    return sheet, {check.name: found for check, found in accounting.results(read, sheet)}


@pytest.mark.parametrize("setup", PRINTED)
@pytest.mark.parametrize("sessions", [8, 16, 32])
def test_ttft_is_within_a_fifth_by_bandwidth_alone(case: Any, setup: str, sessions: int) -> None:
    sheet, _ = case
    gb_s, seconds = PRINTED[setup][sessions]
    ttft = sheet.get(f"{setup}.at_{sessions}.ttft")
    assert ttft == pytest.approx(sessions * 7.15 / gb_s)
    assert abs(ttft / seconds - 1) <= 0.20
    assert sheet.get(f"given.{setup}_ttft_{sessions}") == seconds


@pytest.mark.parametrize("setup", PRINTED)
@pytest.mark.parametrize("sessions", [8, 16, 32])
def test_one_after_another_does_not_fit(case: Any, setup: str, sessions: int) -> None:
    names = {"local": "local disk", "array": "array"}
    right, in_turn = case[1][f"TTFT p50, {names[setup]}, {sessions} at once"]
    assert right.figure.value == case[0].get(f"{setup}.at_{sessions}.ttft")
    assert right.mark in ("follows", "near")
    assert in_turn.mark == "does not follow"


def test_every_printed_figure_is_marked(case: Any) -> None:
    marks = {name: found[0].mark for name, found in case[1].items()}
    assert marks == MARKS | {name: mark for name, mark in marks.items() if name.startswith("TTFT p50")}


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("more tokens an hour", (74.9 - 4.1) * 3600),
        ("what they earn an hour", (74.9 - 4.1) * 3600 * 0.002 / 1000),
        ("hardware an hour", 371_200 / (3 * 8760) / 7.1),
        ("energy a request, recomputed", 1.5 * 149.5 / 3600 / 16),
        ("energy a year, recomputed", 1.5 * 149.5 / 3600 / 16 * 100_000 * 365 * 0.1),
        ("energy a year, with the array", 1.5 * 11.85 / 3600 / 16 * 100_000 * 365 * 0.1),
        ("cards for 100 tokens a second, recomputing", 25),
        ("price per TB", 371_200 / 14),
    ],
)
def test_the_right_value_stands_beside_it(case: Any, name: str, right: float) -> None:
    assert case[1][name][0].figure.value == pytest.approx(right)


@pytest.mark.parametrize(
    ("name", "reading", "mark"),
    [
        ("hardware an hour", "in CNY", "near"),
        ("energy a request, recomputed", "of the machine, for all 16 sessions", "follows"),
        ("energy a year, recomputed", "of 0.062 kWh a request", "does not follow"),
        ("energy a year, recomputed", "of that, and 10,000 requests a day", "follows"),
        ("energy a year, with the array", "of that, and 10,000 requests a day", "follows"),
        ("KV of a session", "in GiB", "follows"),
    ],
)
def test_other_readings_say_where_a_number_may_be_from(case: Any, name: str, reading: str, mark: str) -> None:
    assert {one.reading.name: one.mark for one in case[1][name]}[reading] == mark


@pytest.mark.parametrize("rate", [1.2, 5, 7.1, 10])
def test_the_hardware_does_not_follow_at_any_likely_exchange_rate(rate: float) -> None:
    tables = cases.read("fx100")
    inputs.override(tables, {"money.exchange.CNY": rate}, Path())
    read = inputs.build(tables, Path())
    found = {check.name: one for check, one in accounting.results(read, accounting.work_out(read))}
    assert found["hardware an hour"][0].mark == "does not follow"


@given(st.floats(-2, 2))
def test_marks_are_by_the_stated_rule(difference: float) -> None:
    off = abs(difference)
    expected = "follows" if off <= 0.02 else "near" if off <= 0.20 else "does not follow"
    assert checks.mark(difference) == expected
    assert checks.mark(difference, at_least=True) == ("follows" if difference > 0 else expected)


def test_an_unknown_case_is_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidRequest, match="did you mean 'fx100'"):
        cases.read("fx10")
    with pytest.raises(InvalidRequest, match="known: fx100"):
        cases.read("../pyproject")


@pytest.mark.parametrize(
    ("formula", "says"), [("s.at_8.ttft", "cannot be made: needs"), ("1 / (1 - 1)", "divides by 0")]
)
def test_a_check_of_what_is_not_there_is_refused(formula: str, says: str) -> None:
    tables = {"version": 1, "check": [{"name": "a", "printed": "1 s", "formula": formula}]}
    read = inputs.build(tables, Path())
    with pytest.raises(InvalidRequest, match=says):
        accounting.results(read, accounting.work_out(read))
