"""Kills a worker on one store again and again, and judges what is found afterwards."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import kvtier
from crash_worker import MOST_IN_A_PUT, content, number_key, owner_of
from kvtier import Reason, Status
from kvtier.cli.verify import verify
from kvtier.config import StoreConfig
from kvtier.io import open_engine, uring_obstacle
from kvtier.tiers.slab import inspection
from small_stores import bytes_on_disk

KIB, MIB = 1 << 10, 1 << 20
_WORKER = Path(__file__).with_name("crash_worker.py")


def engines() -> list[str]:
    return ["threads"] if uring_obstacle() else ["uring", "threads"]


class _Worker:
    """The process that forks those that are killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(_WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._said = self._process.stdin, self._process.stdout
        os.set_blocking(self._said.fileno(), False)

    def write(self, order: dict[str, Any]) -> None:
        self._orders.write(json.dumps(order).encode() + b"\n")
        self._orders.flush()

    def read(self) -> bytes:
        """What was said since."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            while more := os.read(self._said.fileno(), 1 << 20):
                data += more
        assert data or self._process.poll() is None, "the worker is gone"
        return data

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@functools.cache
def _worker() -> _Worker:
    worker = _Worker()
    atexit.register(worker.end)
    return worker


class Crashes:
    """A store in `paths`, and a model of what must be in it.

    What was reported on disk, by a put or a flush, and has not begun to be evicted or deleted since is
    `safe`; what a finished delete took is `gone`; of all else either is right, but only its own bytes.
    """

    def __init__(self, paths: list[Path], settings: dict[str, Any], sizes: list[int], most: int) -> None:
        self.paths = paths
        self.settings = settings
        self.sizes = sizes
        self.most = most  # chunks alive at once where the load deletes
        self.journals: set[int] = set()  # every file that was seen as a journal
        self.kills = 0
        self.forget()

    def forget(self) -> None:
        """Begin with no store at all."""
        for path in self.paths:
            shutil.rmtree(path, ignore_errors=True)
        self.safe: set[int] = set()
        self.gone: set[int] = set()
        self.maybe: set[int] = set()
        self.next = 0

    def grow(self) -> None:
        """Have the next opening rewrite all headers."""
        self.settings = {**self.settings, "capacity": self.settings["capacity"] + 4096 * len(self.paths)}

    def run(self, seed: int, engine: str, *, step: str | None = None, lifetime: float = 60.0) -> None:
        """Let a worker live until it comes to `step`, or for `lifetime` seconds after it opened the store."""
        order = {
            "paths": list(map(str, self.paths)), "settings": {**self.settings, "engine": engine},
            "sizes": self.sizes, "seed": seed, "step": step, "first": self.next,
            "live": sorted(self.safe), "most": self.most,
        }  # fmt: skip
        said, pid, end, opened = b"", 0, time.monotonic() + 60, False
        worker = _worker()
        worker.write(order)
        late = False
        while not (ended := re.search(rb"^ended (-?\d+)\n", said, re.MULTILINE)):
            said += worker.read()
            if not pid and (found := re.search(rb"^pid (\d+)\n", said, re.MULTILINE)):
                pid = int(found[1])
            if not opened and b"open[]\n" in said:
                opened, end = True, time.monotonic() + lifetime
            assert self.bytes_on_disk() <= self.settings["capacity"], "invariant 5"
            if pid and not late and time.monotonic() > end:
                late = True
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)
        what = said.decode()
        assert ended[1] == b"-9", f"it ended by itself: {what[-4000:]}"
        assert opened or not late, "opening takes for ever"
        assert not (step and late), f"it never came to {step!r}"
        self.kills += 1
        for line in what.splitlines():
            if line.endswith("]"):
                self._note(line)

    def _note(self, line: str) -> None:
        word, _, numbers = line.partition("[")
        some = set(json.loads("[" + numbers))
        if word == "try":
            self.maybe |= some
            self.next = max(self.next, max(some) + 1)
        elif word == "disk":
            self.safe |= some - self.gone
            self.maybe -= some
        elif word in ("deleting", "evicting"):
            self.safe -= some
            self.maybe |= some - self.gone
        elif word == "deleted":
            self.maybe -= some
            self.gone |= some

    def size(self, i: int) -> int:
        return self.sizes[i % len(self.sizes)]

    def bytes_on_disk(self) -> int:
        for path in self.paths:
            with contextlib.suppress(FileNotFoundError):
                self.journals.add((path / "journal").stat().st_ino)
        return sum(map(bytes_on_disk, self.paths))

    def check(self) -> None:
        """Judge the files, open them, judge what the store serves, and add chunks for the next time."""
        self._check_files()
        with kvtier.open(self.paths, **{**self.settings, "dram": 0}) as store:  # what it has is on disk
            assert store.stats()["disk.evictions"] == 0
            there = self._check_content(store)
            unsure = sorted(there - self.safe)
            store.delete([number_key(i) for i in unsure]).result(30)
            self.gone |= set(unsure)
            self._add(store)
        for path in self.paths:
            verify(path)  # exits where anything is bad
        self.gone = set(sorted(self.gone)[-300:])
        self.maybe.clear()
        assert self.bytes_on_disk() <= self.settings["capacity"]

    def _check_files(self) -> None:
        """A killed process loses nothing it wrote: every record that is whole has its payload."""
        for path in self.paths:
            if not (path / "journal").exists():
                continue
            found = inspection.inspect(path)
            assert not found.recovered.damaged, found.faults
            self._check_owners(found)
            if not found.slab_is_ours:
                assert not len(found.recovered.chunks)
                continue
            engine = open_engine(StoreConfig(paths=(path,)))
            try:
                bad = [chunk for _, wrong in inspection.verify(found, engine) for chunk in wrong]
            finally:
                engine.close(10)
            assert not bad, bad

    def _check_owners(self, found: inspection.Inspection) -> None:
        """Every chunk that a worker put has its owner, whose name was written before it."""
        for chunk in found.recovered.chunks:
            number, owner = int.from_bytes(chunk["key"].tobytes(), "little"), int(chunk["owner"])
            if owner:
                names = {owner_of(first).name for first in range(max(0, number - MOST_IN_A_PUT), number + 1)}
                assert found.recovered.owners[owner] in names
                assert chunk["expires_at"] - chunk["stored_at"] in (10**6, 10**6 + 1)

    def _check_content(self, store: kvtier.Store) -> set[int]:
        numbers = sorted(self.safe | self.maybe | self.gone)
        there = {i for i in numbers if store.match([number_key(i)])}
        assert self.safe <= there, f"lost: {sorted(self.safe - there)}"
        assert not there & self.gone, f"deleted, and back: {sorted(there & self.gone)}"
        stats = store.stats()
        assert stats["disk.chunks"] == len(there), "chunks that nobody put"
        found = sorted(there)
        targets = [np.empty(self.size(i), np.uint8) for i in found]
        result = store.get([number_key(i) for i in found], into=targets).result(30)
        for i, target, status, reason in zip(
            found, targets, result.status.tolist(), result.reason.tolist(), strict=True
        ):
            assert (status, reason) == (Status.HIT, Reason.NONE), f"{i} is there, and cannot be read"
            assert target.tobytes() == content(i, self.size(i)), f"wrong bytes under {i}"
        return there

    def _add(self, store: kvtier.Store) -> None:
        numbers = list(range(self.next, self.next + 10))
        self.next += 10
        payloads = [content(i, self.size(i)) for i in numbers]
        store.put([number_key(i) for i in numbers], payloads, until="disk", codec="lz4").result(30)
        known = self.safe | set(numbers)
        self.safe = {
            i for i in known if store.match([number_key(i)])
        }  # they may have made room for each other
        self.maybe |= known - self.safe
