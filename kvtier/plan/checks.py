"""Printed figures against what their inputs give: *follows*, *near* or *does not follow*."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from kvtier.errors import InvalidRequest
from kvtier.plan import expressions, schema
from kvtier.plan.units import measured

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.plan.sheet import Figure, Sheet
    from kvtier.plan.units import Quantity, Unit

FOLLOWS, NEAR = 0.02, 0.20
RULE = (
    f"follows: what the inputs give differs from the printed number by at most {FOLLOWS:.0%} of it; near: "
    f"by at most {NEAR:.0%}; else it does not follow. Where 'at least' is printed, more follows too"
)
Mark: TypeAlias = Literal["follows", "near", "does not follow"]


@dataclass(frozen=True, slots=True)
class Reading:
    """A way to come to a figure."""

    name: str
    """How the figure is taken; empty for what its own words mean."""
    formula: str
    unit: str
    """What the printed number would be in; empty: in the unit it was printed in."""


@dataclass(frozen=True, slots=True)
class Check:
    """A printed figure, the formula that its words mean, and other ways that it may have been come to."""

    name: str
    printed: Quantity
    unit: Unit
    text: str
    """The printed number as it was printed."""
    meaning: Reading
    note: str
    at_least: bool
    readings: tuple[Reading, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one reading of a check."""

    reading: Reading
    figure: Figure
    difference: float
    """From the printed number, as a part of it: in the unit of the reading, printed or not."""
    mark: Mark


def read(tables: Any) -> tuple[Check, ...]:
    """The checks of an input file. Raises InvalidRequest for fields that are unknown, missing or wrong."""
    if not isinstance(tables, list):
        raise InvalidRequest("check needs to be a list: [[check]] for each")
    found = []
    for table in tables:
        schema.known(table, "[[check]]", schema.CHECK)
        name = schema.text(table, "name", "[[check]]")
        where = f"the check {name!r}"
        readings = table.get("reading", [])
        at_least = table.get("at_least", False)
        if not name or not isinstance(readings, list) or not isinstance(at_least, bool):
            raise InvalidRequest(f"{where} needs a name, a list of readings, and at_least as true or false")
        printed, unit = measured(schema.text(table, "printed", where))
        if printed.value == 0:
            raise InvalidRequest(f"{where} has printed 0: there is no part of it to differ by")
        text = schema.text(table, "printed", where).removesuffix(unit.text).strip()
        meaning = Reading("", _formula(table, where), "")
        others = tuple(_reading(one, f"a reading of {where}") for one in readings)
        note = schema.text(table, "note", where)
        found.append(Check(name, printed, unit, text, meaning, note, at_least, others))
    return tuple(found)


def derived(table: Any) -> dict[str, tuple[str, str]]:
    """Formula and unit by name: what an input file works out besides."""
    schema.known(table, "[derived]", table if isinstance(table, dict) else ())
    found = {}
    for name, one in table.items():
        where = f"{name} in [derived]"
        schema.known(one, where, ("formula", "unit"))
        formula = schema.text(one, "formula", where)
        expressions.names(formula)
        found[name] = (formula, schema.text(one, "unit", where, "1"))
    return found


def run(check: Check, number: int, sheet: Sheet) -> list[Result]:
    """The result of the check's meaning, then of each other reading; all are figures of the sheet.

    Raises InvalidRequest for a formula that is wrong, or uses what is not there.
    """
    names = ("right", *(f"reading_{i}" for i, _ in enumerate(check.readings, start=1)))
    return [
        _result(check, f"check_{number}.{name}", reading, sheet)
        for name, reading in zip(names, (check.meaning, *check.readings), strict=True)
    ]


def _result(check: Check, figure: str, reading: Reading, sheet: Sheet) -> Result:
    found = sheet.work_out(figure, reading.formula, reading.unit or check.unit.text)
    if found is None:
        raise InvalidRequest(f"the check {check.name!r} cannot be made: {sheet.absent[figure]}")
    difference = found.value / check.printed.to(check.unit) - 1
    return Result(reading, found, difference, mark(difference, at_least=check.at_least))


def mark(difference: float, *, at_least: bool = False) -> Mark:
    """The mark of a value that differs from the printed one by this part of it."""
    off = max(0.0, -difference) if at_least else abs(difference)
    return "follows" if off <= FOLLOWS else "near" if off <= NEAR else "does not follow"


def _reading(table: Any, where: str) -> Reading:
    schema.known(table, where, schema.READING)
    name, unit = schema.text(table, "name", where), schema.text(table, "unit", where)
    return Reading(name, _formula(table, where), unit)


def _formula(table: Mapping[str, Any], where: str) -> str:
    formula = schema.text(table, "formula", where)
    expressions.names(formula)
    return formula
