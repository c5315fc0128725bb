"""Invariant 6: `kill -9` at any moment. What was reported on disk is found, and nothing else is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import kvtier
from kvtier import Reason, Status
from kvtier.io import uring_obstacle

if TYPE_CHECKING:
    from pathlib import Path

KIB, MIB = 1 << 10, 1 << 20
LARGE = [64 * KIB, 4096, 100 * KIB, 5000, 192 * KIB]
SMALL = [4096, 5000, 1, 8192, 12 * KIB]

WORKER = """
import json, os, random, sys
import numpy as np
from pathlib import Path
from kvtier.config import StoreConfig
from kvtier.store.store import Store

path, seed, sizes, settings = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4])
live = json.loads(sys.stdin.readline())  # numbers that are stored
first = json.loads(sys.stdin.readline())
rng = random.Random(seed)
key = lambda i: i.to_bytes(32, "little")
def payload(i):
    n = sizes[i % len(sizes)]
    return np.random.Generator(np.random.SFC64(i)).bytes(n)
store = Store(StoreConfig(path=Path(path), **settings))
say = lambda word, numbers: os.write(1, (word + json.dumps(numbers) + "\\n").encode())
say("open", [])
number, pending = first, []
most = int(sys.argv[5])
while True:
    what = rng.random()
    if what < 0.6:
        numbers = list(range(number, number + rng.randint(1, 12)))
        number = numbers[-1] + 1
        say("try", numbers)
        until = rng.choice(["disk", "disk", "dram"])
        payloads = [payload(i) for i in numbers]
        pending.append((numbers, until, store.put([key(i) for i in numbers], payloads, until=until)))
        if len(pending) > 3:
            numbers, until, transfer = pending.pop(0)
            result = transfer.result(30)
            assert result.ok, result
            if until == "disk":
                say("disk", numbers)
            live += numbers
    elif what < 0.7 and pending:
        numbers = [i for p, _, _ in pending for i in p]
        flushed = store.flush().result(30)
        assert flushed.synced and not flushed.failed
        say("disk", numbers)
    elif what < 0.8:
        for numbers, _, transfer in pending:
            assert transfer.result(30).ok
            live += numbers
        pending = []
        assert store.flush().result(30).failed == 0
        say("disk", live[-40:])
    elif live:
        some = rng.sample(live, min(len(live), 6))
        targets = [bytearray(sizes[i % len(sizes)]) for i in some]
        result = store.get([key(i) for i in some], into=targets).result(30)
        assert result.ok, result
        assert all(bytes(t) == payload(i) for i, t in zip(some, targets))
    while len(live) > most or (live and rng.random() < 0.1):
        some, live = live[:8], live[8:]
        say("deleting", some)
        store.delete([key(i) for i in some]).result(30)
        say("deleted", some)
"""


def number_key(i: int) -> kvtier.ChunkKey:
    return kvtier.ChunkKey(i.to_bytes(32, "little"))


def content(i: int, nbytes: int) -> bytes:
    return np.random.Generator(np.random.SFC64(i)).bytes(nbytes)


class Crashes:
    """Kills a worker on one directory again and again, and knows what must be there afterwards."""

    def __init__(self, path: Path, settings: dict[str, Any], sizes: list[int], most: int) -> None:
        self.path = path
        self.settings = settings
        self.sizes = sizes
        self.journals: set[int] = set()  # every file that was seen as the journal
        self.most = most  # chunks alive at once, so that the disk never has to evict
        self.safe: set[int] = set()  # must be there
        self.gone: set[int] = set()  # must not
        self.maybe: set[int] = set()  # may be there, or not
        self.next = 0

    def run(self, seed: int, engine: str, lifetime: float) -> None:
        settings = {**self.settings, "engine": engine}
        live = sorted(self.safe)
        worker = subprocess.Popen(
            [sys.executable, "-P", "-c", WORKER, str(self.path), str(seed), json.dumps(self.sizes),
             json.dumps(settings), str(self.most)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write(f"{json.dumps(live)}\n{self.next}\n".encode())
            worker.stdin.flush()
            end = None
            while end is None or time.monotonic() < end:
                if end is None:
                    line = worker.stdout.readline()
                    assert line == b"open[]\n", worker.communicate(timeout=10)[1].decode()
                    end = time.monotonic() + lifetime
                    os.set_blocking(worker.stdout.fileno(), False)
                    rest = b""
                with contextlib.suppress(BlockingIOError):
                    rest += os.read(worker.stdout.fileno(), 1 << 20)
                assert self.bytes_on_disk() <= self.settings["capacity"], "invariant 5"
                assert worker.poll() is None, worker.communicate(timeout=10)[1].decode()
                time.sleep(0.001)
            worker.send_signal(signal.SIGKILL)
            worker.wait(10)
            os.set_blocking(worker.stdout.fileno(), True)
            rest += worker.stdout.read()
        finally:
            worker.kill()
            worker.communicate()
        for line in rest.split(b"\n")[:-1]:
            self.note(line.decode())

    def note(self, line: str) -> None:
        word, _, numbers = line.partition("[")
        some = set(json.loads("[" + numbers))
        if word == "try":
            self.maybe |= some
            self.next = max(self.next, max(some) + 1)
        elif word == "disk":
            self.safe |= some - self.gone
            self.maybe -= some
        elif word == "deleting":
            self.safe -= some
            self.maybe |= some
        else:
            assert word == "deleted"
            self.maybe -= some
            self.gone |= some

    def size(self, i: int) -> int:
        return self.sizes[i % len(self.sizes)]

    def bytes_on_disk(self) -> int:
        total = 0
        for name in ("slab", "journal", "journal.new"):
            with contextlib.suppress(FileNotFoundError):
                status = (self.path / name).stat()
                total += status.st_size
                if name == "journal":
                    self.journals.add(status.st_ino)
        return total

    def check(self) -> None:
        """Open, and compare everything there with what was reported. Leaves only what is known."""
        with kvtier.open(self.path, **self.settings) as store:
            assert store.stats()["disk.evictions"] == 0
            numbers = sorted(self.safe | self.maybe | self.gone)
            keys = [number_key(i) for i in numbers]
            there = {i for i, key in zip(numbers, keys, strict=True) if store.match([key])}
            assert self.safe <= there, f"lost: {sorted(self.safe - there)}"
            assert not there & self.gone, f"deleted, and back: {sorted(there & self.gone)}"
            found = sorted(there)
            targets = [np.empty(self.size(i), np.uint8) for i in found]
            result = store.get([number_key(i) for i in found], into=targets).result(30)
            for i, target, status, reason in zip(
                found, targets, result.status.tolist(), result.reason.tolist(), strict=True
            ):
                if status == Status.HIT:
                    assert target.tobytes() == content(i, self.size(i)), f"wrong bytes under {i}"
                else:
                    assert i not in self.safe
                    assert (status, reason) == (Status.MISS, Reason.CHECKSUM)
            unsure = sorted(there - self.safe)
            store.delete([number_key(i) for i in unsure]).result(30)
            self.gone |= set(unsure)
        self.gone = set(sorted(self.gone)[-300:])
        self.maybe.clear()
        assert self.bytes_on_disk() <= self.settings["capacity"]


def engines() -> list[str]:
    return ["threads"] if uring_obstacle() else ["uring", "threads"]


COMMON = {"part_bytes": 64 * KIB, "io_threads": 2}


def test_invariant_6_kills_under_load(tmp_path: Path) -> None:
    """Half of the fifty kills, with chunks of up to three parts through the landing slots."""
    settings = {**COMMON, "capacity": 48 * MIB, "dram": 0, "landing": 4 * MIB, "chunk_bytes": 256 * KIB}
    crashes = Crashes(tmp_path / "store", settings, LARGE, most=150)
    kill(crashes, 25)


def test_invariant_6_kills_while_the_journal_is_rewritten(tmp_path: Path) -> None:
    """The other half, with small chunks and a small journal, which is rewritten again and again."""
    settings = {**COMMON, "capacity": 2 * MIB, "dram": MIB, "landing": MIB, "chunk_bytes": 16 * KIB}
    crashes = Crashes(tmp_path / "store", settings, SMALL, most=100)
    kill(crashes, 25)
    for _ in range(10):  # a slow machine writes less between two kills
        if len(crashes.journals) <= 10:
            kill(crashes, 5)
    assert len(crashes.journals) > 10, "the journal was hardly ever rewritten"


def kill(crashes: Crashes, times: int) -> None:
    rng = random.Random(times)
    for i in range(times):
        crashes.run(i, rng.choice(engines()), rng.uniform(0.0, 0.25))
        crashes.check()
    assert crashes.next > 500, "the workers did hardly anything"
