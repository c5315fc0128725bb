"""docs/RELIABILITY.md: what is promised, and the matrix as it came out."""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .cases import CASES, ENGINES, KINDS, MOMENTS, Cell

if TYPE_CHECKING:
    from .play import Outcome
    from .workers import Results

Verdict = Literal["green", "known", "red", "not run"]

_TITLES = {
    "open": "At open",
    "put": "During put: the write of payloads",
    "append": "During put: the append to the journal",
    "dram": "During put into DRAM, and get from there",
    "get": "During get",
    "lease": "During read (leases), with DRAM",
    "prefetch": "During prefetch",
    "lend": "During get into lent memory",
    "paths": "During get and put, with one of two paths struck",
    "flush": "During flush",
    "close": "At close, with a put under way",
}


def verdict(cell: Cell, outcomes: list[Outcome]) -> tuple[Verdict, str]:
    """What a cell came to, and why if it is not green."""
    if not outcomes:
        return "red", "it was not run, and nobody said why"
    if outcomes[0].not_run:
        return "not run", outcomes[0].not_run
    problems = list(dict.fromkeys(problem for outcome in outcomes for problem in outcome.problems))
    if cell.known and all(re.match(cell.known.shows, problem) for problem in problems):
        return ("known", cell.known.why) if problems else ("red", "it is green now: take it off KNOWN")
    return ("red", "; ".join(problems)) if problems else ("green", "")


def page(cells: list[Cell], results: Results, repetitions: int, seconds: float) -> str:
    verdicts = {cell.id: verdict(cell, results[cell.id]) for cell in cells}
    text = (Path(__file__).parent / "page.md").read_text()
    return text.format(
        faults=len(CASES),
        run=_run(repetitions, seconds),
        counts=_counts(cells, verdicts),
        known=_reasons(cells, verdicts, "known", "None: every cell that can run here is green."),
        red=_reasons(cells, verdicts, "red", "None."),
        not_run=_reasons(cells, verdicts, "not run", "None."),
        tables="\n\n".join(_tables(cells, results, verdicts)),
    )


def _run(repetitions: int, seconds: float) -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, Linux {platform.release()} {platform.machine()}, "
        f"{os.cpu_count()} cores, {memory} GiB, Python {platform.python_version()}; "
        f"each cell {repetitions} times, {seconds / 60:.0f} minutes in all"
    )


def _counts(cells: list[Cell], verdicts: dict[str, tuple[Verdict, str]]) -> str:
    lines = ["| engine | cells | green | known | red | not run |", "|---|---|---|---|---|---|"]
    for engine in (*ENGINES, "all"):
        found = Counter(verdicts[c.id][0] for c in cells if engine in (c.engine, "all"))
        counts = [found.total(), found["green"], found["known"], found["red"], found["not run"]]
        lines.append(f"| {engine} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def _reasons(cells: list[Cell], verdicts: dict[str, tuple[Verdict, str]], kind: Verdict, none: str) -> str:
    found = [(verdicts[c.id][1], c) for c in cells if verdicts[c.id][0] == kind]
    lines = []
    for why, group in groupby(sorted(found, key=lambda pair: pair[0]), key=lambda pair: pair[0]):
        names: dict[str, list[str]] = {}
        for _, cell in group:
            names.setdefault(f"{cell.case.fault}, {cell.moment}", []).append(cell.engine)
        where = "; ".join(f"{name} ({', '.join(engines)})" for name, engines in names.items())
        lines.append(f"- {where}: {why}")
    return "\n".join(lines) or none


def _tables(cells: list[Cell], results: Results, verdicts: dict[str, tuple[Verdict, str]]) -> list[str]:
    tables = []
    for kind in KINDS:
        for moment in MOMENTS:
            there = {(c.case.fault, c.engine): c for c in cells if (c.kind, c.moment) == (kind, moment)}
            rows = [f"### {_TITLES[moment]} (`{kind}`)", "", f"| fault | expected | {' | '.join(ENGINES)} |"]
            rows.append("|---" * (2 + len(ENGINES)) + "|")
            for case in (case for case in CASES if moment in case.expected(kind)):
                seen = []
                for engine in ENGINES:
                    cell = there.get((case.fault, engine))
                    seen.append(_seen(results[cell.id], *verdicts[cell.id]) if cell else "")
                rows.append(f"| {case.fault} | {case.expected(kind)[moment]} | {' | '.join(seen)} |")
            tables.append("\n".join(rows))
    return tables


def _seen(outcomes: list[Outcome], state: Verdict, _: str) -> str:
    if state == "not run":
        return "*not run*"
    total = Counter[str]()
    for outcome in outcomes:
        total.update(outcome.seen)
    counted = ", ".join(f"{n} {name}" for name, n in sorted(total.items())) or "nothing"
    return {"green": counted, "known": f"*{counted}*", "red": f"**{counted}**"}.get(state, counted)
