"""A store on an emulated device: calls whose outcomes are written down and whose bytes are compared."""

from __future__ import annotations

import logging
import mmap
import os
import random
import threading
import time
import traceback
from concurrent.futures import TimeoutError as NotInTime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

import kvtier
from kvtier import Reason, Status
from small_stores import CHUNK, SMALL, numbered_key, random_payload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvtier.store.lease import Until
    from kvtier.store.transfer import Transfer
    from kvtier.testing.emulated import EmulatedDevice

    from .cases import Cell

T = TypeVar("T")
GRACE = 1.0
"""Seconds that a call may outlive its deadline."""
PATIENCE = 10.0
"""Deadline where nothing is wrong: the machine may be busy."""
CACHED = ("dram", "lease", "prefetch")
"""Moments at which the store has DRAM, which is empty of what was stored before."""
BEFORE = range(4)
"""Chunks that are stored before the fault."""


class _Exceptions(logging.Handler):
    """Notes exceptions that kvtier caught and only logged, unless they became an outcome."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__()
        self._problems = problems

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and "refused a batch" not in record.msg:
            self._problems.append(f"logged: {record.getMessage()}: {record.exc_info[1]!r}")


class Scene:
    """One store of one cell, and what went wrong with it."""

    store: kvtier.Store

    def __init__(self, cell: Cell, device: EmulatedDevice, seed: object) -> None:
        self.cell = cell
        self.device = device
        self.paths: list[Path] = [path / "store" for path in device.paths]
        """One, or where several matter two; the fault strikes the last."""
        self.rng = random.Random(f"{cell.id} {seed}")
        self.problems: list[str] = []
        self.promised: set[int] = set()
        """Chunks that were reported to be on disk."""
        self.room = 0
        """How much is left of what the fault makes scarce."""
        self.undo: list[Callable[[], None]] = []
        self.lent: list[Any] = []
        """Memory that the device may still write to."""
        threading.excepthook = lambda args: self.problems.append(f"a thread died: {args.exc_value!r}")
        log = logging.getLogger("kvtier")
        log.handlers = [_Exceptions(self.problems)]
        log.propagate = False

    @property
    def struck(self) -> int | None:
        """The device that the fault strikes, if there are several."""
        return len(self.paths) - 1 if len(self.paths) > 1 else None

    @property
    def new(self) -> range:
        """Chunks that are put while the fault lasts."""
        return range(100, 100 + self.cell.case.chunks)

    def open(self, **changes: Any) -> None:
        """Raises what kvtier.open raises."""
        dram = SMALL["dram"] if self.cell.moment in CACHED else 0
        settings = {
            **SMALL,
            "kind": self.cell.kind,
            **self.engine_settings,
            "dram": dram,
            "close_timeout": 3.0,
            **changes,
        }
        if self.cell.moment in ("dram", "flush"):
            settings["put_timeout"] = self.cell.case.timeout
        self.store = kvtier.open(self.paths, **settings)

    @property
    def engine_settings(self) -> dict[str, Any]:
        return {"engine": self.cell.engine.removesuffix("-python"), **self.cell.case.settings}

    def try_open(self) -> str:
        """Open within the case's timeout, or be told why not."""
        start, timeout = time.monotonic(), self.cell.case.timeout
        try:
            self.open(open_timeout=timeout)
            seen = "opened"
        except Exception as error:
            if not isinstance(error, kvtier.KVTierError):
                self.problems.append(describe(error))
            seen = type(error).__name__
        if (took := time.monotonic() - start) > timeout + GRACE:
            self.problems.append(f"open took {took:.1f} s, more than {timeout + GRACE:g}")
        return seen

    def open_when_let_go(self) -> None:
        """Open again, once an opening that was given up has ended, which holds the lock till then."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                return self.open()
            except kvtier.StoreInUse:
                if time.monotonic() > end:
                    raise
            time.sleep(0.05)

    def wait_for_paths(self) -> None:
        """A path that was taken out is tried again after a second, by whoever asks."""

        def all_work() -> bool:
            self.get(BEFORE)
            return not any(path.health.is_down for path in self.store._core.paths)

        if not _comes_true(all_work, PATIENCE):
            self.problems.append("a path stays out")

    def start_put(
        self, chunks: Iterable[int], timeout: float, until: Until = "disk"
    ) -> Transfer[kvtier.BatchResult]:
        keys = [numbered_key(i) for i in chunks]
        return self.store.put(keys, [random_payload(i) for i in chunks], until=until, timeout=timeout)

    def put_in_dram(self, chunks: range, timeout: float) -> list[str]:
        """No promise of a disk: what the device does must not be seen."""
        return _outcomes(self.wait(self.start_put(chunks, timeout, "dram"), timeout))

    def put(self, chunks: range | list[int], timeout: float = PATIENCE, meanwhile: Any = None) -> list[str]:
        transfer = self.start_put(chunks, timeout)
        if meanwhile:
            meanwhile(self)
        return self.note_put(chunks, self.wait(transfer, timeout))

    def note_put(self, chunks: range | list[int], result: kvtier.BatchResult | None) -> list[str]:
        """The outcomes, and the promises among them."""
        outcomes = _outcomes(result)
        self.promised |= {i for i, seen in zip(chunks, outcomes, strict=False) if seen in ("stored", "known")}
        return outcomes

    def get(self, chunks: range | list[int], timeout: float = PATIENCE, meanwhile: Any = None) -> list[str]:
        """The outcomes; a hit with other bytes than were put is a problem."""
        targets = np.zeros((len(chunks), CHUNK), np.uint8)
        transfer = self.store.get([numbered_key(i) for i in chunks], into=targets, timeout=timeout)
        if meanwhile:
            meanwhile(self)
        return self._compared(chunks, self.wait(transfer, timeout), targets)

    def lend(self, chunks: range, timeout: float, meanwhile: Any = None) -> list[str]:
        """The same into memory that the device writes to; it may, as long as it is not released."""
        targets = np.frombuffer(mmap.mmap(-1, len(chunks) * CHUNK), np.uint8).reshape(-1, CHUNK)
        self.lent.append(targets)
        transfer = self.store.get([numbered_key(i) for i in chunks], into=targets, timeout=timeout, lend=True)
        if meanwhile:
            meanwhile(self)
        return self._compared(chunks, self.wait(transfer, timeout), targets)

    def lease(self, chunks: range, timeout: float, meanwhile: Any = None) -> list[str]:
        """The same as views of slots."""
        transfer = self.store.read([numbered_key(i) for i in chunks], timeout=timeout)
        if meanwhile:
            meanwhile(self)
        lease = self.wait(transfer, timeout)
        if lease is None:
            return ["unresolved"]
        with lease:
            return self._compared(chunks, lease.result, lease.views)

    def prefetch(self, chunks: range, timeout: float, meanwhile: Any = None) -> list[str]:
        """The same into DRAM, and from there."""
        transfer = self.store.prefetch([numbered_key(i) for i in chunks], timeout=timeout)
        if meanwhile:
            meanwhile(self)
        seen = _outcomes(self.wait(transfer, timeout))
        there = [i for i, outcome in zip(chunks, seen, strict=False) if outcome == "hit"]
        self.expect("get of what was prefetched", self.get(there) if there else ["hit"], "hit")
        return seen

    def _compared(self, chunks: Iterable[int], result: Any, targets: Iterable[Any]) -> list[str]:
        outcomes = _outcomes(result)
        for i, target, seen in zip(chunks, targets, outcomes, strict=False):
            if seen == "hit" and not (target == random_payload(i)).all():
                self.problems.append(f"WRONG BYTES for chunk {i}")
        return outcomes

    def on_path(self, number: int, chunks: range) -> list[int]:
        """The chunks that a path holds."""
        tier = self.store._core.paths[number].tier
        return [i for i in chunks if tier.find(numbered_key(i)) >= 0]

    def flush(self, timeout: float = PATIENCE, meanwhile: Any = None) -> list[str]:
        transfer = self.store.flush()
        if meanwhile:
            meanwhile(self)
        result = self.wait(transfer, timeout)
        return ["unresolved" if result is None else "synced" if result.synced else "not synced"]

    def wait(self, transfer: Transfer[T], timeout: float) -> T | None:
        try:
            return transfer.result(timeout + GRACE)
        except NotInTime:
            self.problems.append(f"a call was not over {GRACE:g} s after its deadline")
            return None

    def expect(self, what: str, seen: Iterable[str], allowed: str) -> None:
        """Note outcomes that are not among those allowed, or that there are none."""
        seen = list(seen) or ["nothing"]
        if wrong := sorted(set(seen) - set(allowed.split(", "))):
            self.problems.append(f"{what}: {', '.join(wrong)}; expected {allowed}")

    def end_fault(self) -> None:
        while self.undo:
            self.undo.pop()()
        if self.cell.case.ends:
            self.device.clear_faults()

    def check_all_works(self, chunks: list[int]) -> None:
        """Put the same keys and get the right bytes; the counters add up, and nothing is pinned."""
        self.expect("put again", self.put(chunks), "stored, known")
        self.expect("get again", self.get(chunks), "hit")
        stats = self.store.stats()
        reasons = [reason.name.lower() for reason in Reason if reason]
        for kind, good in (("get", ("dram.hits", "disk.hits")), ("put", ("put.stored", "put.known"))):
            counted = sum(int(stats[name]) for name in (*good, *(f"{kind}.{name}" for name in reasons)))
            if stats[f"{kind}.requested"] != counted:
                self.problems.append(f"{kind} counters: {stats[f'{kind}.requested']} asked, {counted} told")
        if not _comes_true(lambda: not self._pinned()):
            self.problems.append(f"pinned: {self._pinned()}")

    def _pinned(self) -> list[str]:
        return [name for name, n in self.store.stats().items() if name.endswith("pinned_slots") and n]

    def close(self) -> None:
        """Close in time, and leave no thread and no descriptor."""
        start = time.monotonic()
        self.store.close()
        self.check_closing_time(start)
        self.check_leaks()

    def check_closing_time(self, start: float) -> None:
        took, allowed = time.monotonic() - start, self.store.config.close_timeout + GRACE
        if took > allowed:
            self.problems.append(f"close took {took:.1f} s, more than {allowed:g}")

    def check_leaks(self) -> None:
        for what, find in (("threads", _threads), ("descriptors", self._descriptors)):
            if not _comes_true(lambda find=find: not find()):  # type: ignore[misc]
                self.problems.append(f"{what} left: {', '.join(find())}")

    def _descriptors(self) -> list[str]:
        links = (_read_link(link) for link in Path("/proc/self/fd").iterdir())
        return [link for link in links if any(link.startswith(f"{path}/") for path in self.paths)]


def describe(error: Exception) -> str:
    """An exception, and the line of kvtier that it comes from."""
    places = traceback.extract_tb(error.__traceback__)
    place = next((p for p in reversed(places) if "/kvtier/" in p.filename), places[-1])
    return f"{type(error).__name__} raised: {error} ({place.filename.split('/kvtier/')[-1]}:{place.lineno})"


def _outcomes(result: kvtier.BatchResult | None) -> list[str]:
    if result is None:
        return ["unresolved"]
    return [
        Status(status).name.lower() + (f" {Reason(reason).name.lower()}" if reason else "")
        for status, reason in zip(result.status.tolist(), result.reason.tolist(), strict=True)
    ]


def _threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    for task in Path("/proc/self/task").glob("*/comm"):
        try:
            names.append(task.read_text().strip())
        except OSError:
            continue  # it ended meanwhile
    return sorted({name for name in names if name.startswith("kvtier")})


def _read_link(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""  # the listing's own


def _comes_true(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
