"""`kvtier inspect PATH`: what a store's files hold, without opening it."""

from __future__ import annotations

import datetime
import json
import sys
import time
from pathlib import Path  # noqa: TC003  the command line reads the types
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from kvtier.cli import owners
from kvtier.cli.ages import age
from kvtier.cli.sizes import size
from kvtier.cli.usage import report, report_files
from kvtier.tiers.files import inspection as files
from kvtier.tiers.slab import inspection


def inspect(path: Path, *, json_output: Annotated[bool, Parameter(name="--json")] = False) -> None:
    """Show what the store in PATH holds: room, fragmentation, ages, journal.

    Reads its journal or names only; the store may be in use.

    Parameters
    ----------
    path
        The store's directory.
    json_output
        Print JSON instead of tables.
    """
    made = report_files(files.inspect(path)) if files.is_of_files(path) else report(inspection.inspect(path))
    if json_output:
        json.dump(made, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    console = Console()
    for name, section in made.items():
        if name == "owners":
            console.print(owners.table(section))
        elif name != "faults" and section:
            console.print(_table(f"kvtier store in {path}" if name == "store" else name, section))
    for fault in made["faults"]:
        console.print(f"[red]bad:[/] {fault}")


def _table(title: str, section: dict[str, Any] | list[dict[str, Any]]) -> Table:
    """A row for each name of a dict, or for each dict of a list."""
    if isinstance(section, dict):
        table = Table(title=title, show_header=False)
        for name, value in section.items():
            table.add_row(_words(name), _shown(name, value))
        return table
    table = Table(*map(_words, section[0]), title=title)
    for row in section:
        table.add_row(*(_shown(name, value) for name, value in row.items()))
    return table


def _words(name: str) -> str:
    return name.removesuffix("_bytes").removesuffix("_at").replace("_", " ")


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if "bytes" in name:
        return size(value)
    if name.endswith("_share"):
        return f"{value:.1%}"
    if name.endswith("_at"):
        when = datetime.datetime.fromtimestamp(value, datetime.UTC)
        return f"{when:%Y-%m-%d %H:%M:%S} UTC, {age(time.time() - value)} ago"
    return str(value)
