"""`python -m tests.faults.matrix`, in a checkout: run the matrix, and write docs/RELIABILITY.md."""

from __future__ import annotations

import argparse
import os
import sys

if sys.path[0] == os.getcwd():
    sys.path.append(sys.path.pop(0))  # an installed kvtier has its native core, the sources here do not

import time
from pathlib import Path

from .cases import Cell, all_cells, short_cells
from .page import page, verdict
from .workers import Results, run, work


def main() -> int:
    if sys.argv[1:2] == ["work"]:
        work(sys.stdin.read().split("\n"), int(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(prog="python -m tests.faults.matrix", description=__doc__)
    parser.add_argument("--short", action="store_true", help="each fault some times, and each engine")
    parser.add_argument("--only", default="", metavar="TEXT", help="cells with this in their name")
    parser.add_argument("--repetitions", type=int, default=3, help="times that each cell runs (3)")
    parser.add_argument("--page", type=Path, default=Path("docs/RELIABILITY.md"), help="the page to write")
    arguments = parser.parse_args()
    cells = [c for c in (short_cells() if arguments.short else all_cells()) if arguments.only in c.id]
    start = time.monotonic()
    results = collect(cells, arguments.repetitions)
    seconds = time.monotonic() - start
    if arguments.short or arguments.only:
        print("the page is written from the whole matrix only")
    else:
        arguments.page.write_text(page(cells, results, arguments.repetitions, seconds))
    red = [cell.id for cell in cells if verdict(cell, results[cell.id])[0] == "red"]
    print(f"{len(cells)} cells in {seconds:.0f} s, {len(red)} red: {'; '.join(red)}")
    return int(bool(red))


def collect(cells: list[Cell], repetitions: int) -> Results:
    """Run cells, and tell of each problem that is not known as it comes."""
    known = {cell.id for cell in cells if cell.known}
    results: Results = {cell.id: [] for cell in cells}
    for cell_id, outcome in run(cells, repetitions):
        results[cell_id].append(outcome)
        for problem in () if cell_id in known else outcome.problems:
            print(f"{cell_id}: {problem}", flush=True)
    return results


if __name__ == "__main__":
    sys.exit(main())
