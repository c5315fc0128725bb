"""A plan as tables, as JSON, and figure by figure."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console

import kvtier
from kvtier.cli._plan.text import number, percent, shown
from kvtier.cli.bench.report import show as show_table
from kvtier.plan import checks, schema
from kvtier.plan.accounting import BASELINE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from kvtier.plan.inputs import Inputs
    from kvtier.plan.setups import Setup
    from kvtier.plan.sheet import Sheet

_TIMES = {
    "concurrency": "at once", "ttft": "TTFT s", "times_sooner": "x sooner", "request_rate": "req/s",
    "throughput": "out tok/s", "energy_per_request": "Wh/req",
}  # fmt: skip
_COSTS = {
    "concurrency": "at once", "cost_of_tokens": "{currency}/Mtok", "energy_cost": "energy {currency}/year",
    "machines": "machines", "payback_by_earning": "paid by tokens, years",
    "payback_by_saving": "paid by machines, years",
}  # fmt: skip
_OF_CROWDS = tuple(name for name in (*_TIMES, *_COSTS) if name != "concurrency")
_DEVICES = {
    "bandwidth": "GB/s", "break_even_bandwidth": "even GB/s", "hit_rate": "hits",
    "break_even_hit_rate": "even hits", "break_even_hit_rate_of_cost": "even cost", "rate": "most req/s",
    "saturation": "busy at", "sessions_held": "holds", "cost_per_hour": "{currency}/h",
}  # fmt: skip
_OF_DEVICES = (
    "At {} at once. Even: the bandwidth, and the hit rate in time and in cost, that is as good as "
    "recomputing. Busy at: with so many sessions the device is never idle. Holds: sessions."
)
_CHECKS = {
    "printed": "printed", "follows": "inputs give", "unit": "", "difference": "differs by", "mark": "",
}  # fmt: skip


def show(
    inputs: Inputs, sheet: Sheet, results: Sequence[tuple[checks.Check, Sequence[checks.Result]]]
) -> None:
    """Print the plan: of crowds, of devices, of printed figures, and what could not be worked out."""
    notes = [f"{name}: {shown(sheet.figures[figure])}" for name, figure in (
        ("KV of a token", "bytes_per_token"), ("KV of a session", "session_bytes"),
        ("prefill", "prefill_speed"),
    ) if figure in sheet.figures]  # fmt: skip
    rows = crowds(inputs, sheet)
    title = inputs.title or "kvtier plan"
    _show_rows(title, rows, _TIMES, inputs, notes)
    if any(row[name] is not None for row in rows for name in _COSTS if name != "concurrency"):
        _show_rows("costs", rows, _COSTS, inputs, [])
    if devices := _devices(inputs, sheet):
        _show_rows("devices", devices, _DEVICES, inputs, [_OF_DEVICES.format(max(inputs.concurrency))])
    if results:
        _show_checks(results, inputs, sheet)
    if inputs.notes.strip():
        _say(inputs.notes.strip())
    for reason, names in _absent(sheet).items():
        _say(f"left out, {reason}: {names}", style="dim")


def _show_rows(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
    inputs: Inputs,
    notes: Sequence[str],
) -> None:
    """Print rows, with those of the columns that have figures."""
    headings = {
        name: heading.format(currency=inputs.currency)
        for name, heading in columns.items()
        if any(row.get(name) is not None for row in rows)
    }
    show_table(title, [_formatted(row) for row in rows], headings, notes=notes, wrap=True)


def crowds(inputs: Inputs, sheet: Sheet) -> list[dict[str, Any]]:
    """A row for recomputing and each setup at each concurrency; None where a figure is not there."""
    rows = []
    for concurrency in inputs.concurrency:
        for name, label in ((BASELINE, BASELINE), *((setup.name, setup.label) for setup in inputs.setups)):
            scope = f"{name}.at_{concurrency}"
            row: dict[str, Any] = {"name": label, "setup": name, "concurrency": concurrency}
            rows.append(row | {figure: sheet.get(f"{scope}.{figure}") for figure in _OF_CROWDS})
    return rows


def _devices(inputs: Inputs, sheet: Sheet) -> list[dict[str, Any]]:
    """A row for each tier and each setup's prefill."""
    rows = []
    for setup in inputs.setups:
        at = f"{setup.name}.at_{max(inputs.concurrency)}"
        for device, label in (*((tier.name, tier.label) for tier in setup.tiers), ("prefill", "prefill")):
            row = {figure: _of_device(sheet, setup, at, device, figure) for figure in _DEVICES}
            if any(value is not None for value in row.values()):
                rows.append({"name": f"{setup.label}: {label}", **row})
    row = {figure: sheet.get(f"{BASELINE}.prefill.{figure}") for figure in _DEVICES}
    return [*rows, {"name": f"{BASELINE}: prefill", **row}] if rows and row["rate"] is not None else rows


def _of_device(sheet: Sheet, setup: Setup, at: str, device: str, figure: str) -> float | None:
    """Of the crowd at this device, else of the device; what is of the whole setup, at its first tier."""
    for name in (f"{at}.{device}.{figure}", f"{setup.name}.{device}.{figure}"):
        if name in sheet.figures:
            return sheet.get(name)
    whole = figure.startswith("break_even_hit_rate") and device == setup.tiers[0].name
    return sheet.get(f"{at}.{figure}") if whole else None


def _show_checks(
    results: Sequence[tuple[checks.Check, Sequence[checks.Result]]], inputs: Inputs, sheet: Sheet
) -> None:
    rows: list[dict[str, Any]] = []
    notes = []
    for check, (right, *readings) in results:
        rows.append({"name": check.name, "printed": check.text, **_check_row(right)})
        rows += [{"name": f"    {reading.reading.name}", **_check_row(reading)} for reading in readings]
        if check.note:
            notes.append(f"{check.name}: {check.note}")
    derived = [f"{name} {shown(sheet.figures[f'derived.{name}'])}" for name in inputs.derived]
    notes += [f"Worked out besides: {', '.join(derived)}"] if derived else []
    how = "Indented: other ways to take the figure above, and whether the number is theirs."
    show_table("printed figures", rows, _CHECKS, notes=[f"{checks.RULE}. {how}", *notes], wrap=True)


def _check_row(result: checks.Result) -> dict[str, Any]:
    figure = result.figure
    return {
        "follows": number(figure.value, 4),
        "unit": figure.unit.text,
        "difference": percent(result.difference),
        "mark": result.mark,
    }


def explain(sheet: Sheet) -> None:
    """Print every figure with its formula, and its inputs with their values."""
    for figure in sheet.figures.values():
        if not figure.formula:
            _say(f"{figure.name} = {shown(figure)}    [{figure.source}]")
            continue
        _say(f"{figure.name} = {shown(figure)} = {figure.formula}")
        for used, full in figure.inputs.items():
            _say(
                f"    {used} = {shown(sheet.figures[full])}" + (f"  ({full})" if full != used else ""),
                style="dim",
            )


def write_json(
    file: Path | None,
    inputs: Inputs,
    sheet: Sheet,
    results: Sequence[tuple[checks.Check, Sequence[checks.Result]]],
) -> None:
    """Write the rows, every figure with its formula and inputs, the checks, and what is absent and why."""
    if file is None:
        return
    report = {
        "version": schema.VERSION,
        "kvtier": kvtier.__version__,
        "command": shlex.join(["kvtier", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "title": inputs.title,
        "notes": inputs.notes.strip(),
        "rows": crowds(inputs, sheet),
        "figures": sheet.as_json(),
        "absent": sheet.absent,
        "rule": checks.RULE,
        "checks": [_check_json(check, found, sheet) for check, found in results],
    }
    file.write_text(json.dumps(report, indent=2) + "\n")


def _check_json(check: checks.Check, results: Sequence[checks.Result], sheet: Sheet) -> dict[str, Any]:
    right, *readings = ({
        "name": result.reading.name, "mark": result.mark, "difference": result.difference,
        "figure": sheet.record(result.figure),
    } for result in results)  # fmt: skip
    return {
        "name": check.name,
        "printed": check.printed.to(check.unit),
        "unit": check.unit.text,
        "at_least": check.at_least,
        "mark": right["mark"],
        "difference": right["difference"],
        "right": right["figure"],
        "readings": readings,
        "note": check.note,
    }


def _formatted(row: Mapping[str, Any]) -> dict[str, Any]:
    formatted: dict[str, Any] = {}
    for name, value in row.items():
        if not isinstance(value, float):
            formatted[name] = value
        elif name.startswith(("hit_rate", "break_even_hit_rate")):
            formatted[name] = "never" if value > 1 else f"{value:.1%}"
        else:
            formatted[name] = number(value * 1e3 if name == "energy_per_request" else value)
    return formatted


def _absent(sheet: Sheet) -> dict[str, str]:
    """By reason, the last parts of the names that it holds for."""
    reasons: dict[str, dict[str, None]] = {}
    for name, reason in sheet.absent.items():
        reasons.setdefault(reason, {})[name.rpartition(".")[2].replace("_", " ")] = None
    return {reason: ", ".join(names) for reason, names in reasons.items()}


def _say(text: str, style: str | None = None) -> None:
    Console().print(text, style=style, highlight=False, markup=False, soft_wrap=True)
