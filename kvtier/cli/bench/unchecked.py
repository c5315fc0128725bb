"""The io_uring engine alone, without checksums: what its reads cost, apart from checking them."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import numpy as np

from kvtier.cli.bench.measure import Contender, Meter
from kvtier.config import MIB
from kvtier.errors import TierUnavailable
from kvtier.io.base import OP, Batch
from kvtier.io.native import UringEngine
from kvtier.io.plan import MAX_OP_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kvtier.cli.bench.data import Data
    from kvtier.cli.bench.measure import Sample
    from kvtier.cli.bench.place import ReadCounter
    from kvtier.io.base import IOEngine

_DEPTH = 64
_IN_FLIGHT = 64 * MIB  # bytes, as a store begins with
_BATCH_BYTES = 16 * MIB
_BATCHES = 8  # open at a time: more bytes than are in flight, and few files


class UncheckedReads:
    """A pass of unchecked batches over the files of the chunks, into memory registered as a store's is."""

    def __init__(self, data: Data, memory: npt.NDArray[np.uint8], counter: ReadCounter) -> None:
        self._data = data
        self._memory = memory
        self._counter = counter

    def contender(self) -> Contender:
        """The row."""
        detail = "the engine alone on the files, O_DIRECT into registered memory, no checksums"
        return Contender("kvtier-uring-unchecked", self.run, detail)

    def run(self) -> Sample:
        """One pass."""
        self._data.drop_caches()
        self._data.smudge(self._memory)
        engine = UringEngine(depth=_DEPTH, max_bytes=_IN_FLIGHT)
        try:
            engine.register(self._memory.ctypes.data, self._memory.nbytes)
            with Meter(self._counter, self._memory.nbytes) as meter:
                self._read(engine)
        finally:
            engine.close(60.0)
        self._data.check(self._memory)
        return meter.sample()

    def _read(self, engine: IOEngine) -> None:
        chunks, width = self._memory.shape
        step = max(1, _BATCH_BYTES // width)
        turn = threading.Semaphore(_BATCHES)
        failed: list[int] = []

        def ended(batch: Batch) -> None:
            for fd in np.unique(batch.ops["fd"]).tolist():
                os.close(fd)
            failed.extend(batch.results[batch.results != 0].tolist())
            turn.release()

        for first in range(0, chunks, step):
            turn.acquire()
            engine.submit(self._batch(range(first, min(first + step, chunks)), ended))
        for _ in range(_BATCHES):
            turn.acquire()
        if failed:
            raise TierUnavailable(f"{len(failed)} unchecked reads failed, the first with result {failed[0]}")

    def _batch(self, chunks: range, on_done: Callable[[Batch], None]) -> Batch:
        width = self._memory.shape[1]
        ops = []
        for i in chunks:
            fd = os.open(self._data.files[i], os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            address = self._memory[i].ctypes.data
            for start in range(0, width, MAX_OP_BYTES):
                ops.append((start, address + start, 0, min(MAX_OP_BYTES, width - start), 0, 0, fd, 0, 0))
        return Batch(np.array(ops, OP), np.empty(0, np.uint64), on_done)
