"""kvtier's own rows: slabs read through `Store`."""

from __future__ import annotations

import importlib.util
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvtier.cli.bench.data import check, open_store
from kvtier.cli.bench.measure import Contender, Meter
from kvtier.config import MIB
from kvtier.io import uring_obstacle

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

    import kvtier
    from kvtier.cli.bench.data import Data
    from kvtier.cli.bench.measure import Sample
    from kvtier.cli.bench.options import EngineName
    from kvtier.cli.bench.place import ReadCounter

_POPULATE_TIMEOUT = 120.0
_READ_TIMEOUT = 600.0
_LATENCY_BYTES = 64 * MIB  # in flight on each device


def engines(chosen: Sequence[EngineName]) -> tuple[list[str], dict[str, str]]:
    """The engines to measure, of those chosen or of all; and by row why one is absent."""
    absent = {}
    found = []
    for name in ("uring", "threads", "aio"):
        if chosen and name not in chosen:
            absent[f"kvtier-{name}"] = "not asked for"
        elif name == "aio" and importlib.util.find_spec("aiofiles") is None:
            absent["kvtier-aio"] = "aiofiles is not installed: pip install 'kvtier[aio]'"
        elif name == "uring" and (obstacle := uring_obstacle()):
            absent["kvtier-uring"] = obstacle
        else:
            found.append(name)
    return found, absent


def wait_until_populated(store: kvtier.Store) -> None:
    """Have the arenas backed by memory and registered before anything is measured."""
    store._core.wait_until_populated(_POPULATE_TIMEOUT)


class StoreReads:
    """A pass through `Store`: all chunks in one call, into the caller's memory or leased.

    A call has one outcome, so its chunks have no latencies. Those are from a second pass: a call per
    chunk, 64 MiB of them in flight on each device. Leases go without: to
    back DRAM for all chunks with memory once more would take longer than all other passes.
    """

    def __init__(
        self,
        data: Data,
        memory: npt.NDArray[np.uint8],
        counter: ReadCounter,
        *,
        engine: str,
        leased: bool,
        io_window: int | None = None,
    ) -> None:
        """`io_window` bytes in flight, or as many as the store decides."""
        self._data = data
        self._memory = memory
        self._counter = counter
        self._engine = engine
        self._leased = leased
        self._settings = data.amount.settings() | ({} if io_window is None else {"io_window": io_window})

    def contender(self) -> Contender:
        """The row."""
        if self._leased:
            return Contender(
                f"kvtier-{self._engine}-leased", self.run, "slab, leased; latencies not measured"
            )
        detail = "slab, into lent memory; latencies of a call per chunk, 64 MiB of them in flight"
        return Contender(f"kvtier-{self._engine}", self.run, detail)

    def run(self) -> Sample:
        """One pass for bandwidth and CPU, and one for latencies."""
        sample = self.bandwidth()
        if self._leased:
            return sample
        with self._open() as store:
            return replace(sample, latencies_s=self._latencies(store))

    def bandwidth(self) -> Sample:
        """The pass for bandwidth and CPU alone."""
        with self._open() as store, Meter(self._counter, self._data.amount.nbytes) as meter:
            self._finish([self._start(store, range(self._data.amount.chunks))])
        return meter.sample()

    @contextmanager
    def _open(self) -> Iterator[kvtier.Store]:
        """A store with nothing in DRAM; afterwards the memory is checked."""
        data, amount = self._data, self._data.amount
        data.drop_caches()
        data.smudge(self._memory)
        dram = amount.nbytes * 17 // 16 + 4 * amount.chunk_bytes + 32 * MIB if self._leased else 0
        with open_store(data.slabs, dram=dram, engine=self._engine, **self._settings) as store:
            wait_until_populated(store)
            yield store
        if not self._leased:
            data.check(self._memory)

    def _start(self, store: kvtier.Store, chunks: Sequence[int]) -> kvtier.Transfer[Any]:
        keys = [self._data.keys[i] for i in chunks]
        if self._leased:
            return store.read(keys, timeout=_READ_TIMEOUT)
        targets = [self._memory[i] for i in chunks]
        return store.get(keys, into=targets, lend=True, timeout=_READ_TIMEOUT)

    def _finish(self, transfers: Sequence[kvtier.Transfer[Any]]) -> None:
        """Wait for all of them; leases go back when all are there."""
        outcomes = [transfer.result() for transfer in transfers]
        for outcome in outcomes:
            check(outcome.result if self._leased else outcome, "a read of a stored chunk failed")
        if self._leased:
            for lease in outcomes:
                lease.release()

    def _latencies(self, store: kvtier.Store) -> list[float]:
        """Seconds per chunk, from its call to its outcome."""
        chunks = self._data.amount.chunks
        window = max(1, _LATENCY_BYTES // self._data.amount.chunk_bytes) * len(self._data.slabs)
        turn = threading.Semaphore(window)
        seconds = [0.0] * chunks
        transfers = []

        def ended(i: int, start: float, _: object) -> None:
            seconds[i] = time.perf_counter() - start
            turn.release()

        for i in range(chunks):
            turn.acquire()
            start = time.perf_counter()
            transfer = self._start(store, [i])
            transfer.add_done_callback(partial(ended, i, start))
            transfers.append(transfer)
        self._finish(transfers)
        return seconds
