"""One file per chunk, read through aiofiles."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import aiofiles

from kvtier.cli.bench.files import IN_FLIGHT

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvtier.cli.bench.data import Data


def aiofiles_reads(data: Data, memory: npt.NDArray[np.uint8]) -> list[float]:
    """Read with 32 files in flight on as many threads; seconds each, from its open on."""
    return asyncio.run(_read_all(data, memory))


async def _read_all(data: Data, memory: npt.NDArray[np.uint8]) -> list[float]:
    turn = asyncio.Semaphore(IN_FLIGHT)

    async def read(i: int) -> float:
        async with turn:
            start = time.perf_counter()
            async with aiofiles.open(data.files[i], "rb") as file:
                count = await file.readinto(memoryview(memory[i]))
            if count != data.amount.chunk_bytes:
                raise OSError(f"{data.files[i]} gave {count} bytes of {data.amount.chunk_bytes}")
            return time.perf_counter() - start

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        asyncio.get_running_loop().set_default_executor(pool)
        return await asyncio.gather(*(read(i) for i in range(data.amount.chunks)))
