"""Quantities: what units mean, what is refused, and that dimensions are kept."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import InvalidRequest
from kvtier.plan.units import Quantity, UnitError, measured, quantity, shown, unit

UNITS = ("B", "GiB", "token", "request", "s", "h", "kW", "kWh", "USD", "GB/s", "USD/kWh", "B/request", "1")
quantities = st.builds(
    lambda value, text: Quantity(value, unit(text).dimensions),
    st.floats(1e-6, 1e6), st.sampled_from(UNITS),
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected", "base"),
    [
        ("7.15 GB", "B", 7.15e9),
        ("64GiB", "B", 64 * 2**30),
        ("6 GB/s", "B/s", 6e9),
        ("371,200 CNY", "CNY", 371_200),
        ("3 years", "year", 3 * 365 * 86400),
        ("1.5 kW", "W", 1500),
        ("0.002 USD/ktoken", "USD/token", 2e-6),
        ("100,000 request/d", "request/d", 100_000 / 86400),
        ("29 %", "1", 0.29),
        ("2e3 token/s", "token/s", 2000),
        (12, "USD/h", 12 / 3600),
        ("12", "token", 12),
    ],
)
def test_units_are_what_they_say(text: str | float, expected: str, base: float) -> None:
    assert math.isclose(quantity(text, expected).value, base)


def test_a_kilowatt_hour_is_a_kilowatt_for_an_hour() -> None:
    assert (quantity("1 kW", "W") * quantity("1 h", "s")).to(unit("kWh")) == 1


def test_a_shorter_unit_is_understood() -> None:
    assert quantity("7 GB", "B/request", "B") == quantity("7 GB/request", "B/request", "B")


@pytest.mark.parametrize(
    ("text", "expected", "says"),
    [
        ("7 GBs/s", "B/s", "unknown unit 'GBs'"),
        ("7 Gb", "B", "did you mean"),
        ("7 GB", "B/s", "needs a unit such as B/s"),
        ("lots", "B", "needs a number and a unit"),
        ("inf s", "s", "needs a number and a unit"),
        ("1e999 s", "s", "finite"),
        (math.nan, "s", "finite"),
        (True, "s", "needs a number"),
        ([1], "s", "needs a number"),
    ],
)
def test_what_is_no_quantity_is_refused(text: str, expected: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        quantity(text, expected)


@given(quantities, quantities)
def test_what_is_multiplied_divides_back(a: Quantity, b: Quantity) -> None:
    back = a * b / b
    assert back.dimensions == a.dimensions
    assert math.isclose(back.value, a.value)


@given(quantities, quantities)
def test_only_like_is_added(a: Quantity, b: Quantity) -> None:
    if a.dimensions == b.dimensions:
        assert math.isclose((a + b - b).value, a.value, rel_tol=1e-3)
    else:
        for mix in (lambda: a + b, lambda: a - b, lambda: a < b):
            with pytest.raises(UnitError):
                mix()


@given(quantities)
def test_dimensions_are_shown_as_a_unit_that_has_them(a: Quantity) -> None:
    assert unit(shown(a.dimensions)).dimensions == a.dimensions


def test_a_quantity_keeps_the_unit_it_was_written_in() -> None:
    found, written = measured("255,000 token/h")
    assert written.text == "token/h"
    assert math.isclose(found.to(written), 255_000)
    with pytest.raises(UnitError, match="token/s is not USD/h"):
        found.to(unit("USD/h"))
