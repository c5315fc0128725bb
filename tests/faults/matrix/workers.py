"""Runs cells: each in a process forked from one that has imported everything and started nothing."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.settings import load

from .cases import all_cells
from .play import Outcome, play

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from multiprocessing.connection import Connection

    from .cases import Cell

_LIMIT = 120.0
"""Seconds for a cell with everything around it."""
_SHARES = 3
Results = dict[str, list[Outcome]]


def run(cells: list[Cell], repetitions: int) -> Iterator[tuple[str, Outcome]]:
    """Every cell's outcomes, as they come from two processes at a time; one kind has no native core."""
    native = [cell.id for cell in cells if cell.engine != "threads-python"]
    python = [cell.id for cell in cells if cell.engine == "threads-python"]
    shares = [("0", python), *(("1", native[i::_SHARES]) for i in range(_SHARES))]
    done: queue.SimpleQueue[tuple[str, Outcome] | None] = queue.SimpleQueue()
    with ThreadPoolExecutor(2) as pool:
        workers = [pool.submit(_run_share, *share, repetitions, done.put) for share in shares]
        for worker in workers:
            worker.add_done_callback(lambda _: done.put(None))
        for _ in workers:
            yield from iter(done.get, None)
        for worker in workers:
            worker.result()


def _run_share(
    native: str, ids: list[str], repetitions: int, done: Callable[[tuple[str, Outcome]], None]
) -> None:
    # Last, since an installed kvtier has its native core, and the sources in a checkout do not.
    package = __package__ or ""
    paths = [*sys.path, str(Path(__file__).parents[1 + package.count(".")])]
    environment = dict(os.environ, KVTIER_NATIVE=native, PYTHONPATH=os.pathsep.join(paths))
    with subprocess.Popen(
        [sys.executable, "-P", "-m", package, "work", str(repetitions)],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as worker:  # fmt: skip
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write("\n".join(ids))
        worker.stdin.close()
        for line in worker.stdout:
            cell_id, outcome = json.loads(line)
            done((cell_id, Outcome(**outcome)))
    if worker.returncode:
        raise RuntimeError(f"a worker ended with status {worker.returncode}")


def work(ids: Iterable[str], repetitions: int) -> None:
    """Run the cells named on stdin, and print a line of JSON for each repetition."""
    load(None, {"dram": 4096, "chunk_bytes": 4096, "landing": 4096})  # imports what opening a store does
    cells = {cell.id: cell for cell in all_cells()}
    for cell_id in filter(None, ids):
        for repetition in range(repetitions):
            outcome = _apart(cells[cell_id], repetition)
            print(json.dumps([cell_id, asdict(outcome)]), flush=True)
            if outcome.not_run:
                break


def _apart(cell: Cell, repetition: int) -> Outcome:
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_play, args=(theirs, cell, repetition))
    process.start()
    theirs.close()
    outcome = Outcome(problems=["the new process died or hung"])
    with contextlib.suppress(EOFError):
        if ours.poll(_LIMIT):
            outcome = ours.recv()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)  # with what it started; its device ends by itself
    process.join()
    return outcome


def _play(pipe: Connection, cell: Cell, repetition: int) -> None:
    os.setsid()
    pipe.send(play(cell, repetition))
