"""`kvtier doctor`: what this machine offers, and for what is missing: why, and what to do."""

from __future__ import annotations

import json
import sys
from pathlib import Path  # noqa: TC003  the command line reads the types
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from kvtier.cli.checks import Check, check_all


def doctor(
    path: Path | None = None, *, json_output: Annotated[bool, Parameter(name="--json")] = False
) -> None:
    """Check the native core, io_uring, memory, CUDA and integrations; with PATH its file system, too.

    Parameters
    ----------
    path
        A directory that a store is, or is to be, in.
    json_output
        Print JSON instead of a table.
    """
    checks = check_all(path)
    if json_output:
        json.dump({check.name: check.report() for check in checks}, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    table = Table("", "", "found", "what to do")
    for check in checks:
        table.add_row(_mark(check), check.name, check.found, check.advice)
    Console().print(table)


def _mark(check: Check) -> str:
    return "[green]ok[/]" if check.ok else "[yellow]--[/]"
