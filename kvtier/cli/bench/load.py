"""Paced reads, and the puts that press on them."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self

import numpy as np

from kvtier.cli.bench.data import check, keys
from kvtier.cli.bench.measure import percentile_ms
from kvtier.config import MIB

if TYPE_CHECKING:
    import random
    from types import TracebackType

    import numpy.typing as npt

    import kvtier
    from kvtier.cli.bench.data import Amount, Data

_PUT_BYTES = 64 * MIB
_PUTS_IN_FLIGHT = 2  # per device
_RAMP_S = 0.5  # until the writes are at full speed
_passes = itertools.count()


@dataclass(frozen=True, slots=True)
class Paced:
    """What paced reads came to."""

    latencies_s: list[float]
    """Seconds from when each read was due to its outcome."""
    read_gb_s: float
    write_gb_s: float

    def percentile_ms(self, percent: float) -> float:
        """A percentile of the latencies in milliseconds."""
        return percentile_ms(self.latencies_s, percent) or 0.0


class WriteLoad:
    """While it is entered, `store`, if there is one, takes puts as fast as they get to disk."""

    def __init__(self, store: kvtier.Store | None, amount: Amount, devices: int) -> None:
        count = max(1, _PUT_BYTES // amount.chunk_bytes)
        self._source = np.random.default_rng(0).integers(0, 256, (count, amount.chunk_bytes), np.uint8)
        self._stop = threading.Event()
        self._in_flight = _PUTS_IN_FLIGHT * devices
        self._nbytes = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(store,)) if store is not None else None

    @property
    def nbytes(self) -> int:
        """Bytes that have come to disk so far."""
        return self._nbytes

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
            time.sleep(_RAMP_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def _run(self, store: kvtier.Store) -> None:
        try:
            self._put_until_stopped(store)
        except BaseException as error:
            self._error = error

    def _put_until_stopped(self, store: kvtier.Store) -> None:
        running: deque[kvtier.Transfer[kvtier.BatchResult]] = deque()
        while not self._stop.is_set():
            if len(running) >= self._in_flight:
                self._end(running.popleft())
            names = keys(len(self._source), f"load {next(_passes)}")
            running.append(store.put(names, self._source, until="disk"))
        for transfer in running:
            self._end(transfer)

    def _end(self, transfer: kvtier.Transfer[kvtier.BatchResult]) -> None:
        result = transfer.result()
        check(result, "a put of the write load failed")
        self._nbytes += int(result.nbytes.sum())


def paced_reads(
    store: kvtier.Store,
    data: Data,
    memory: npt.NDArray[np.uint8],
    interval: float,
    seconds: float,
    draw: random.Random,
    load: WriteLoad,
) -> Paced:
    """Start a read of one chunk every `interval` seconds, however many are under way."""
    count = max(1, int(seconds / interval))
    order = draw.sample(range(data.amount.chunks), data.amount.chunks)
    latencies = [0.0] * count
    transfers = []

    def ended(number: int, due: float, _: object) -> None:
        latencies[number] = time.perf_counter() - due

    written, begin = load.nbytes, time.perf_counter()
    for number in range(count):
        i = order[number % len(order)]
        due = begin + number * interval
        time.sleep(max(0.0, due - time.perf_counter()))
        transfer = store.get([data.keys[i]], into=[memory[i]], lend=True)
        transfer.add_done_callback(partial(ended, number, due))
        transfers.append(transfer)
    for transfer in transfers:
        check(transfer.result(), "a read of a stored chunk failed")
    wall = time.perf_counter() - begin
    written = load.nbytes - written
    return Paced(latencies, count * data.amount.chunk_bytes / 1e9 / wall, written / 1e9 / wall)
