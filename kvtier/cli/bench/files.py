"""One file per chunk, read as others do: one after another, and through 32 threads."""

from __future__ import annotations

import importlib.util
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvtier.cli.bench.measure import Contender, Meter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from kvtier.cli.bench.data import Data
    from kvtier.cli.bench.measure import Sample
    from kvtier.cli.bench.place import ReadCounter

IN_FLIGHT = 32


def contenders(
    data: Data, memory: npt.NDArray[np.uint8], counter: ReadCounter
) -> tuple[list[Contender], dict[str, str]]:
    """The file-based rows, and why one is absent."""

    def measured(read: Callable[[Data, npt.NDArray[np.uint8]], Sequence[float]]) -> Callable[[], Sample]:
        def run() -> Sample:
            data.drop_caches()
            data.smudge(memory)
            with Meter(counter, data.amount.nbytes) as meter:
                latencies = read(data, memory)
            data.check(memory)
            return meter.sample(latencies)

        return run

    found = [
        Contender("serial", measured(serial), "open and readinto, buffered, one file after another"),
        Contender("threads32", measured(threads32), "the same on 32 threads"),
    ]
    if importlib.util.find_spec("aiofiles") is None:
        return found, {"aiofiles": "not installed: pip install aiofiles"}
    from kvtier.cli.bench.aiofiles import aiofiles_reads

    found.append(Contender("aiofiles", measured(aiofiles_reads), "the same in aiofiles, 32 in flight"))
    return found, {}


def serial(data: Data, memory: npt.NDArray[np.uint8]) -> list[float]:
    """Read one file after another; seconds each."""
    return [_read(data, memory, i) for i in range(data.amount.chunks)]


def threads32(data: Data, memory: npt.NDArray[np.uint8]) -> list[float]:
    """Read on 32 threads; seconds each, from its open on."""
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        return list(pool.map(lambda i: _read(data, memory, i), range(data.amount.chunks)))


def _read(data: Data, memory: npt.NDArray[np.uint8], i: int) -> float:
    start = time.perf_counter()
    with open(data.files[i], "rb") as file:
        count = file.readinto(memoryview(memory[i]))
    if count != data.amount.chunk_bytes:
        raise OSError(f"{data.files[i]} gave {count} bytes of {data.amount.chunk_bytes}")
    return time.perf_counter() - start
