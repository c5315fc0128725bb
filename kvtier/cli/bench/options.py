"""Options that benchmarks share, and the checks of what is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from cyclopts import Parameter

from kvtier.cli.bench.report import check_outputs
from kvtier.errors import InvalidRequest

EngineName: TypeAlias = Literal["uring", "threads", "aio"]

Paths: TypeAlias = Annotated[
    list[Path] | None,
    Parameter(
        negative="",
        help="Directory on the device to measure; repeat it for several devices. Default: a temporary one.",
    ),
]
Device: TypeAlias = Annotated[
    str | None, Parameter(help="Profile of an emulated device to mount for this run, such as nvmeof-4.")
]
Gib: TypeAlias = Annotated[float, Parameter(help="GiB per pass, fractions too.")]
ChunkMib: TypeAlias = Annotated[float, Parameter(help="MiB per chunk.")]
Engines: TypeAlias = Annotated[
    list[EngineName] | None,
    Parameter(negative="", help="kvtier's engines to measure; repeat it for several. Default: all."),
]
Rounds: TypeAlias = Annotated[int, Parameter(help="Rounds that count.")]
Seed: TypeAlias = Annotated[int, Parameter(help="Draws the order of each round.")]
Json: TypeAlias = Annotated[Path | None, Parameter(help="File to write the figures to.")]
Plot: TypeAlias = Annotated[Path | None, Parameter(help="PNG to draw them in. Needs matplotlib.")]


def check(rounds: int, json: Path | None, plot: Path | None = None) -> None:
    """Raise InvalidRequest now for what would fail after minutes of measuring."""
    if rounds < 1:
        raise InvalidRequest(f"--rounds is {rounds}, needs at least 1")
    check_outputs(json, plot)
