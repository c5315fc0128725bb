"""The picture of `kvtier replay`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_BOUNDS = {"belady": "Belady: knows the future", "infinite": "infinite tier"}
_COLORS = {
    "lru": "#3b82c4", "s3fifo": "#d9822b", "sieve": "#8f63c9", "fifo": "#8a8a8a", "reuse": "#2f9e5f",
}  # fmt: skip
_INK = "#808890"  # of bounds and axes: reads on white and on black, as the page is left transparent


def draw(file: Path, traces: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> None:
    """Hit rate over the size of the tier, a panel for each trace and a line for each policy, as a PNG."""
    figure = Figure(figsize=(7 * len(traces), 5), layout="constrained")
    for axes, trace in zip(figure.subplots(1, len(traces), squeeze=False)[0], traces, strict=True):
        _draw(axes, trace, [row for row in rows if row["trace"] == trace["trace"]])
    figure.savefig(file, format="png", dpi=120, transparent=True)


def _draw(axes: Any, trace: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    axes.set_title(f"{trace['trace']}, {trace['unique_chunks']:,} chunks", color=_INK)
    for name in dict.fromkeys(row["policy"] for row in rows if row["policy"] != "infinite"):
        points = sorted((r["capacity_chunks"], 100 * r["hit_rate"]) for r in rows if r["policy"] == name)
        style = (
            {"color": _INK, "linestyle": "--", "marker": ".", "label": _BOUNDS[name]}
            if name in _BOUNDS
            else {"color": _COLORS[name], "linewidth": 2.2, "marker": "o", "label": name}
        )
        axes.plot(*zip(*points, strict=True), **style)
    axes.axhline(100 * trace["infinite_hit_rate"], color=_INK, linestyle=":", label=_BOUNDS["infinite"])
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("chunks that the tier holds")
    axes.set_ylabel("hit rate, % of references")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(color=_INK, alpha=0.25)
    axes.tick_params(colors=_INK, which="both")
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)
    for spine in axes.spines.values():
        spine.set_color(_INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, labelcolor=_INK)
