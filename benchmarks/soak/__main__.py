"""`python -m benchmarks.soak --hours N`, in a checkout."""

from __future__ import annotations

import os
import sys

if sys.path[0] == os.getcwd():
    sys.path.append(sys.path.pop(0))  # an installed kvtier has its native core, the sources here do not

import json as json_format
import logging
import random
import shutil
import tempfile
import time
import traceback
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from cyclopts import App
from rich.console import Console

from kvtier.cli.soak.run import Soak
from kvtier.cli.soak.watch import trends
from kvtier.cli.soak.worker import Violation
from kvtier.testing.emulated import EmulatedDevice

app = App(name="python -m benchmarks.soak", help="A store under load for hours, against a model.")


class _Errors(logging.Handler):
    """Keeps the first error that the store logs: a fault of its own, not of the device."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.first = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.first = self.first or self.format(record)


@app.default
def soak(
    *,
    hours: float = 0.5,
    path: Path | None = None,
    seed: int | None = None,
    engine: str = "auto",
    kind: Literal["slab", "files"] = "slab",
    json: Path | None = None,
) -> None:
    """Mixed load on one store: puts, raw and encoded, gets copied, lent and leased, prefetches, pins,
    deletes, flushes, restarts, and kills of another process that uses it. Exit code 1 if anything was wrong.

    On the emulated device faults come and go: errors, short and torn transfers, flipped bits, delays,
    hangs. Every byte is compared. When all is quiet, after every 1.5 s, whatever failed must work again,
    no slot may be pinned, and the cap must hold; a closed store may leave no thread and no descriptor. At
    the end memory, descriptors and threads of the last third are compared with the first, after a warm-up
    of a fifth: memory may be 5 % and 8 MiB more, the others no more.

    Parameters
    ----------
    hours
        How long; fractions are fine.
    path
        Directory on the device to use; what is made there stays only if something was wrong. Default: an
        emulated device in memory; only there are faults.
    seed
        Draws the load and the faults. Default: a random one, which is told.
    engine
        I/O engine, as in the settings.
    kind
        Kind of the disk tier; with "files" the processes that are killed share the directory meanwhile.
    json
        A file to write the result to.
    """
    seed = random.randrange(1 << 30) if seed is None else seed
    console = Console()
    with ExitStack() as stack:
        device = None if path else stack.enter_context(EmulatedDevice("instant", size="64MiB", seed=seed))
        place = (device.paths[0] if device else Path(tempfile.mkdtemp(prefix="soak-", dir=path))) / "store"
        run = Soak(place, device, seed, engine, kind)
        result = _run(run, seed, 3600 * hours, console)
        if path and result["passed"]:
            shutil.rmtree(place.parent)
    if json:
        json.write_text(json_format.dumps(result, indent=1) + "\n")
    console.print(
        f"{'passed' if result['passed'] else 'FAILED'}, seed {seed}, after {result['seconds']:.0f} s: "
        f"{result['verdict']}",
        soft_wrap=True, highlight=False, markup=False,
    )  # fmt: skip
    sys.exit(not result["passed"])


def _run(run: Soak, seed: int, seconds: float, console: Console) -> dict[str, Any]:
    start = last = time.monotonic()

    def tell(passed: float) -> None:
        nonlocal last
        if time.monotonic() - last < 10 and passed:
            return
        last, now, total = time.monotonic(), run.samples[-1], run.total()
        faults = sum(n for name, n in total.items() if name.startswith("fault."))
        console.print(
            f"{passed:7.0f} s  {total['get.hit']} hits, {faults} faults, {total['reopens']} reopens, "
            f"{total['kills']} kills; "
            f"{now.rss >> 20} MiB, {now.descriptors} descriptors, {now.threads} threads",
            soft_wrap=True, highlight=False,
        )  # fmt: skip

    wrong = ""
    errors = _Errors()
    log = logging.getLogger("kvtier")
    log.addHandler(errors)
    log.propagate = False  # a failing device is told of in thousands of lines
    try:
        run.run(seconds, tell)
    except Violation as error:
        wrong = str(error)
    except Exception as error:  # no call of the load may raise
        traceback.print_exc()
        wrong = repr(error)
    wrong = wrong or errors.first
    found = trends(run.samples)
    growing = [f"{name} from {t.first:.0f} to {t.last:.0f}" for name, t in found.items() if not t.is_flat]
    verdict = wrong or ("growing: " + ", ".join(growing) if growing else "no wrong byte, nothing grows")
    if not wrong and not found:
        verdict = "no wrong byte; too short to see anything grow"
    return {
        "passed": not wrong and not growing,
        "verdict": verdict,
        "seed": seed,
        "seconds": time.monotonic() - start,
        "counts": dict(sorted(run.total().items())),
        "faults_struck": run.dice.counts if run.dice else {},
        "trends": {name: asdict(trend) for name, trend in found.items()},
        "samples": [asdict(s) for s in run.samples],
    }


if __name__ == "__main__":
    app()
