"""Processes that use a store and tell what they were promised, until they are killed, or kill themselves.

Run as a script, with an order a line on stdin, JSON: paths, settings, sizes, seed, step (a name in STEPS or
null), first (the next unused number), live (numbers that are stored), most. Each order has a process of its
own, forked, which saves the imports. It writes lines of a word and numbers, between "pid" and "ended".
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from crash_steps import FILE_STEPS, STEPS, Step, arm
from kvtier import Owner, Status
from kvtier.config import StoreConfig
from kvtier.store.store import Store
from kvtier.tiers.files.catalog import Catalog
from kvtier.tiers.slab.tier import SlabTier

MOST_SECONDS = 40.0
MOST_IN_A_PUT = 12
_write = os.write  # the real one, whatever is armed


def number_key(i: int) -> Any:
    return i.to_bytes(32, "little")


def content(i: int, nbytes: int) -> bytes:
    """The bytes that belong to a number: of every second one they get smaller when encoded."""
    rng = np.random.Generator(np.random.SFC64(i))
    if i % 2:
        return rng.bytes(nbytes)
    return (rng.bytes(64) * (nbytes // 64 + 1))[:nbytes]


def owner_of(first: int) -> Owner:
    """Who owns the numbers of a put, by the first of them: a few puts have the same owner."""
    return Owner(bytes([first // 16 % 256]) * 32, str(first // 16))


class Teller:
    """Says what is promised, and what no longer is, in an order that holds."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._evicted: set[int] = set()

    def say(self, word: str, numbers: list[int]) -> None:
        with self._lock:
            if word == "disk":
                numbers = [i for i in numbers if i not in self._evicted]
            _write(1, (word + json.dumps(numbers) + "\n").encode())

    def evicted(self, number: int) -> None:
        with self._lock:
            self._evicted.add(number)
            self.say("evicting", [number])


class Load:
    """Puts, gets, deletes and flushes, drawn from a seed."""

    def __init__(self, store: Store, order: dict[str, Any], teller: Teller, rng: random.Random) -> None:
        self.store, self.sizes, self.rng = store, order["sizes"], rng
        self.say = teller.say
        self.number, self.live = order["first"], list(order["live"])
        step = _step(order)
        phase = step.phase if step else ""
        self.deletes = 0.0 if phase == "evict" else 0.4 if phase == "delete" else 0.15
        self.most = None if phase == "evict" else order["most"]
        self.pending: list[tuple[list[int], str, Any]] = []

    def size(self, i: int) -> int:
        return int(self.sizes[i % len(self.sizes)])

    def step(self) -> None:
        what = self.rng.random()
        if what < 0.65:
            self.put()
        elif what < 0.72:
            self.flush()
        elif what < 0.8:
            self.get()
        if len(self.pending) > self.rng.choice([0, 1, 3]):
            self.settle()
        while self.live and (self.rng.random() < self.deletes or (self.most and len(self.live) > self.most)):
            self.delete()

    def put(self) -> None:
        numbers = list(range(self.number, self.number + self.rng.randint(1, MOST_IN_A_PUT)))
        self.number = numbers[-1] + 1
        until = self.rng.choice(["disk", "disk", "dram"])
        self.say("try", numbers)
        payloads = [content(i, self.size(i)) for i in numbers]
        codec = self.rng.choice(["raw", "lz4"])
        keys = [number_key(i) for i in numbers]
        put = self.store.put(keys, payloads, until=until, codec=codec, owner=owner_of(numbers[0]), ttl=10**6)
        self.pending.append((numbers, until, put))

    def settle(self) -> None:
        """The oldest put: what it reports on disk is a promise."""
        numbers, until, transfer = self.pending.pop(0)
        status = transfer.result(30).status.tolist()
        stored = [i for i, s in zip(numbers, status, strict=True) if s == Status.STORED]
        self.live += stored
        if until == "disk":
            self.say("disk", stored)

    def flush(self) -> None:
        """With no failure reported since the last one, all that is waited for is a promise."""
        mine = len(self.pending)
        transfer = self.store.flush()
        stored = []
        for numbers, _, put in self.pending[:mine]:
            status = put.result(30).status.tolist()
            stored += [i for i, s in zip(numbers, status, strict=True) if s == Status.STORED]
        flushed = transfer.result(30)
        assert flushed.synced
        if not flushed.failed:
            self.say("disk", stored)

    def get(self) -> None:
        some = self.rng.sample(self.live, min(len(self.live), 6))
        targets = [bytearray(self.size(i)) for i in some]
        result = self.store.get([number_key(i) for i in some], into=targets).result(30)
        for i, target, status in zip(some, targets, result.status.tolist(), strict=True):
            assert status == Status.MISS or bytes(target) == content(i, self.size(i)), f"wrong bytes of {i}"

    def delete(self) -> None:
        some, self.live = self.live[:8], self.live[8:]
        self.say("deleting", some)
        self.store.delete([number_key(i) for i in some]).result(30)
        self.say("deleted", some)


def _step(order: dict[str, Any]) -> Step | None:
    return (STEPS | FILE_STEPS)[order["step"]] if order["step"] else None


def _most(step: Step, paths: int) -> int:
    """What is done once for each path cannot be waited for any longer."""
    return min(step.most, paths) if step.phase in ("open", "close") else step.most


def main() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                use(json.loads(line))
            except BaseException:
                _write(1, f"error {json.dumps(traceback.format_exc()[-3000:])}\n".encode())
            os._exit(1)
        _write(1, b"pid %d\n" % pid)
        _, status = os.waitpid(pid, 0)
        _write(1, b"ended %d\n" % os.waitstatus_to_exitcode(status))


def use(order: dict[str, Any]) -> None:
    """Open the store, use it, and come to the order's step, or go on until somebody ends this process."""
    rng = random.Random(order["seed"])
    step = _step(order)
    nth = rng.randint(1, _most(step, len(order["paths"]))) if step else 0
    teller = Teller()
    of_files = order["settings"].get("kind") == "files"
    holder, name = (Catalog, "_evicted") if of_files else (SlabTier, "_bury")
    bury = getattr(holder, name)

    def tell(tier: Any, row: int) -> None:
        teller.evicted(int.from_bytes(tier.index.key(row), "little"))
        bury(tier, row)

    setattr(holder, name, tell)
    if step and step.phase == "open":
        arm(step, nth, rng)
    store = Store(StoreConfig(paths=tuple(map(Path, order["paths"])), **order["settings"]))
    teller.say("open", [])
    if step and step.phase not in ("open", "close"):
        arm(step, nth, rng)
    load = Load(store, order, teller, rng)
    end = time.monotonic() + MOST_SECONDS
    rounds = 0
    while time.monotonic() < end and not (step and step.phase == "close" and rounds == 20):
        load.step()
        rounds += 1
    if step and step.phase == "close":
        arm(step, nth, rng)
        store.close()
    raise AssertionError(f"never came to {order['step']}")


if __name__ == "__main__":
    main()
