"""The picture of `kvtier bench read`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def draw(file: Path, title: str, figures: Mapping[str, Any]) -> None:
    """Bandwidth and CPU of every row, and fio's bandwidth against the bytes in flight, as a PNG."""
    matplotlib.rcParams["axes.spines.right"] = matplotlib.rcParams["axes.spines.top"] = False
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    figure.suptitle(title)
    bandwidth, cpu, flight = figure.subplots(1, 3)
    rows = figures["rows"][::-1]
    names = [row["name"] for row in rows]
    colors = ["tab:blue" if name.startswith("kvtier") else "tab:gray" for name in names]
    bandwidth.barh(names, [row["gb_s"] for row in rows], color=colors)
    bandwidth.set_xlabel("GB/s")
    cpu.barh(names, [row["cpu_s_per_gb"] for row in rows], color=colors)
    cpu.axvline(figures["checksum_cpu_s_per_gb"], color="tab:red", linestyle="--", label="checksum alone")
    cpu.set_xlabel("CPU seconds per GB")
    cpu.legend()
    _draw_probe(flight, figures["fio_probe"])
    figure.savefig(file, format="png", dpi=120)


def _draw_probe(axes: Any, probe: list[dict[str, Any]]) -> None:
    curves: dict[str, list[tuple[float, float]]] = {}
    for point in probe:
        label = f"{point['engine']}, {point['block'] / 2**20:g} MiB"
        curves.setdefault(label, []).append((point["depth"] * point["block"] / 2**20, point["gb_s"]))
    for label, points in curves.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axes.set_xlabel("MiB in flight (fio)")
    axes.set_ylabel("GB/s")
    axes.set_xscale("log", base=2)
    if curves:
        axes.legend()
