"""One page of the benchmarks' JSON files: `python benchmarks/results.py FILE... -o benchmarks/RESULTS.md`.

It takes what `kvtier bench NAME --json FILE` and `python -m benchmarks.peers --json FILE` write: machine,
command, settings and figures as scalars, `rows` with a `name` each, and `absent` with a reason by row.
Whatever of that is missing is said to be, or left out.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure that is to be reached: `quantity` of `row` in every run of `bench` that `where` fits."""

    name: str
    bench: str
    row: str | None
    """None for a figure of the whole run."""
    quantity: str
    bound: float
    at_most: bool = False
    where: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the run; `device`, which may be a part of the name, and `native` are the machine's."""
    against: str | None = None
    """The row that `row` is compared with, which must be proved as well."""
    minus: str | None = None
    """A figure of the whole run to take off first."""


def _over_lmcache(row: str, what: str, bound: float) -> Iterator[Goal]:
    for chunk_mib in (2, 32):
        yield Goal(
            name=f"kvtier-uring over LMCache's {what} path, chunks of {chunk_mib} MiB, 4 ms a request",
            bench="peers",
            row=row,
            quantity="uring_times",
            bound=bound,
            where={"device": "prototype-4ms", "chunk_mib": chunk_mib},
            against="kvtier-uring",
        )


_EMULATED = {"device": "prototype-4ms"}
_NATIVE = {"native": True}


def _cold_reads() -> Iterator[Goal]:
    for row in ("kvtier-uring", "kvtier-threads"):
        yield Goal(
            f"{row} over fio's best, 4 ms a request", "read", row, "fraction_of_fio", 0.95,
            where=_EMULATED | _NATIVE, against="fio",
        )  # fmt: skip
        yield Goal(
            f"{row} over fio's best, a disk", "read", row, "fraction_of_fio", 0.9,
            where={"device": "ext4"} | _NATIVE, against="fio",
        )  # fmt: skip
        yield Goal(
            f"{row} over serial reads, 4 ms a request", "read", row, "times_serial", 5.3,
            where=_EMULATED | _NATIVE, against="serial",
        )  # fmt: skip
    yield Goal(
        "CPU s/GB, checksums off", "read", "kvtier-uring-unchecked", "cpu_s_per_gb", 0.05, at_most=True,
        where=_NATIVE,
    )  # fmt: skip
    yield Goal(
        "CPU s/GB above the checksum's, checksums on", "read", "kvtier-uring", "cpu_s_per_gb", 0.05,
        at_most=True, where=_NATIVE, minus="checksum_cpu_s_per_gb",
    )  # fmt: skip
    yield Goal(
        "kvtier-threads over fio's best without the native core", "read", "kvtier-threads",
        "fraction_of_fio", 0.8, where=_EMULATED | {"native": False, "chunk_mib": 2}, against="fio",
    )  # fmt: skip


GOALS = (
    *_cold_reads(),
    *_over_lmcache("lmcache-disk-async", "asynchronous", 9),
    *_over_lmcache("lmcache-disk", "default", 2),
    Goal("four devices over one", "scale", "kvtier-uring x4", "times_one", 3.5),
    Goal("a DRAM hit over the best copy loop", "copy", "kvtier-get", "fraction_of_best", 0.9),
    Goal("the same, checked", "copy", "kvtier-get-checked", "fraction_of_best", 0.6),
    Goal("gather of 16-token blocks", "copy", "gather", "fraction_of_best", 0.8),
    Goal("scatter of 16-token blocks", "copy", "scatter", "fraction_of_best", 0.8),
    Goal("keys and match, 256 tokens a chunk, ms", "keys", "keys-256", "total_ms", 2, at_most=True),
    Goal("keys and match, 16 tokens a chunk, ms", "keys", "keys-16", "total_ms", 15, at_most=True),
    Goal(
        "p99 of reads at half bandwidth, beside writes over alone", "mixed", None, "p99_ratio", 2,
        at_most=True, where=_EMULATED,
    ),
    Goal(
        "CPU per token of vLLM with the connector over without, when nothing hits", "vllm-overhead", None,
        "cpu_ratio", 1.03, at_most=True,
    ),
)  # fmt: skip

_LEAST_ROUNDS = 5
_COLD_READS = ("read", "peers")  # elsewhere nothing is to be cold, and `cold` is null for all
_HEADINGS = {
    "gb_s": "GB/s (least to most)", "fraction_of_fio": "of fio", "fraction_of_best": "of best loop",
    "times_serial": "x serial", "uring_times": "kvtier-uring x", "cpu_s_per_gb": "CPU s/GB",
    "p50_ms": "p50 ms", "p99_ms": "p99 ms",
}  # fmt: skip
_MACHINE = {
    "cpu": "CPU", "cores": "cores", "memory_gib": "memory, GiB", "kernel": "kernel", "disk": "disk",
    "python": "Python", "kvtier": "kvtier", "native": "native core", "fio": "fio",
}  # fmt: skip


def page(reports: Sequence[Report], goals: Sequence[Goal] = GOALS) -> str:
    """The page, in Markdown."""
    parts = [
        "# Results",
        "Medians over interleaved rounds, the first discarded; ratios are medians of each round's ratio. "
        "GB are 10^9 bytes. CPU is of the whole process. `cold` says whether the device's counters show "
        "just the bytes asked for; `null` is where nothing counts them.",
        _goals(reports, goals),
        _machines(reports),
        *(_run(report) for report in reports),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def bench_of(report: Report) -> str:
    """Which benchmark wrote it: as it says, or by its command."""
    words = shlex.split(str(report.get("command", "")))
    if "bench" not in report and words[1:2] == ["bench"] and len(words) > 2:
        return words[2]
    return str(report.get("bench", "unnamed"))


def verdicts(goal: Goal, reports: Sequence[Report]) -> list[tuple[str, str]]:
    """What was measured for a goal and what that says, per run that it is about."""
    found = []
    for report in reports:
        if bench_of(report) != goal.bench or not _fits(goal.where, report):
            continue
        value = (report if goal.row is None else _row(report, goal.row)).get(goal.quantity)
        where = _place(report) or "device not told"
        if value is None:
            reason = report.get("absent", {}).get(goal.row, "no such figure")
            found.append((f"-, {where}", f"not measured: {reason}"))
            continue
        value -= report.get(goal.minus, 0.0) if goal.minus else 0.0
        reached = value <= goal.bound if goal.at_most else value >= goal.bound
        doubts = _doubts(goal, report)
        words = [] if reached and doubts else ["reached" if reached else "**not reached**"]
        found.append((f"{_cell(value)}, {where}", "; ".join([*words, *doubts])))
    return found or [("-", "not measured")]


def _doubts(goal: Goal, report: Report) -> list[str]:
    """Why a verdict is not proved."""
    doubts = []
    if (rounds := report.get("rounds")) is not None and rounds < _LEAST_ROUNDS:
        doubts.append(f"**unproved**: {rounds} rounds, needs {_LEAST_ROUNDS}")
    for name in (goal.row, goal.against):
        row = _row(report, name) if name else {}
        if row.get("cold", True) is False:
            doubts.append(f"**unproved**: {name} was not cold")
        if row.get("cold", True) is None and bench_of(report) in _COLD_READS:
            doubts.append(f"**unproved**: nothing counts whether {name} was cold")
        if row.get("verified") is False:
            doubts.append(f"**unproved**: {name} gave back wrong bytes")
    return doubts


def _goals(reports: Sequence[Report], goals: Sequence[Goal]) -> str:
    lines = [
        [goal.name, f"{'<=' if goal.at_most else '>='} {goal.bound:g}", measured, verdict]
        for goal in goals
        for measured, verdict in verdicts(goal, reports)
    ]
    return "## Goals\n\n" + _table(["goal", "bound", "measured", "verdict"], lines) if lines else ""


def _machines(reports: Sequence[Report]) -> str:
    """What it was measured on, once if it is the same for all."""
    by_facts: dict[tuple[tuple[str, str], ...], list[Report]] = {}
    for report in reports:
        machine = _machine(report)
        facts = tuple((title, _cell(machine[key])) for key, title in _MACHINE.items() if key in machine)
        by_facts.setdefault(facts, []).append(report)
    sections = []
    for facts, own in by_facts.items():
        dates = sorted(str(report["date"])[:16].replace("T", " ") for report in own if "date" in report)
        when = [("measured", " to ".join(dict.fromkeys((dates[0], dates[-1]))))] if dates else []
        which = [("runs", ", ".join(_title(report) for report in own))] if len(by_facts) > 1 else []
        lines = [*facts, *when, *which] or [("machine", "not told")]
        sections.append("## Machine\n\n" + _table(["", ""], lines))
    return "\n\n".join(sections)


def _run(report: Report) -> str:
    command = _command(report)
    parts = [
        f"## {_title(report)}",
        f"```console\n$ {command}\n```" if command else "Its command was not told.",
        ", ".join(f"{_words(key)} {value:g}" for key, value in report.items() if _is_figure(value)),
        _rows(report.get("rows", []), reads_cold=bench_of(report) in _COLD_READS),
        "\n".join(
            f"- `{row['name']}`: {row['detail']}" for row in report.get("rows", []) if row.get("detail")
        ),
        "\n".join(_absences(report.get("absent", {}))),
    ]
    return "\n\n".join(part for part in parts if part)


def _rows(rows: Sequence[Mapping[str, Any]], *, reads_cold: bool) -> str:
    """A column for everything that some row has a figure of; of cold reads `cold` also if unknown to all."""
    names = dict.fromkeys(key for row in rows for key in row if key not in ("name", "detail"))
    columns = [
        name
        for name in names
        if (name == "cold" and reads_cold)
        or any(row.get(name) is not None and _is_scalar(row[name]) for row in rows)
    ]
    lines = [[f"`{row['name']}`", *(_figure(row, name) for name in columns)] for row in rows]
    return _table(["", *(_HEADINGS.get(name, _words(name)) for name in columns)], lines) if rows else ""


def _figure(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if name == "cold" and value is None and name in row:
        return "null"
    spread = row.get("gb_s_of_rounds") if name == "gb_s" else None
    return f"{_cell(value)} ({_cell(min(spread))} to {_cell(max(spread))})" if spread else _cell(value)


def _absences(absent: Mapping[str, str]) -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for name, reason in absent.items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    for reason, names in by_reason.items():
        yield f"- skipped: {', '.join(names)}: {reason}"


def _title(report: Report) -> str:
    return ", ".join(part for part in (bench_of(report), _place(report)) if part)


def _place(report: Report) -> str:
    """Chunk size and device; of a directory only its file system, for it means nothing elsewhere."""
    device = str(_machine(report).get("device", ""))
    device = re.sub(r"/\S*(?= \()", "a disk", device)
    chunks = f"chunks of {report['chunk_mib']:g} MiB" if "chunk_mib" in report else ""
    return ", ".join(part for part in (chunks, device) if part)


def _command(report: Report) -> str:
    """As it was typed, but for where files were put."""
    return re.sub(r" --(json|envs|path)[ =]\S+", "", str(report.get("command", "")))


def _fits(where: Mapping[str, Any], report: Report) -> bool:
    machine = _machine(report)
    settings = {**report, "device": str(machine.get("device", "")), "native": machine.get("native")}
    return all(
        wanted in settings["device"] if key == "device" else settings.get(key) == wanted
        for key, wanted in where.items()
    )


def _row(report: Report, name: str) -> dict[str, Any]:
    return next((row for row in report.get("rows", []) if row["name"] == name), {})


def _machine(report: Report) -> dict[str, Any]:
    return dict(report.get("machine", {}))


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float | str)


def _is_figure(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    escaped = ([cell.replace("|", r"\|").replace("\n", " ") for cell in line] for line in lines)
    drawn = [headings, ["---"] * len(headings), *escaped]
    return "\n".join(f"| {' | '.join(line)} |" for line in drawn)


def load(files: Sequence[Path]) -> list[Report]:
    """The reports, in order. Raises ValueError for what is none."""
    reports = []
    for file in files:
        try:
            report = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} is no JSON file of a benchmark: {error}") from error
        if not isinstance(report, dict):
            raise ValueError(f"{file} is no JSON file of a benchmark: it holds no object")
        reports.append(report)
    return reports


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="JSON that a benchmark wrote")
    parser.add_argument("-o", "--output", type=Path, help="file to write the page to (default: stdout)")
    args = parser.parse_args()
    try:
        text = page(load(args.files))
        if args.output is None:
            sys.stdout.write(text)
        else:
            args.output.write_text(text)
    except (OSError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
