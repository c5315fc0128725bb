"""Quantities with units: what is added must match, and what is multiplied says what came of it."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass
from typing import TypeAlias

from kvtier.errors import InvalidRequest

Dimensions: TypeAlias = "tuple[tuple[str, int], ...]"
"""Exponents of the base units B, token, request, s, W and currencies; sorted, none 0."""

_BASE: dict[str, tuple[float, Dimensions]] = {
    "1": (1.0, ()),
    "%": (0.01, ()),
    "machine": (1.0, ()),
    "B": (1.0, (("B", 1),)),
    "token": (1.0, (("token", 1),)),
    "ktoken": (1e3, (("token", 1),)),
    "Mtoken": (1e6, (("token", 1),)),
    "request": (1.0, (("request", 1),)),
    "ms": (1e-3, (("s", 1),)),
    "s": (1.0, (("s", 1),)),
    "min": (60.0, (("s", 1),)),
    "h": (3600.0, (("s", 1),)),
    "d": (86400.0, (("s", 1),)),
    "year": (365 * 86400.0, (("s", 1),)),
    "W": (1.0, (("W", 1),)),
    "kW": (1e3, (("W", 1),)),
    "kWh": (3.6e6, (("W", 1), ("s", 1))),
}
_PREFIXES = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15} | {
    f"{letter}i": 1024**power for power, letter in enumerate("KMGTP", start=1)
}
_BASE |= {f"{prefix}B": (float(factor), (("B", 1),)) for prefix, factor in _PREFIXES.items()}
_NUMBER = re.compile(r"\s*([-+]?[0-9][0-9_,]*(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?)\s*(.*?)\s*", re.DOTALL)
_CURRENCY = re.compile(r"[A-Z]{3}")


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit by its text: how many base units it is, and of which."""

    text: str
    factor: float
    dimensions: Dimensions


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value in base units, with its dimensions. Arithmetic that mixes dimensions raises UnitError."""

    value: float
    dimensions: Dimensions = ()

    def __add__(self, other: Quantity) -> Quantity:
        return Quantity(self.value + self._same(other), self.dimensions)

    def __sub__(self, other: Quantity) -> Quantity:
        return Quantity(self.value - self._same(other), self.dimensions)

    def __mul__(self, other: Quantity) -> Quantity:
        return Quantity(self.value * other.value, _combined(self.dimensions, other.dimensions, 1))

    def __truediv__(self, other: Quantity) -> Quantity:
        return Quantity(self.value / other.value, _combined(self.dimensions, other.dimensions, -1))

    def __neg__(self) -> Quantity:
        return Quantity(-self.value, self.dimensions)

    def __lt__(self, other: Quantity) -> bool:
        return self.value < self._same(other)

    def to(self, unit: Unit) -> float:
        """The value in `unit`. Raises UnitError for a unit of other dimensions."""
        if unit.dimensions != self.dimensions:
            raise UnitError(f"{shown(self.dimensions)} is not {unit.text}")
        return self.value / unit.factor

    def _same(self, other: Quantity) -> float:
        if self.dimensions != other.dimensions:
            raise UnitError(f"{shown(self.dimensions)} does not go with {shown(other.dimensions)}")
        return other.value


class UnitError(InvalidRequest):
    """Quantities of different dimensions were mixed."""


def unit(text: str) -> Unit:
    """The unit of a text such as "GB/s" or "USD/kWh": products and quotients from left to right.

    Sizes have decimal or binary prefixes, a year has 365 days, three capital letters are a currency.
    Raises InvalidRequest for a name that is none.
    """
    factor, dimensions = 1.0, ()  # type: tuple[float, Dimensions]
    for operator, name in re.findall(r"(^|[*/])\s*([^*/]*)", text.strip() or "1"):
        of_name = _of_name(name.strip(), text)
        sign = -1 if operator == "/" else 1
        factor *= of_name[0] ** sign
        dimensions = _combined(dimensions, of_name[1], sign)
    return Unit(text.strip() or "1", factor, dimensions)


def quantity(text: str | float, expected: str, short: str = "") -> Quantity:
    """The quantity of a text such as "7.15 GB"; a bare number is in the unit `expected`.

    `short` is a unit that is taken for `expected` too: "7.15 GB" where GB per request are meant. Raises
    InvalidRequest for what is no finite number, or has another unit.
    """
    wanted = unit(expected)
    if isinstance(text, bool) or not isinstance(text, int | float | str):
        raise InvalidRequest(f"{text!r} needs a number in {expected}, or a text such as '2 {expected}'")
    number, name = _split(text) if isinstance(text, str) else (float(text), "")
    if not math.isfinite(number):
        raise InvalidRequest(f"{text!r} needs a finite number in {expected}")
    given = unit(name) if name else wanted
    if short and given.dimensions == unit(short).dimensions:
        return Quantity(number * given.factor, wanted.dimensions)
    if given.dimensions != wanted.dimensions:
        raise InvalidRequest(f"{text!r} needs a unit such as {short or expected}, not {given.text}")
    return Quantity(number * given.factor, given.dimensions)


def measured(text: str) -> tuple[Quantity, Unit]:
    """A quantity of any unit, and the unit that it is written in. Raises InvalidRequest for no number."""
    number, name = _split(text)
    given = unit(name)
    return Quantity(number * given.factor, given.dimensions), given


def shown(dimensions: Dimensions) -> str:
    """Dimensions as a text: "B/s"."""
    over = "*".join(name if power == 1 else f"{name}^{power}" for name, power in dimensions if power > 0)
    under = "".join("/" + name * (power == -1) + f"{name}^{-power}" * (power < -1)
                    for name, power in dimensions if power < 0)  # fmt: skip
    return (over or "1") + under


def _split(text: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise InvalidRequest(f"{text!r} needs a number and a unit, such as '7.15 GB'")
    return float(match[1].replace(",", "").replace("_", "")), match[2]


def _of_name(name: str, text: str) -> tuple[float, Dimensions]:
    if name in _BASE:
        return _BASE[name]
    if name.endswith("s") and name[:-1] in _BASE and len(name) > 3:  # tokens, requests, years
        return _BASE[name[:-1]]
    if _CURRENCY.fullmatch(name):
        return 1.0, ((name, 1),)
    near = difflib.get_close_matches(name, _BASE, n=1, cutoff=0.5)
    hint = (
        f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(_BASE) + ", and currencies as 'USD'"
    )
    raise InvalidRequest(f"unknown unit {name!r} in {text!r}; {hint}")


def _combined(left: Dimensions, right: Dimensions, sign: int) -> Dimensions:
    powers = dict(left)
    for name, power in right:
        powers[name] = powers.get(name, 0) + sign * power
    return tuple(sorted((name, power) for name, power in powers.items() if power))
