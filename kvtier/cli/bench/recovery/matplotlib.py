"""The picture of a cold recovery."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


def draw(file: Path, title: str, series: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> None:
    """TTFT p50 with p99 above it, and output tokens per second, as a PNG.

    `series`: by name and concurrency, rows as `summary.summarize` makes them.
    """
    matplotlib.rcParams["axes.spines.right"] = matplotlib.rcParams["axes.spines.top"] = False
    figure = Figure(figsize=(12, 5), layout="constrained")
    figure.suptitle(title)
    ttft, rate = figure.subplots(1, 2)
    concurrencies = sorted({concurrency for rows in series.values() for concurrency in rows})
    width = 0.8 / max(1, len(series))
    for number, (name, rows) in enumerate(series.items()):
        places = [i + (number - (len(series) - 1) / 2) * width for i in range(len(concurrencies))]
        _bars(ttft, places, width, [rows.get(c, {}) for c in concurrencies], "ttft_p50_s", name)
        _bars(rate, places, width, [rows.get(c, {}) for c in concurrencies], "tokens_per_s", name)
        for place, concurrency in zip(places, concurrencies, strict=True):
            row = rows.get(concurrency, {})
            if row.get("ttft_p99_s"):
                ttft.plot([place, place], [row["ttft_p50_s"], row["ttft_p99_s"]], color="black", linewidth=1)
    for axes, label in ((ttft, "TTFT p50 s (line: to p99)"), (rate, "output tokens per second")):
        axes.set_yscale("log")
        axes.set_ylabel(label)
        axes.set_xlabel("sessions at once")
        axes.set_xticks(range(len(concurrencies)), [str(concurrency) for concurrency in concurrencies])
    ttft.legend(fontsize="small")
    figure.savefig(file, format="png", dpi=120)


def _bars(
    axes: Any,
    places: Sequence[float],
    width: float,
    rows: Sequence[Mapping[str, Any]],
    figure: str,
    name: str,
) -> None:
    axes.bar(places, [row.get(figure) or 0.0 for row in rows], width, label=name)
