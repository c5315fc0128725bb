"""One cell: the fault in a process of its own, then a new process that opens what it left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier import _native
from kvtier.errors import TierUnavailable
from kvtier.io import uring_obstacle
from kvtier.testing.emulated import EmulatedDevice
from kvtier.testing.profiles import profile

from .cases import AGAIN
from .scene import BEFORE, CACHED, PATIENCE, Scene, describe

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from .cases import Cell

_LIMIT = 20.0
"""Seconds for a fault's process; what takes longer hangs."""
_HERE = Path(__file__).parent


@dataclass(slots=True)
class Outcome:
    """What came of one repetition of a cell."""

    seen: dict[str, int] = field(default_factory=dict)
    """How many keys, or calls, came to each outcome while the fault lasted."""
    problems: list[str] = field(default_factory=list)
    not_run: str = ""


def play(cell: Cell, repetition: int) -> Outcome:
    """Run a cell once. The process must be forked for this, and without threads."""
    if obstacle := _obstacle(cell):
        return Outcome(not_run=obstacle)
    try:
        device = _device(cell)
    except TierUnavailable as error:
        return Outcome(not_run=str(error))
    with device:
        outcome, promised = _in_a_process(cell, device, repetition)
        if cell.case.ends:
            _reopen(cell, device, repetition, outcome, promised)
        else:
            with _device(cell) as another:
                _reopen(cell, another, repetition, outcome, set())
    return outcome


def _device(cell: Cell) -> EmulatedDevice:
    devices = 2 if cell.moment == "paths" else 1
    return EmulatedDevice(replace(profile("instant"), devices=devices), size="64MiB")


def _obstacle(cell: Cell) -> str:
    """Why the cell cannot run on this machine; empty if it can."""
    if (cell.engine == "threads-python") != (_native.core is None) and cell.engine != "aio":
        return _native.why_not or "the native core is in use"
    if cell.engine == "uring":
        return uring_obstacle()
    if cell.engine == "aio":
        try:
            import aiofiles  # noqa: F401
        except ImportError as error:
            return str(error)
    return ""


def _in_a_process(cell: Cell, device: EmulatedDevice, repetition: int) -> tuple[Outcome, set[int]]:
    """The fault, in a process that is killed if it hangs. Also what it was promised to have on disk."""
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(theirs, cell, device, repetition))
    process.start()
    theirs.close()
    outcome, promised, at = Outcome(), set[int](), "the start"
    end = time.monotonic() + _LIMIT
    with contextlib.suppress(EOFError):
        while ours.poll(max(0.0, end - time.monotonic())):
            at, outcome, promised = ours.recv()
    if at != "the end":
        why = "hung" if time.monotonic() >= end else "died"
        outcome.problems.append(f"the process {why} in: {at}")
        outcome.seen = outcome.seen or {why: 1}
    if cell.case.ends:
        device.clear_faults()  # no process can be killed inside a request that hangs
    process.kill()
    process.join()
    return outcome, promised


def _report(pipe: Connection, cell: Cell, device: EmulatedDevice, repetition: int) -> None:
    scene = Scene(cell, device, repetition)
    outcome = Outcome(problems=scene.problems)

    def at(step: str) -> None:
        pipe.send((step, outcome, scene.promised))

    try:
        _act(scene, outcome, at)
    except Exception as error:
        outcome.problems.append(describe(error))
    at("the end")
    pipe.close()
    os._exit(0)  # without the store's exit hooks, which may hang


def _act(scene: Scene, outcome: Outcome, at: Callable[[str], None]) -> None:
    cell = scene.cell
    case, moment = cell.case, cell.moment
    at("preparing")
    if case.before_open and moment != "open":
        case.begin(scene, moment)
    scene.open()
    if not scene.store._core.wait_until_populated(PATIENCE):
        scene.problems.append("the memory is not there in time")
    scene.put(BEFORE)
    if moment in CACHED:
        scene.close()
        scene.open()
    if moment == "flush":
        scene.put(scene.new)
    if moment == "open" or case.process:
        scene.close()
    if moment != "open" and not case.before_open:
        case.begin(scene, moment)
    at("the fault")
    seen = _another_process(scene) if case.process else _MOMENTS[moment](scene)
    outcome.seen = dict(Counter(seen))
    scene.expect(moment, seen, cell.expects)
    if case.strikes is not None and (scene.device.stats()[-1].faults_injected > 0) != case.strikes:
        scene.problems.append(f"the fault {'did not strike' if case.strikes else 'struck'}")
    at("the fault's end")
    scene.end_fault()
    if case.ends and not (moment == "close" and cell.abandons):
        _recover(scene, at)
    elif moment not in ("open", "close") and not cell.abandons:
        at("closing")
        scene.close()


def _open(scene: Scene) -> list[str]:
    seen = []
    for room in scene.cell.case.rooms:
        scene.room = room
        while scene.undo:
            scene.undo.pop()()
        scene.cell.case.begin(scene, "open")
        if not scene.store._core.closed:
            scene.store.close()
        seen.append(scene.try_open())
        if scene.problems:
            break
    return seen


def _put(scene: Scene) -> list[str]:
    return scene.put(scene.new, scene.cell.case.timeout, scene.cell.case.meanwhile)


def _get(scene: Scene) -> list[str]:
    return scene.get(BEFORE, scene.cell.case.timeout, scene.cell.case.meanwhile)


def _dram(scene: Scene) -> list[str]:
    seen = scene.put_in_dram(scene.new, scene.cell.case.timeout) + scene.get(scene.new)
    scene.flush(scene.cell.case.timeout)  # so that the fault strikes what is written behind
    return seen


def _lease(scene: Scene) -> list[str]:
    return scene.lease(BEFORE, scene.cell.case.timeout, scene.cell.case.meanwhile)


def _prefetch(scene: Scene) -> list[str]:
    return scene.prefetch(BEFORE, scene.cell.case.timeout, scene.cell.case.meanwhile)


def _lend(scene: Scene) -> list[str]:
    return scene.lend(BEFORE, scene.cell.case.timeout, scene.cell.case.meanwhile)


def _paths(scene: Scene) -> list[str]:
    """One of two devices fails: the chunks of the other are hits, and it takes what is put."""
    timeout = scene.cell.case.timeout
    sound = scene.on_path(0, BEFORE)
    seen = scene.get(BEFORE, timeout)
    scene.expect("chunks of the sound path", [seen[i] for i in sound], "hit")
    stored = scene.put(scene.new, timeout)
    if "stored" not in stored:
        scene.problems.append("the sound path took nothing")
    return seen + stored


def _flush(scene: Scene) -> list[str]:
    return scene.flush(scene.cell.case.timeout, scene.cell.case.meanwhile)


def _close(scene: Scene) -> list[str]:
    """Close with a put under way, which must be told its outcome."""
    transfer = scene.start_put(scene.new, scene.cell.case.timeout)
    start = time.monotonic()
    scene.store.close()
    scene.check_closing_time(start)
    scene.note_put(scene.new, scene.wait(transfer, 0.0))
    if not scene.cell.abandons:
        scene.check_leaks()
    return ["closed"]


def _another_process(scene: Scene) -> list[str]:
    """The call, made by `host.py`: what that prints is what was seen."""
    case, moment = scene.cell.case, scene.cell.moment
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    with tempfile.TemporaryDirectory() as folder:
        if case.process == "misled":
            environment["LD_PRELOAD"] = str(_stepping_clock(Path(folder)))
        engine = scene.cell.engine.removesuffix("-python")
        arguments = [str(scene.paths[0]), scene.cell.kind, engine, moment, str(case.timeout), case.process]
        errors = Path(folder) / "stderr"
        with (
            errors.open("w") as stderr,
            subprocess.Popen(
                [sys.executable, "-P", str(_HERE / "host.py"), *arguments],
                env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True,
            ) as host,
        ):  # fmt: skip
            assert host.stdout is not None
            host.stdout.readline()  # it has begun
            if case.process == "interrupted":
                host.send_signal(signal.SIGINT)
            try:
                host.wait(case.timeout + PATIENCE)
            except subprocess.TimeoutExpired:
                host.kill()
                scene.problems.append("the process hung")
            out = host.stdout.read()
        err = errors.read_text()
    if host.returncode or err:
        scene.problems.append(f"exit status {host.returncode}: {err.strip()[-500:]}")
    return out.split("\n")[:-1]


def _stepping_clock(folder: Path) -> Path:
    library = folder / "clock.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", str(_HERE / "stepping_clock.c"), "-o", str(library)], check=True
    )
    return library


_MOMENTS: dict[str, Any] = {
    "open": _open,
    "put": _put, "append": _put, "dram": _dram, "flush": _flush, "close": _close,
    "get": _get, "lease": _lease, "prefetch": _prefetch, "lend": _lend, "paths": _paths,
}  # fmt: skip


def _recover(scene: Scene, at: Callable[[str], None]) -> None:
    """The fault is over: in the same process the same keys can be put and got, and nothing is left."""
    moment = scene.cell.moment
    if moment in ("open", "close") or scene.cell.case.process:
        at("opening again")
        if moment == "open" and not scene.store._core.closed:
            scene.store.close()
        scene.open_when_let_go()
    at("recovering")
    if moment == "paths":
        scene.wait_for_paths()
    scene.expect("flush afterwards", scene.flush(), "synced")
    chunks = [BEFORE, scene.new]
    struck = chunks.pop(moment in ("put", "append", "dram", "flush"))
    after = {"dram": "hit", "paths": AGAIN}.get(moment, scene.cell.case.after)
    scene.expect("get afterwards", scene.get(struck), after)
    scene.expect("get of others afterwards", scene.get(chunks[0]), AGAIN)
    scene.check_all_works([*BEFORE, *scene.new])
    at("closing")
    scene.close()


def _reopen(
    cell: Cell, device: EmulatedDevice, repetition: int, outcome: Outcome, promised: set[int]
) -> None:
    """A new process finds what was promised, or nothing, but never other bytes; and all works."""
    scene = Scene(cell, device, repetition)
    try:
        scene.open(engine="aio" if cell.engine == "aio" else "auto")
        chunks = [*BEFORE, *scene.new]
        found = scene.get(chunks)
        scene.expect("get in a new process", found, AGAIN)
        lost = [i for i, seen in zip(chunks, found, strict=True) if seen != "hit" and i in promised]
        if lost and not cell.case.loses:
            scene.problems.append(f"lost: chunks {lost}")
        scene.check_all_works(chunks)
        scene.close()
    except Exception as error:
        scene.problems.append(f"in a new process, {describe(error)}")
    outcome.problems += scene.problems
