"""The sheet: scopes, absence, and that every figure can be accounted for."""

from __future__ import annotations

import pytest

from kvtier.errors import InvalidRequest
from kvtier.plan.sheet import Sheet
from kvtier.plan.units import quantity


def sheet(**inputs: str) -> Sheet:
    made = Sheet()
    for name, text in inputs.items():
        value, unit = text.split()
        made.give(name, quantity(float(value), unit), unit, "given")
    return made


def test_names_are_looked_for_from_the_inside_out() -> None:
    made = sheet(size="8 B", time="2 s")
    made.give("disk.time", quantity(4, "s"), "s", "given")
    inner = made.work_out("disk.at_1.rate", "size / time", "B/s")
    outer = made.work_out("rate", "size / time", "B/s")
    assert inner is not None
    assert outer is not None
    assert (inner.value, outer.value) == (2, 4)
    assert inner.inputs == {"size": "size", "time": "disk.time"}


def test_a_figure_tells_its_formula_and_inputs() -> None:
    made = sheet(size="8000 B", time="2 s")
    made.work_out("rate", "size / time", "kB/s")
    assert made.as_json()[-1] == {
        "name": "rate", "value": 4.0, "unit": "kB/s", "formula": "size / time",
        "inputs": {
            "size": {"figure": "size", "value": 8000.0, "unit": "B"},
            "time": {"figure": "time", "value": 2.0, "unit": "s"},
        },
    }  # fmt: skip


def test_what_is_missing_is_named_down_to_the_input() -> None:
    made = sheet(size="8 B")
    made.need("time", "needs [clock]")
    assert made.work_out("rate", "size / time", "B/s") is None
    assert made.work_out("double", "2 * rate", "B/s") is None
    assert made.absent == {"rate": "needs [clock]", "double": "needs [clock]"}
    assert made.get("double") is None


@pytest.mark.parametrize("formula", ["1 - a", "1 / (a - a)"])
def test_what_cannot_be_is_absent_with_its_reason(formula: str) -> None:
    made = sheet(a="2 1")
    assert made.work_out("b", formula, "1", impossible="too much") is None
    assert made.absent["b"] == "too much"


def test_a_figure_of_another_unit_is_refused() -> None:
    made = sheet(size="8 B", time="2 s")
    with pytest.raises(InvalidRequest, match=r"rate \(size \* time\): B\*s is not B/s"):
        made.work_out("rate", "size * time", "B/s")
    with pytest.raises(InvalidRequest, match="there twice"):
        made.give("size", quantity(1, "B"), "B", "again")


def test_what_overflows_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="too large"):
        sheet(a="1e200 1").work_out("b", "a * a", "1")
