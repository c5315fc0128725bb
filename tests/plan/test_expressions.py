"""Formulas: what they may have, and that they are evaluated as Python would."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import InvalidRequest
from kvtier.plan.expressions import evaluate, names
from kvtier.plan.units import Quantity, UnitError, quantity

VALUES = {"a": 2.0, "b": 0.5, "c.d": 7.0}
formulas = st.recursive(
    st.sampled_from(["a", "b", "c.d", "3", "0.25"]),
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from("+-*/"), inner),
        st.builds("max({}, {})".format, inner, inner),
        st.builds("min({}, {})".format, inner, inner),
        st.builds("-({})".format, inner),
    ),
    max_leaves=8,
)


@given(formulas)
def test_a_formula_is_what_python_makes_of_it(formula: str) -> None:
    class Scope:
        d = VALUES["c.d"]

    def value(name: str) -> Quantity:
        return Quantity(VALUES[name])

    try:
        expected = eval(formula, {"a": 2.0, "b": 0.5, "c": Scope, "max": max, "min": min})
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            evaluate(formula, value)
        return
    assert math.isclose(evaluate(formula, value).value, expected)


def test_names_are_found_whole_and_once() -> None:
    assert names("a.b * (c - a.b) / max(d, 2)") == ("a.b", "c", "d")


@pytest.mark.parametrize(
    "formula",
    [
        "a ** 2", "a[0]", "a if b else c", "open(a)", "max()", "max(a, key=b)", "'a'", "a.b()", "True",
        "lambda: 1", "1 < 2", "(a).__class__.b()", "[a]", "a +", "", "3.5j", "x := 2", "a(1).b", "1" * 2000,
        "-" * 900 + "a",
    ],
)  # fmt: skip
def test_anything_else_is_refused(formula: str) -> None:
    with pytest.raises(InvalidRequest, match="formula"):
        names(formula)


def test_dimensions_are_checked() -> None:
    given_ = {"t": quantity("1 s", "s"), "n": quantity(1, "B")}
    with pytest.raises(UnitError, match="B does not go with s"):
        evaluate("n + t", given_.__getitem__)
    assert evaluate("n / t", given_.__getitem__) == quantity("1 B/s", "B/s")


@pytest.mark.parametrize(("value", "up"), [(1.2, 2), (2.0, 2), (2.0 + 1e-12, 2), (24.39, 25)])
def test_ceil_rounds_up_but_not_what_floating_point_left(value: float, up: int) -> None:
    assert evaluate("ceil(a)", lambda _name: Quantity(value)).value == up
