"""What a benchmark says: progress while it runs, then a table, JSON and a picture."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import platform
import shlex
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import kvtier
from kvtier import _native
from kvtier.cli.bench import fio
from kvtier.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr of `total` steps; what it yields is called with each step's name as it begins."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        begun = False

        def step(name: str) -> None:
            nonlocal begun
            bar.update(task, description=f"{name:<28}", advance=int(begun))
            begun = True

        yield step


def check_outputs(json_file: Path | None, plot: Path | None = None) -> None:
    """Raise InvalidRequest now for what would fail after minutes of measuring."""
    for option, file in (("--json", json_file), ("--plot", plot)):
        if file is not None and not file.absolute().parent.is_dir():
            raise InvalidRequest(f"{option} {file}: there is no directory {file.absolute().parent}")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise InvalidRequest("--plot needs matplotlib: pip install matplotlib, or leave it out for --json")


def machine(where: str) -> dict[str, Any]:
    """What was measured on."""
    names = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(": ", 1)[1] for line in names if line.startswith("model name")), "unknown")
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(pages * page_bytes / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "native": _native.core is not None,
        "fio": fio.version(),
        "device": where,
    }


def write_json(file: Path | None, where: str, figures: Mapping[str, Any]) -> None:
    """Write the figures, if they are wanted, with what makes them worth keeping: command, date, machine."""
    if file is not None:
        command = shlex.join(["kvtier", *sys.argv[1:]])
        report = {
            "kvtier": kvtier.__version__,
            "command": command,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine(where),
            **figures,
        }
        file.write_text(json.dumps(report, indent=2) + "\n")


def show(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
    absent: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
    *,
    wrap: bool = False,
) -> None:
    """Print rows; `columns` maps a figure's name to its heading. Below: how, and what is absent and why.

    In a narrow terminal cells are cut, or with `wrap` go on in the next line.
    """
    console = Console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=not wrap)
    for heading in columns.values():
        table.add_column(heading, justify="right", no_wrap=not wrap)
    for row in rows:
        table.add_row(row["name"], *(_cell(row.get(name)) for name in columns))
    _say(console, title, style="bold")
    console.print(table)
    for row in rows:
        if row.get("detail"):
            _say(console, f"{row['name']}: {row['detail']}", style="dim")
    for note in notes:
        _say(console, note)
    for name, reason in (absent or {}).items():
        _say(console, f"{name} is absent: {reason}", style="dim")


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "[red]no[/]"
    if isinstance(value, float):
        return f"{value:.3f}" if value < 10 else f"{value:.1f}"
    return str(value)
