"""The picture of `kvtier bench read`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_MIB = 2**20


def draw(file: Path, title: str, figures: Mapping[str, Any]) -> None:
    """Bandwidth and CPU of every row, bandwidth against bytes in flight and chunk size, as a PNG."""
    matplotlib.rcParams["axes.spines.right"] = matplotlib.rcParams["axes.spines.top"] = False
    figure = Figure(figsize=(13, 9), layout="constrained")
    figure.suptitle(title)
    (bandwidth, cpu), (flight, size) = figure.subplots(2, 2)
    _draw_bars(bandwidth, figures["rows"], "gb_s", f"GB/s, chunks of {figures['chunk_mib']:g} MiB")
    _draw_bars(cpu, figures["rows"], "cpu_s_per_gb", "CPU seconds per GB")
    cpu.axvline(figures["checksum_cpu_s_per_gb"], color="tab:red", linestyle="--", label="checksum alone")
    cpu.legend()
    _draw_curves(flight, _by_bytes_in_flight(figures), "MiB in flight")
    _draw_curves(size, _by_chunk_size(figures["chunk_sizes"]), "MiB per chunk")
    figure.savefig(file, format="png", dpi=120)


def _draw_bars(axes: Any, rows: Sequence[Mapping[str, Any]], figure: str, label: str) -> None:
    rows = rows[::-1]  # the first on top
    names = [row["name"] for row in rows]
    colors = ["tab:blue" if name.startswith("kvtier") else "tab:gray" for name in names]
    axes.barh(names, [row[figure] for row in rows], color=colors)
    axes.set_xlabel(label)


def _draw_curves(axes: Any, curves: Mapping[str, Sequence[tuple[float, float]]], label: str) -> None:
    for name, points in curves.items():
        ours = {"linewidth": 2.5} if name.startswith("kvtier") else {"linestyle": ":"}
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name, **ours)
    axes.set_xlabel(label)
    axes.set_ylabel("GB/s")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter("{x:g}")
    if curves:
        axes.legend(fontsize="small")


def _by_bytes_in_flight(figures: Mapping[str, Any]) -> dict[str, list[tuple[float, float]]]:
    curves: dict[str, list[tuple[float, float]]] = {}
    for point in figures["in_flight"]:
        curves.setdefault(point["name"], []).append((point["bytes_in_flight"] / _MIB, point["gb_s"]))
    for point in figures["fio_probe"]:
        name = f"fio {point['engine']}, {point['block'] / _MIB:g} MiB"
        curves.setdefault(name, []).append((point["depth"] * point["block"] / _MIB, point["gb_s"]))
    return curves


def _by_chunk_size(sizes: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    curves: dict[str, list[tuple[float, float]]] = {}
    for size in sizes:
        for row in size["rows"]:
            curves.setdefault(row["name"], []).append((size["chunk_mib"], row["gb_s"]))
    return curves
