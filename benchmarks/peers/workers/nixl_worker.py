"""NIXL's POSIX plugin through the agent's Python API (nixl/_api.py), one file per chunk.

Called as SGLang's HiCacheNixl does (sglang/srt/mem_cache/storage/nixl/hicache_nixl.py, `_xfer_and_wait`,
and nixl_registry.py): the memory is registered once; a transfer opens its files with O_DIRECT, registers
them, reads them all in one request, polls every 0.1 ms, and closes them. HiCacheNixl moves 128 pages per
transfer; here all chunks go in one, which is the better for NIXL.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import TYPE_CHECKING

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config
from serve import Chunks, Way, serve

if TYPE_CHECKING:
    from pathlib import Path

_POLL_SECONDS = 0.0001
_WAYS = {"nixl-posix": {}, "nixl-posix-uring": {"use_uring": "true"}}


class Transfers:
    """An agent of its own with the POSIX plugin, over memory for all chunks."""

    def __init__(self, name: str, options: dict[str, str], files: list[Path], memory: np.ndarray) -> None:
        self._name = name
        self._files = files
        self._memory = memory
        self._agent = nixl_agent(name, nixl_agent_config(backends=[]))
        self._agent.create_backend("POSIX", options)
        self._rows = [(row.ctypes.data, row.nbytes, 0) for row in memory]
        regions = [(memory.ctypes.data, memory.nbytes, 0, "")]
        self._agent.register_memory(self._agent.get_reg_descs(regions, "DRAM"))

    def move(self, operation: str, flags: int) -> None:
        """READ the files into the memory, or WRITE the memory to them."""
        files = [os.open(file, flags | os.O_DIRECT, 0o644) for file in self._files]
        try:
            regions = [(0, size, fd, "") for (_, size, _), fd in zip(self._rows, files, strict=True)]
            registered = self._agent.register_memory(self._agent.get_reg_descs(regions, "FILE"))
            memory = self._agent.get_xfer_descs(self._rows, "DRAM")
            handle = self._agent.initialize_xfer(operation, memory, registered.trim(), self._name)
            state = self._agent.transfer(handle)
            while state != "DONE":
                if state == "ERR":
                    raise OSError(f"the transfer failed: {operation}")
                time.sleep(_POLL_SECONDS)
                state = self._agent.check_xfer_state(handle)
            self._agent.release_xfer_handle(handle)
            self._agent.deregister_memory(registered)
        finally:
            for fd in files:
                os.close(fd)

    def prepare(self) -> None:
        """Nothing: the memory is registered."""

    def load(self) -> None:
        self.move("READ", os.O_RDWR)

    def buffers(self) -> list[memoryview]:
        return [memoryview(row) for row in self._memory]

    def release(self) -> None:
        """Nothing: the memory stays registered."""


def make(chunks: Chunks) -> dict[str, Way]:
    """Write every chunk with one transfer; all ways read the same files into the same memory."""
    mapping = mmap.mmap(-1, chunks.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(mapping, np.uint8).reshape(len(chunks.sources), chunks.chunk_bytes)
    files = [chunks.directory / f"{number}.bin" for number in range(len(chunks.sources))]
    for number, payload in chunks.payloads():
        memory[number] = np.frombuffer(payload, np.uint8)
    ways = {name: Transfers(name, options, files, memory) for name, options in _WAYS.items()}
    ways["nixl-posix"].move("WRITE", os.O_RDWR | os.O_CREAT)
    memory[:] = 0
    return ways


if __name__ == "__main__":
    serve(make)
