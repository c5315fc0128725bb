"""The page of results: verdicts on goals, and whatever a report may lack."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results import GOALS, Goal, bench_of, load, page, verdicts

SCRIPT = Path(__file__).parents[2] / "benchmarks/results.py"
GOAL = Goal("ours over theirs", "peers", "theirs", "times", 9, where={"chunk_mib": 2}, against="ours")


def row(name: str, **figures: Any) -> dict[str, Any]:
    return {"name": name, "gb_s": 1.5, "gb_s_of_rounds": [1.25, 1.5, 2.0], "cold": True, **figures}


def report(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "bench": "peers",
        "machine": {"cpu": "Some CPU", "native": True, "device": "emulated slow"},
        "date": "2026-11-30T10:00:00+00:00",
        "command": "python -m benchmarks.peers --rounds 5",
        "chunk_mib": 2.0,
        "rounds": 5,
        "rows": [row("ours"), *rows],
        "absent": {},
        **changes,
    }  # fmt: skip


def verdict(*reports: dict[str, Any], goal: Goal = GOAL) -> str:
    """Of the only run that the goal is about."""
    ((_, found),) = verdicts(goal, reports)
    return found


@pytest.mark.parametrize(("times", "expected"), [(9.0, "reached"), (8.999, "**not reached**")])
def test_a_goal_is_reached_or_not(times: float, expected: str) -> None:
    assert verdict(report(row("theirs", times=times))) == expected


@pytest.mark.parametrize(("seconds", "expected"), [(0.1, "reached"), (0.11, "**not reached**")])
def test_a_goal_may_be_an_upper_bound_on_a_whole_run(seconds: float, expected: str) -> None:
    goal = Goal("quick", "scale", None, "seconds", 0.1, at_most=True)
    assert verdict({"bench": "scale", "seconds": seconds}, goal=goal) == expected


def test_a_goal_looks_at_its_own_runs_only() -> None:
    good, bad = row("theirs", times=10.0), row("theirs", times=1.0)
    runs = [report(good), report(bad, chunk_mib=32), report(bad, bench="read")]
    assert verdicts(GOAL, runs) == [("10.0, chunks of 2 MiB, emulated slow", "reached")]
    on_device = Goal("", "peers", "theirs", "times", 9, where={"device": "slow"})
    elsewhere = Goal("", "peers", "theirs", "times", 9, where={"device": "fast"})
    assert [found for _, found in verdicts(on_device, runs)] == ["reached", "**not reached**"]
    assert verdicts(elsewhere, runs) == [("-", "not measured")]


@pytest.mark.parametrize(
    ("ours", "theirs", "changes", "doubt"),
    [
        ({}, {}, {"rounds": 4}, "4 rounds, needs 5"),
        ({}, {"cold": False}, {}, "theirs was not cold"),
        ({"cold": False}, {}, {}, "ours was not cold"),
        ({}, {"cold": None}, {}, "nothing counts whether theirs was cold"),
        ({}, {"verified": False}, {}, "theirs gave back wrong bytes"),
    ],
)
def test_what_is_not_proved_is_not_reached(
    ours: dict[str, Any], theirs: dict[str, Any], changes: dict[str, Any], doubt: str
) -> None:
    rows = {"rows": [row("ours", **ours), row("theirs", times=10.0, **theirs)]}
    assert verdict(report(**{**rows, **changes})) == f"**unproved**: {doubt}"
    rows["rows"][1]["times"] = 1.0
    assert verdict(report(**{**rows, **changes})) == f"**not reached**; **unproved**: {doubt}"


def test_a_skipped_row_is_not_measured() -> None:
    assert verdict(report(absent={"theirs": "not installed"})) == "not measured: not installed"
    assert verdict(report(row("theirs", times=None))) == "not measured: no such figure"


def test_the_goals_over_lmcache_are_judged_on_both_sizes_of_chunks() -> None:
    def run(chunk_mib: float, default: float, asynchronous: float) -> dict[str, Any]:
        rows = [row("kvtier-uring"), row("lmcache-disk", uring_times=default)]
        rows.append(row("lmcache-disk-async", uring_times=asynchronous))
        return report(rows=rows, chunk_mib=chunk_mib, machine={"device": "emulated prototype-4ms"})

    goals = [goal for goal in GOALS if goal.bench == "peers"]
    found = {
        (goal.row, goal.where["chunk_mib"]): verdict(run(2.0, 2.5, 8.0), run(32.0, 1.9, 9.5), goal=goal)
        for goal in goals
    }
    assert found == {
        ("lmcache-disk", 2): "reached",
        ("lmcache-disk", 32): "**not reached**",
        ("lmcache-disk-async", 2): "**not reached**",
        ("lmcache-disk-async", 32): "reached",
    }


def test_the_page_shows_machine_command_and_rows() -> None:
    text = page([report(row("theirs", times=10.0, p50_ms=None, fraction_of_fio=None))], [GOAL])
    assert "| ours over theirs | >= 9 | 10.0, chunks of 2 MiB, emulated slow | reached |" in text
    assert "| CPU | Some CPU |" in text
    assert "| native core | yes |" in text
    assert "| measured | 2026-11-30 10:00 |" in text
    assert "## peers, chunks of 2 MiB, emulated slow" in text
    assert "$ python -m benchmarks.peers --rounds 5" in text
    assert "chunk mib 2, rounds 5" in text
    assert "|  | GB/s (least to most) | cold | times |" in text, "no column that is empty"
    assert "| `theirs` | 1.500 (1.250 to 2.000) | yes | 10.0 |" in text
    assert "| `ours` | 1.500 (1.250 to 2.000) | yes | - |" in text


def test_missing_fio_and_skipped_peers_are_told() -> None:
    absent = {"fio": "fio is not installed", "a": "no environment", "b": "no environment"}
    text = page([report(row("theirs", fraction_of_fio=None), absent=absent)])
    assert "of fio" not in text
    assert "- skipped: `fio`: fio is not installed" in text
    assert "- skipped: `a`, `b`: no environment" in text


def test_cold_is_shown_when_it_is_false_and_when_nothing_counts() -> None:
    text = page([report(row("a", cold=False), row("b", cold=None))])
    assert "| `a` | 1.500 (1.250 to 2.000) | **no** |" in text
    assert "| `b` | 1.500 (1.250 to 2.000) | null |" in text
    assert "| `b` | 1.500 (1.250 to 2.000) | null |" in page([report(rows=[row("b", cold=None)])])


def test_cold_is_no_matter_of_what_does_not_read() -> None:
    writes = report(rows=[row("theirs", times=10.0, cold=None)], bench="write")
    assert "cold |" not in page([writes])
    assert verdict(writes, goal=Goal("", "write", "theirs", "times", 9)) == "reached"


def test_no_path_of_the_machine_is_told() -> None:
    told = report(
        machine={"device": "/tmp/tmpabc (ext4)"},
        command="kvtier bench read --path /tmp/x --gib 1 --json /tmp/y.json --rounds 5",
    )
    text = page([told])
    assert "## peers, chunks of 2 MiB, a disk (ext4)" in text
    assert "$ kvtier bench read --gib 1 --rounds 5\n" in text
    assert "/tmp" not in text


def test_two_machines_are_told_apart() -> None:
    other = report(machine={"cpu": "Other CPU", "device": "disk"}, chunk_mib=32)
    text = page([report(), other])
    assert text.count("## Machine") == 2
    assert "| runs | peers, chunks of 32 MiB, disk |" in text
    same = page([report(), report(date="2026-12-01T09:30:00+00:00")])
    assert same.count("## Machine") == 1
    assert "| measured | 2026-11-30 10:00 to 2026-12-01 09:30 |" in same


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"bench": "peers", "command": "kvtier bench read"}, "peers"),
        ({"command": "kvtier bench read --gib 0.5"}, "read"),
        ({"command": "python -m something"}, "unnamed"),
        ({}, "unnamed"),
    ],
)
def test_a_report_is_named_by_itself_or_its_command(given: dict[str, Any], expected: str) -> None:
    assert bench_of(given) == expected


def test_a_report_that_says_little_is_still_shown() -> None:
    text = page([{"rows": [{"name": "keys-16", "keys_ms": 8.125}], "p99_ratio": 1.25}])
    assert "Its command was not told." in text
    assert "| machine | not told |" in text
    assert "p99 ratio 1.25" in text
    assert "| `keys-16` | 8.125 |" in text


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    file, output = tmp_path / "peers.json", tmp_path / "RESULTS.md"
    file.write_text(json.dumps(report(row("theirs"))))
    run = [sys.executable, str(SCRIPT)]
    subprocess.run([*run, str(file), "-o", str(output)], check=True)
    assert output.read_text() == page(load([file]))
    shown = subprocess.run([*run, str(file)], check=True, capture_output=True, text=True).stdout
    assert shown == output.read_text()


@pytest.mark.parametrize("text", ["", "[1]", None])
def test_what_is_no_report_is_refused_by_name(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "odd.json"
    if text is not None:
        file.write_text(text)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"{file} is no JSON file of a benchmark" in done.stderr
