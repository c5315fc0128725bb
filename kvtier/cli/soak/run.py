"""The course of a soak: load with faults, quiet, judgement, and now and then a restart or a kill."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import kvtier
from kvtier.cli.soak.content import LARGEST, Contents, key_of
from kvtier.cli.soak.faults import FaultDice
from kvtier.cli.soak.watch import Sample, left_behind, sample
from kvtier.cli.soak.worker import HANG, Violation, Worker
from kvtier.config import MIB

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvtier.testing.emulated import EmulatedDevice

SETTINGS: dict[str, Any] = {
    "capacity": 32 * MIB, "dram": 8 * MIB, "landing": 4 * MIB, "chunk_bytes": LARGEST, "part_bytes": 64 << 10,
    "scrub": 1 << 40, "io_threads": 4, "get_timeout": 1.0, "put_timeout": 2.0, "close_timeout": 20.0,
}  # fmt: skip
_WORKERS = 3
_FILL = 1.1  # of the capacity: what all numbers take, beside the rounding to slots, so that some must go
_ROUND = 1.5  # seconds of load between two judgements
_HANG_LASTS = 6.0  # seconds: longer than any deadline
_KEPT_BY_CHILD = 8  # of what it stored last: the disk is large enough not to have evicted these


class Soak:
    """A store in `path`, under load until `seconds` are over. All choices follow from `seed`, as far as
    threads allow.
    """

    def __init__(
        self,
        path: Path,
        device: EmulatedDevice | None,
        seed: int,
        engine: str,
        kind: str = "slab",
        *,
        contents: Contents | None = None,
        is_new: bool = True,
        **settings: Any,
    ) -> None:
        """`settings` of the store replace SETTINGS; chunks are those of `contents`, and may be there already
        unless the store `is_new`.
        """
        self.path = path
        self.is_shared = kind == "files"
        self.settings = {**SETTINGS, "engine": engine, "kind": kind, **settings}
        self._contents = contents or Contents()
        if self.is_shared:
            del self.settings["scrub"]
        self.rng = random.Random(seed)
        self.dice = FaultDice(device, self.rng.randrange(1 << 30), kind) if device else None
        numbers = range(int(_FILL * self.settings["capacity"]) // self._contents.mean)
        self.workers = [
            Worker(numbers[w::_WORKERS], self.rng.randrange(1 << 30), self._contents) for w in range(_WORKERS)
        ]
        if not is_new:
            for worker in self.workers:
                worker.forget_deletes()
        self.counts: Counter[str] = Counter()
        self.samples: list[Sample] = []
        self._child_number = 1 << 20
        self._deletes_are_recorded = True

    def run(self, seconds: float, tell: Callable[[float], None]) -> None:
        """Raises Violation, at once."""
        start = time.monotonic()
        store = self._open()
        try:
            while (passed := time.monotonic() - start) < seconds:
                self._load(store)
                self._quiet(store)
                self.samples.append(sample(time.monotonic() - start))
                tell(passed)
                self.counts["rounds"] += 1
                if self.counts["rounds"] % 3 == 0:
                    is_killing = self.counts["reopens"] % 2 == 0
                    if is_killing and self.is_shared:
                        self._kill_a_child(store)
                    self._close(store, failing=self.rng.random() < 0.3)
                    if is_killing and not self.is_shared:
                        self._kill_a_child(None)
                    store = self._open()
                    self.counts["reopens"] += 1
        finally:
            if self.dice:
                self.dice.clear()
            store.close()

    def total(self) -> Counter[str]:
        """What was done, and what came of it."""
        return sum((worker.counts for worker in self.workers), self.counts.copy())

    def _open(self) -> kvtier.Store:
        return kvtier.open(self.path, **self.settings)

    def _load(self, store: kvtier.Store) -> None:
        """All workers at once; faults come and go, but for some rounds without any."""
        stop = threading.Event()
        broken: list[BaseException] = []

        def work(worker: Worker) -> None:
            try:
                worker.work(store, stop)
            except BaseException as error:
                broken.append(error)
                stop.set()

        threads = [threading.Thread(target=work, args=(worker,)) for worker in self.workers]
        disturb = self.dice is not None and self.rng.random() < 0.7
        for worker in self.workers:
            worker.disturbed = disturb
        for thread in threads:
            thread.start()
        end = time.monotonic() + _ROUND
        try:
            while time.monotonic() < end and not stop.is_set():
                kind = self._throw(self.dice) if disturb and self.dice else ""
                stop.wait(_HANG_LASTS if kind.startswith("hang") else self.rng.uniform(0.05, 0.6))
        finally:
            if self.dice:
                self.dice.clear()
            stop.set()
        for thread in threads:
            thread.join(2 * HANG)
            if thread.is_alive():
                raise Violation("a call hangs")
        if broken:
            raise broken[0]

    def _throw(self, dice: FaultDice) -> str:
        """Put a fault in force, or sometimes none. Returns its kind."""
        if dice.rng.random() < 0.3:
            dice.clear()
            return ""
        self._deletes_are_recorded = False
        kind = dice.throw()
        self.counts[f"fault.{kind}"] += 1
        return kind

    def _quiet(self, store: kvtier.Store) -> None:
        """With no fault in force: what failed works again, and every slot is back."""
        for worker in self.workers:
            worker.recover(store)
        gc.collect()
        end = time.monotonic() + HANG
        while pinned := self._pinned(store):
            if time.monotonic() > end:
                raise Violation(f"slots that are still pinned: {pinned}")
            time.sleep(0.01)

    def _pinned(self, store: kvtier.Store) -> dict[str, Any]:
        self.workers[0].finished(store.flush(), "flush")
        stats = store.stats()
        on_disk = 0
        for file in self.path.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                on_disk += file.stat().st_size if file.is_file() else 0
        if on_disk > self.settings["capacity"]:
            raise Violation(f"{on_disk} bytes on disk, and the capacity is {self.settings['capacity']}")
        return {name: n for name, n in stats.items() if name.endswith("pinned_slots") and n}

    def _close(self, store: kvtier.Store, *, failing: bool) -> None:
        if failing and self.dice and not self.dice.throw().startswith("hang"):
            self._deletes_are_recorded = False
            self.counts["closed while failing"] += 1
        elif self.dice:
            self.dice.clear()
        start = time.monotonic()
        store.close()
        if time.monotonic() - start > self.settings["close_timeout"] + HANG:
            raise Violation("close took for ever")
        if self.dice:
            self.dice.clear()
        if left := left_behind(self.path):
            raise Violation(f"left behind by a store that is closed: {left}")
        if not self._deletes_are_recorded:
            for worker in self.workers:
                worker.forget_deletes()
        self._deletes_are_recorded = True

    def _kill_a_child(self, store: kvtier.Store | None) -> None:
        """Another process stores chunks, and is killed: what it reported last must be there, in a store
        that is opened then, or in the one that shares the directory.
        """
        order = {
            "path": str(self.path), "settings": self.settings, "first": self._child_number,
            "scale": self._contents.scale,
        }  # fmt: skip
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvtier.cli.soak.child"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(order).encode() + b"\n")
        child.stdin.flush()
        first = child.stdout.readline()
        time.sleep(self.rng.uniform(0.0, 0.3))
        child.kill()
        rest, error = child.communicate(timeout=HANG)
        if not first:
            raise Violation(f"another process could not use the store: {error.decode()}")
        lines = (first + rest).split(b"\n")[:-1]
        stored = [i for line in lines for i in json.loads(line)]
        self.counts["kills"] += 1
        last = stored[-_KEPT_BY_CHILD:]
        tried = list(range(self._child_number, self._child_number + 4 * (len(lines) + 1)))
        self._child_number = tried[-1] + 1
        judge = Worker(tried, 0, self._contents)
        judge.forget_deletes()
        with contextlib.nullcontext(store) if store else self._open() as store:
            end = time.monotonic() + HANG
            while missing := set(last) - set(judge.get(store, last)):
                if self.is_shared and time.monotonic() < end:
                    time.sleep(0.1)  # what others do is seen a little later
                    continue
                raise Violation(f"lost by a kill: {sorted(missing)} of {last}")
            for at in range(0, len(tried), 8):
                judge.get(store, tried[at : at + 8])
                judge.finished(store.delete(list(map(key_of, tried[at : at + 8]))), "delete")
