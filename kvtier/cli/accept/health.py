"""Blocks spread over a file: written, read back and compared, without the store in between."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.config import MIB, PAGE

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

BLOCK = MIB
_IN_FLIGHT = 16
_POOL = 8  # blocks of random bytes, which every block is one of, but for a mark in each page
_PATIENCE = 30.0  # seconds without any progress after which what is in flight counts as hung


@dataclass(slots=True)
class Pass:
    """One pass over all blocks."""

    nbytes: int = 0
    """Bytes of the blocks that were done without an error."""
    seconds: float = 0.0
    errors: int = 0
    wrong: int = 0
    """Blocks that were read without an error, and were not what was written."""
    hung: int = 0
    said: dict[str, int] = field(default_factory=dict)
    """Errors by their words."""

    @property
    def gb_s(self) -> float:
        """10**9 bytes a second."""
        return self.nbytes / 1e9 / self.seconds if self.seconds else 0.0


class Blocks:
    """`count` blocks of 1 MiB, one at random in each equal share of `capacity` bytes of the file `fd`.

    A device that hangs is waited for as long as `patience` seconds, and its threads are left to it: then
    `fd` is theirs for good.
    """

    def __init__(self, fd: int, capacity: int, count: int, seed: int, *, patience: float = _PATIENCE) -> None:
        draw = random.Random(seed)
        places = capacity // BLOCK
        count = min(count, places)
        edges = [places * i // count for i in range(count + 1)]
        self._offsets = [BLOCK * draw.randrange(first, end) for first, end in itertools.pairwise(edges)]
        # The ends are where sizes that are not true show.
        self._offsets[0], self._offsets[-1] = 0, BLOCK * (places - 1)
        self._fd, self._patience = fd, patience
        self._gave_up = threading.Event()
        pool = np.random.default_rng(seed).integers(0, 2**64, _POOL * BLOCK // 8, np.uint64)
        self._pages = np.arange(0, BLOCK, PAGE).astype(np.uint64)
        self._pool = pool.reshape(_POOL, BLOCK // PAGE, PAGE // 8)

    def __len__(self) -> int:
        return len(self._offsets)

    def write(self) -> Pass:
        """Write all of them and sync."""

        def write(memory: npt.NDArray[np.uint64], i: int) -> bool:
            self._fill(memory, i)
            done = os.pwrite(self._fd, memory.data.cast("B"), self._offsets[i])
            if done != BLOCK:
                raise OSError(f"wrote {done} bytes of {BLOCK}")
            return True

        return self._each(write, then=lambda: os.fsync(self._fd))

    def read(self, *, compare: bool) -> Pass:
        """Read all of them; with `compare` also look at every byte, which takes time."""

        def read(memory: npt.NDArray[np.uint64], i: int) -> bool:
            done = os.preadv(self._fd, [memory.data.cast("B")], self._offsets[i])
            if done != BLOCK:
                raise OSError(f"read {done} bytes of {BLOCK}")
            if not compare:
                return True
            expected = np.empty_like(memory)
            self._fill(expected, i)
            return bool(np.array_equal(memory, expected))

        return self._each(read)

    def _fill(self, memory: npt.NDArray[np.uint64], i: int) -> None:
        """Every page says where it belongs, so that none can stand for another."""
        memory[:] = self._pool[i % _POOL]
        memory[:, 0] ^= np.uint64(self._offsets[i]) + self._pages

    def _each(
        self,
        work: Callable[[npt.NDArray[np.uint64], int], bool],
        then: Callable[[], object] = lambda: None,
    ) -> Pass:
        outcome = Pass()
        left = iter(range(len(self)))
        lock = threading.Lock()
        progress = begin = time.perf_counter()

        def run() -> None:
            nonlocal progress
            memory = np.frombuffer(mmap.mmap(-1, BLOCK), np.uint64).reshape(-1, PAGE // 8)
            while True:
                with lock:
                    i = next(left, None)
                if i is None or self._gave_up.is_set():
                    return
                self._one(work, memory, i, outcome, lock)
                progress = time.perf_counter()

        self._wait([threading.Thread(target=run, daemon=True) for _ in range(_IN_FLIGHT)], outcome,
                   lambda: progress)  # fmt: skip
        syncing = threading.Thread(target=self._guard, args=(then, outcome, lock), daemon=True)
        progress = time.perf_counter()
        self._wait([syncing], outcome, lambda: progress)
        outcome.seconds = time.perf_counter() - begin
        return outcome

    def _one(self, work: Any, memory: Any, i: int, outcome: Pass, lock: threading.Lock) -> None:
        def run() -> None:
            right = work(memory, i)
            with lock:
                outcome.nbytes += BLOCK
                outcome.wrong += not right

        self._guard(run, outcome, lock)

    @staticmethod
    def _guard(work: Callable[[], object], outcome: Pass, lock: threading.Lock) -> None:
        try:
            work()
        except OSError as error:
            with lock:
                outcome.errors += 1
                words = error.strerror or str(error)
                outcome.said[words] = outcome.said.get(words, 0) + 1

    def _wait(self, threads: list[threading.Thread], outcome: Pass, progress: Callable[[], float]) -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.05)
                if time.perf_counter() - progress() > self._patience:
                    self._gave_up.set()
                    outcome.hung += sum(map(threading.Thread.is_alive, threads))
                    return
