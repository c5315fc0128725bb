"""The sheet that a plan is worked out on: inputs, and figures with the formula and inputs of each."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtier.errors import InvalidRequest
from kvtier.plan import expressions
from kvtier.plan.units import Quantity, unit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.plan.units import Unit


@dataclass(frozen=True, slots=True)
class Figure:
    """A quantity that can be accounted for."""

    name: str
    """Dotted, the scope in front: `array.at_16.ttft`."""
    quantity: Quantity
    unit: Unit
    formula: str = ""
    """What was evaluated; empty for an input."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """The full name of each name in the formula."""
    source: str = ""
    """Where an input comes from."""

    @property
    def value(self) -> float:
        """In its unit."""
        return self.quantity.to(self.unit)


class Sheet:
    """Figures by name, each worked out when it is added and never changed.

    A name in a formula is looked for in the scope of its figure and then in those around it: in
    `array.at_16` the name `bandwidth` is `array.at_16.bandwidth`, else `array.bandwidth`, else `bandwidth`.
    """

    def __init__(self) -> None:
        self.figures: dict[str, Figure] = {}
        self.absent: dict[str, str] = {}
        """Why what was to be worked out is not there."""
        self._needs: dict[str, str] = {}

    def give(self, name: str, quantity: Quantity, unit_text: str, source: str) -> None:
        """Add an input. Raises InvalidRequest for a name that is there, or a unit not its own."""
        self._add(Figure(name, quantity, unit(unit_text), source=source))

    def need(self, name: str, reason: str) -> None:
        """Say what to give if `name`, an input, is not there."""
        self._needs[name] = reason

    def work_out(self, name: str, formula: str, unit_text: str, *, impossible: str = "") -> Figure | None:
        """Add the figure of `formula`, evaluated in the scope of `name`; None where it cannot be had.

        It cannot where an input is not there, or, if `impossible` says why that may be, where it comes out
        below 0 or without bound. Raises InvalidRequest for a formula that is wrong.
        """
        inputs: dict[str, str] = {}
        for used in expressions.names(formula):
            full = self.resolve(used, name.rpartition(".")[0])
            if full is None:
                self.absent[name] = self.why_absent(used, name.rpartition(".")[0])
                return None
            inputs[used] = full
        try:
            quantity = expressions.evaluate(formula, lambda used: self.figures[inputs[used]].quantity)
        except ZeroDivisionError:
            self.absent[name] = impossible or f"{formula} divides by 0"
            return None
        if impossible and (quantity.value < 0 or math.isinf(quantity.value)):
            self.absent[name] = impossible
            return None
        if not math.isfinite(quantity.value):
            raise InvalidRequest(f"{name} = {formula} is too large: look at the inputs")
        return self._add(Figure(name, quantity, unit(unit_text), formula, inputs))

    def resolve(self, name: str, scope: str) -> str | None:
        """The full name that `name` has in `scope`; None if it is nowhere."""
        return next((full for full in _candidates(name, scope) if full in self.figures), None)

    def get(self, name: str) -> float | None:
        """A figure's value in its unit; None if it is not there."""
        figure = self.figures.get(name)
        return None if figure is None else figure.value

    def as_json(self) -> list[dict[str, Any]]:
        """All figures in the order they were worked out, each with its formula and the values in it."""
        return [self.record(figure) for figure in self.figures.values()]

    def record(self, figure: Figure) -> dict[str, Any]:
        """One figure as JSON has it."""
        record: dict[str, Any] = {"name": figure.name, "value": figure.value, "unit": figure.unit.text}
        if not figure.formula:
            return record | {"source": figure.source}
        inputs = {
            used: {"figure": full, "value": self.figures[full].value, "unit": self.figures[full].unit.text}
            for used, full in figure.inputs.items()
        }
        return record | {"formula": figure.formula, "inputs": inputs}

    def _add(self, figure: Figure) -> Figure:
        if figure.name in self.figures:
            raise InvalidRequest(f"{figure.name} is there twice: give each its own name")
        try:
            _ = figure.value
        except InvalidRequest as error:
            raise InvalidRequest(f"{figure.name} ({figure.formula or figure.source}): {error}") from error
        self.figures[figure.name] = figure
        return figure

    def why_absent(self, name: str, scope: str) -> str:
        """What to give for `name`, down to the input that is missing."""
        reasons = self._needs | self.absent
        return next((reasons[full] for full in _candidates(name, scope) if full in reasons), f"needs {name}")


def _candidates(name: str, scope: str) -> list[str]:
    parts = scope.split(".") if scope else []
    return [".".join([*parts[:count], name]) for count in range(len(parts), -1, -1)]
