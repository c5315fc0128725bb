"""Pictures as SVG inside of HTML: they take their colours from the page, light or dark."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from kvtier.cli.accept.report import number

if TYPE_CHECKING:
    from collections.abc import Sequence

_WIDTH = 440
_LABEL = 12  # pixels of text
_FEW = 40  # points of a line that are few enough to be seen one by one


@dataclass(frozen=True, slots=True)
class Bar:
    """One value, the single ones behind it, and what it has to reach."""

    label: str
    value: float
    dots: Sequence[float] = ()
    limit: float | None = None
    is_other: bool = False
    """Whether it is what is compared with, rather than what is judged."""


@dataclass(frozen=True, slots=True)
class Line:
    """A value over time."""

    label: str
    points: Sequence[tuple[float, float]]
    is_other: bool = False


@dataclass(slots=True)
class _Picture:
    title: str
    height: float
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> None:
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>')

    def svg(self) -> str:
        name = escape(self.title, quote=True)
        box = f'viewBox="0 0 {_WIDTH} {self.height:.0f}"'
        return f'<svg {box} role="img" aria-label="{name}">{"".join(self.parts)}</svg>'


def bars(title: str, unit: str, values: Sequence[Bar]) -> str:
    """Horizontal bars from 0 on, their limits as strokes across, their single values as dots."""
    row, top, left, right = 26, 30, 132, 64
    picture = _Picture(f"{title}, {unit}", top + row * len(values) + 4)
    picture.text(0, _LABEL + 2, f"{title}, {unit}" if unit else title, kind="title")
    most = max((x for bar in values for x in (bar.value, *bar.dots, bar.limit or 0.0)), default=0.0) or 1.0
    room = _WIDTH - left - right

    def place(value: float) -> float:
        return left + room * value / most

    picture.line(left, top - 4, left, top + row * len(values), "axis")
    for i, bar in enumerate(values):
        y = top + row * i
        picture.text(left - 8, y + row / 2 + 2, bar.label, "end")
        kind = "other" if bar.is_other else "own"
        hover = f"{bar.label}: {number(bar.value)} {unit}"
        width = max(1.0, place(bar.value) - left)
        picture.parts.append(
            f'<rect x="{left}" y="{y + 3}" width="{width:.1f}" height="{row - 8}" rx="2" class="{kind}">'
            f"<title>{escape(hover)}</title></rect>"
        )
        for dot in bar.dots:
            middle = y + row / 2 - 1
            picture.parts.append(f'<circle cx="{place(dot):.1f}" cy="{middle:.1f}" r="3" class="dot"/>')
        if bar.limit is not None:
            picture.line(place(bar.limit), y, place(bar.limit), y + row - 2, "limit")
        picture.text(_WIDTH - 2, y + row / 2 + 2, number(bar.value), "end", "value")
    return picture.svg()


def lines(
    title: str, unit: str, series: Sequence[Line], marks: Sequence[float] = (), x_unit: str = "h"
) -> str:
    """Values over time, from 0 on; `marks` are instants at which the process was another."""
    top, bottom, left, right, height = 44, 26, 52, 14, 190
    picture = _Picture(f"{title}, {unit}, over {x_unit}", height)
    picture.text(0, _LABEL + 2, f"{title}, {unit}" if unit else title, kind="title")
    x_most = max((x for line in series for x, _ in line.points), default=0.0) or 1.0
    step = _step(max((y for line in series for _, y in line.points), default=0.0) or 1.0)
    y_most = step * math.ceil(max((y for line in series for _, y in line.points), default=1.0) / step) or step

    def place(x: float, y: float) -> tuple[float, float]:
        across = left + (_WIDTH - left - right) * x / x_most
        return across, height - bottom - (height - top - bottom) * y / y_most

    for i in range(round(y_most / step) + 1):
        _, y = place(0, i * step)
        picture.line(left, y, _WIDTH - right, y, "axis" if i == 0 else "grid")
        picture.text(left - 8, y + 4, number(i * step), "end", "tick")
    for x, anchor in ((0.0, "start"), (x_most, "end")):
        picture.text(place(x, 0)[0], height - 8, f"{number(x)} {x_unit}", anchor, "tick")
    for mark in marks:
        across, _ = place(mark, 0)
        picture.line(across, top, across, height - bottom, "mark")
    legend = 0.0
    for line in series:
        kind = "other" if line.is_other else "own"
        places = [place(x, y) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        picture.parts.append(f'<polyline points="{path}" class="line {kind}"/>')
        if len(places) <= _FEW:
            picture.parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" class="{kind}"/>' for x, y in places]
        if len(series) > 1:
            picture.parts.append(
                f'<rect x="{left + legend:.1f}" y="{top - 20}" width="10" height="10" rx="2" class="{kind}"/>'
            )
            picture.text(left + legend + 15, top - 11, line.label)
            legend += 30 + 7.0 * len(line.label)
    return picture.svg()


def _step(most: float) -> float:
    """Between two lines of the grid: 1, 2 or 5 times a power of ten, three to five of them."""
    power = 10.0 ** math.floor(math.log10(most / 4))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power * 5 >= most)
