"""What is told at the end: tables, and one JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

import kvtier
from kvtier.cli.accept.baseline import FORMAT, VERSION
from kvtier.cli.accept.verdict import FLAG, Gate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from kvtier.cli.accept.state import State
    from kvtier.cli.accept.verdict import Check

ALL = {"G1": "Arrival", "G2": "Single-machine baseline", "G3": "Main gate", "G4": "Stability"}
"""The gates by name, and their titles."""
_WIDE = 110
"""Columns of a terminal from which on there is room for notes."""
_STYLES = {"passed": "green", "failed": "red", "not run": "yellow"}


def report_data(
    name: str, state: State, plan: dict[str, Any], gates: Sequence[Gate], messages: Sequence[str]
) -> dict[str, Any]:
    """The report as plain data, also while gates are still to come; docs/FORMAT.md has its fields."""
    over = {gate.id for gate in gates}
    coming = [Gate(name, title, was_run=False) for name, title in ALL.items() if name not in over]
    return {
        "format": FORMAT,
        "version": VERSION,
        "kvtier": kvtier.__version__,
        "name": name,
        "passed": len(gates) == len(ALL) and all(gate.outcome == "passed" for gate in gates),
        "settings": plan,
        "target": state.get("target") or {},
        "runs": state.runs,
        "gates": [gate.data() for gate in (*gates, *coming)],
        "messages": list(messages),
    }


def show_gate(console: Console, gate: Gate) -> None:
    """A gate's verdict, and every value beside its limit."""
    style = _STYLES[gate.outcome]
    title = Text.assemble((f"{gate.id} {gate.title}: ", "bold"), (gate.outcome, f"bold {style}"))
    if gate.was_run:
        title.append(f"  {duration(gate.seconds)}", "dim")
    console.print(title)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("limit", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    is_wide = console.width >= _WIDE
    if is_wide:
        table.add_column("")
    for check in gate.checks:
        verdict = Text(verdict_text(check), _STYLES["passed" if check.ok else "failed"])
        cells: list[str | Text] = [check.name, value_text(check), limit_text(check), verdict]
        table.add_row(*cells, *([Text(check.note, "dim")] if is_wide else []))
    if gate.checks:
        console.print(table)
    for check in gate.checks:
        if check.note and check.ok is False and not is_wide:
            console.print(Text(f"{check.name}: {check.note}", "dim"), soft_wrap=True)
    if gate.error:
        console.print(Text(f"ended: {gate.error}", "red"), soft_wrap=True)


def value_text(check: Check) -> str:
    """The value with its unit."""
    return "-" if check.value is None else _with_unit(check.value, check.unit)


def limit_text(check: Check) -> str:
    """The limit and which side of it is right; empty of a value that is not judged."""
    if check.limit is None:
        return ""
    text = _with_unit(check.limit, check.unit)
    return text if check.unit == FLAG else f"{'≥' if check.relation == '>=' else '≤'} {text}"


def verdict_text(check: Check) -> str:
    """One word."""
    return {None: "", True: "ok", False: "FAILED"}[check.ok]


def duration(seconds: float) -> str:
    """Time for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def number(value: float) -> str:
    """Three digits, or all those of whole numbers."""
    if value == round(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _with_unit(value: float, unit: str) -> str:
    if unit == FLAG:
        return "yes" if value else "no"
    return f"{number(value)} {unit}".rstrip()
