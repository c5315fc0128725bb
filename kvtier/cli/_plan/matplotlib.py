"""The picture of a plan: TTFT and rate over sessions at once, with tiers and without."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from kvtier.plan.accounting import BASELINE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvtier.plan.inputs import Inputs
    from kvtier.plan.sheet import Sheet

# Of middling lightness, as the ground is transparent: they stand out from white and from black.
_INK = "#808890"
_COLORS = ("#3d8bfd", "#e8742c", "#1fa67a", "#b65fd0", "#c9a227", "#d6498b")
_STYLE = {
    "axes.edgecolor": _INK, "axes.labelcolor": _INK, "text.color": _INK, "xtick.color": _INK,
    "ytick.color": _INK, "axes.facecolor": "none", "figure.facecolor": "none", "savefig.facecolor": "none",
    "axes.spines.right": False, "axes.spines.top": False, "axes.titlecolor": _INK, "font.size": 11,
    "grid.color": _INK, "grid.alpha": 0.25, "legend.frameon": False,
}  # fmt: skip


_RING: dict[str, Any] = {
    "marker": "o", "markersize": 9, "markerfacecolor": "none", "markeredgewidth": 1.8, "linestyle": "none",
}  # fmt: skip


def draw(file: Path, inputs: Inputs, sheet: Sheet) -> None:
    """Draw the plan as a PNG, with where devices saturate, and what was published."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(13, 5.4), layout="constrained")
        figure.suptitle(inputs.title or "kvtier plan")
        ttft, rate = figure.subplots(1, 2)
        unit = "throughput" if sheet.get(f"{BASELINE}.alone.throughput") is not None else "request_rate"
        counts = sorted({1, *inputs.concurrency})
        lines = [(BASELINE, BASELINE, _INK), *(
            (setup.name, setup.label, _COLORS[i % len(_COLORS)]) for i, setup in enumerate(inputs.setups)
        )]  # fmt: skip
        for name, label, color in lines:
            _curve(ttft, sheet, name, "ttft", counts, color, label)
            _curve(rate, sheet, name, unit, counts, color, label)
            _limit(rate, sheet, name, unit, counts, color)
            for axes in (ttft, rate):
                _saturation(axes, sheet, name, color)
        _published(ttft, inputs, {name: color for name, _, color in lines})
        labels = {"throughput": "output tokens per second", "request_rate": "requests per second"}
        for axes, label in ((ttft, "TTFT, s"), (rate, labels[unit])):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xlabel("sessions at once")
            axes.set_ylabel(label)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.5)))
            axes.set_xticks(counts, minor=False)
            axes.grid(True)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize="small", labelcolor=_INK)
        figure.savefig(file, format="png", dpi=120)


def _curve(
    axes: Any, sheet: Sheet, name: str, figure: str, counts: Sequence[int], color: str, label: str
) -> None:
    points = [(count, value) for count in counts if (value := _at(sheet, name, figure, count)) is not None]
    if points:
        style = {"linestyle": "--"} if name == BASELINE else {"linewidth": 2.5}
        axes.plot(*zip(*points, strict=True), color=color, label=label, marker=".", **style)


def _at(sheet: Sheet, name: str, figure: str, count: int) -> float | None:
    value = sheet.get(f"{name}.at_{count}.{figure}")
    return sheet.get(f"{name}.alone.{figure}") if value is None and count == 1 else value


def _limit(axes: Any, sheet: Sheet, name: str, figure: str, counts: Sequence[int], color: str) -> None:
    """What the busiest device allows, however many sessions there are."""
    most = sheet.get(f"{name}.most_{'throughput' if figure == 'throughput' else 'requests'}")
    if most is not None:
        axes.axhline(most, color=color, linestyle=":", linewidth=1.2)
        axes.annotate("at most", (counts[-1], most), color=color, fontsize="small", ha="right", va="bottom")


def _saturation(axes: Any, sheet: Sheet, name: str, color: str) -> None:
    """From how many sessions on the setup's first device to be so is never idle."""
    points = [
        (figure.value, full.split(".")[1])
        for full, figure in sheet.figures.items()
        if full.startswith(f"{name}.") and full.endswith(".saturation")
    ]
    if points:
        sessions, device = min(points)
        axes.axvline(sessions, color=color, linestyle="-.", linewidth=1, label=f"{device} saturated")


def _published(axes: Any, inputs: Inputs, colors: dict[str, str]) -> None:
    """Printed TTFTs, where a check is of a plain one."""
    label: str | None = "published"
    for check in inputs.checks:
        match = re.fullmatch(r"(\w+)\.at_(\d+)\.ttft", check.meaning.formula)
        if match is not None and match[1] in colors:
            axes.plot(int(match[2]), check.printed.value, color=colors[match[1]], label=label, **_RING)
            label = None
