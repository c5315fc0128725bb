"""Figures as people are told them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.plan.sheet import Figure


def number(value: float, figures: int = 3) -> str:
    """With at least so many figures, thousands apart."""
    if value == 0:
        return "0"
    if abs(value) >= 1e15 or abs(value) < 1e-4:
        return f"{value:.3g}"
    digits = max(0, figures - 1 - _magnitude(value))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(part: float) -> str:
    """A difference with its sign; of what is many times as much, how many times."""
    return f"{part:+.1%}" if abs(part) < 10 else f"x{number(part + 1)}"


def shown(figure: Figure) -> str:
    """A figure with its unit; bytes in the decimal unit that suits."""
    value, unit = figure.value, figure.unit.text
    first, slash, rest = unit.partition("/")
    if first == "B":
        for prefix in ("", "k", "M", "G", "T", "P"):
            if abs(value) < 1000 or prefix == "P":
                first = f"{prefix}B"
                break
            value /= 1000
    return number(value) + ("" if unit == "1" else f" {first}{slash}{rest}")


def _magnitude(value: float) -> int:
    return int(f"{value:e}".partition("e")[2])
