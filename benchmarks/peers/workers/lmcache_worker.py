"""LMCache's disk tiers, on a CPU: its in-process LocalDiskBackend, and the L2 adapters of its MP server.

lmcache-disk          LocalDiskBackend.batched_get_blocking, the synchronous path: StorageManager.batched_get
                      in lmcache/v1/storage_backend/storage_manager.py. 4 threads, buffered: the defaults.
lmcache-disk-async    LocalDiskBackend.batched_get_non_blocking, the path of async loading and of layerwise
                      reads: StorageManager.async_lookup_and_prefetch and layerwise_batched_get there.
lmcache-disk-16       batched_get_blocking with use_odirect and disk_io_threads=16: hand-tuned.
lmcache-mp-fs         FSL2Adapter.submit_load_task and its event fd, a task for all chunks: _submit_load_tasks
                      in lmcache/v1/distributed/storage_controllers/prefetch_controller.py, in this process.
lmcache-mp-fs-native  the same with the C++ connector: 4 workers, buffered: the defaults.
lmcache-mp-fs-native-16  the same with use_odirect and num_workers=16: hand-tuned.

All draw their buffers from one LocalCPUBackend pool that has room for all chunks. The in-process ways
allocate while they read, as they do in an engine; the MP server has its L1 buffers reserved before.
"""

from __future__ import annotations

import asyncio
import select
import threading
import time
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.pin_monitor import PinMonitor
from lmcache.v1.platform import consume_fd
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend
from serve import Chunks, Way, serve

_LAYERS, _HEADS, _HEAD_DIM = 32, 8, 128
_TOKEN_BYTES = 2 * _LAYERS * _HEADS * _HEAD_DIM * 2  # bfloat16
_BATCH_BYTES = 64 << 20
_TIMEOUT_MS = 300_000


class Pool:
    """LMCache's CPU memory, and the settings and keys of the chunks."""

    def __init__(self, chunks: Chunks) -> None:
        if chunks.chunk_bytes % _TOKEN_BYTES:
            raise ValueError(f"LMCache's chunks here are of whole tokens of {_TOKEN_BYTES} bytes")
        self.chunks = chunks
        self.tokens = chunks.chunk_bytes // _TOKEN_BYTES
        self.metadata = LMCacheMetadata(
            model_name="model", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=torch.bfloat16, kv_shape=(_LAYERS, 2, self.tokens, _HEADS, _HEAD_DIM),
            chunk_size=self.tokens,
        )  # fmt: skip
        config = self.config({})
        PinMonitor.GetOrCreate(config)
        self.backend = LocalCPUBackend(config, self.metadata, "cpu")
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def config(self, extra: dict[str, Any]) -> LMCacheEngineConfig:
        """The defaults, with room for everything, and `extra`."""
        gib = self.chunks.nbytes / 2**30
        return LMCacheEngineConfig.from_defaults(
            chunk_size=self.tokens, local_disk=str(self.chunks.directory), max_local_disk_size=2 * gib + 1,
            max_local_cpu_size=gib + 0.125, extra_config=extra,
        )  # fmt: skip

    def allocate(self) -> MemoryObj:
        """Memory for one chunk."""
        shape = torch.Size([2, _LAYERS, self.tokens, _HEADS * _HEAD_DIM])
        found = self.backend.allocate(shape, torch.bfloat16, MemoryFormat.KV_2LTD, busy_loop=False)
        if found is None:
            raise MemoryError("LMCache's pool is exhausted")
        return found

    def batches(self) -> Any:
        """Numbers of some chunks, and filled memory for them; it is given back afterwards."""
        step = max(1, _BATCH_BYTES // self.chunks.chunk_bytes)
        numbers, objects = [], []
        for number, payload in self.chunks.payloads():
            numbers.append(number)
            objects.append(self.allocate())
            _bytes_of(objects[-1])[:] = payload
            if len(numbers) == step or number + 1 == len(self.chunks.sources):
                yield numbers, objects
                for found in objects:
                    found.ref_count_down()
                numbers, objects = [], []


class Disk:
    """LocalDiskBackend, as StorageManager makes and calls it."""

    def __init__(self, pool: Pool, extra: dict[str, Any]) -> None:
        self._loop = pool.loop
        numbers = range(len(pool.chunks.sources))
        self._keys = [CacheEngineKey("model", 1, 0, number, torch.bfloat16) for number in numbers]
        self._disk = LocalDiskBackend(pool.config(extra), pool.loop, pool.backend, "cpu", None, pool.metadata)
        for some, objects in pool.batches():
            keys = [self._keys[number] for number in some]
            self._disk.batched_submit_put_task(keys, objects)
            while any(self._disk.exists_in_put_tasks(key) for key in keys):
                time.sleep(0.001)
        if not all(self._disk.contains(key) for key in self._keys):
            raise OSError("LocalDiskBackend did not store every chunk")

    def get_blocking(self) -> list[MemoryObj | None]:
        return list(self._disk.batched_get_blocking(self._keys))

    def get_non_blocking(self) -> list[MemoryObj | None]:
        load = self._disk.batched_get_non_blocking("lookup", self._keys)
        return list(asyncio.run_coroutine_threadsafe(load, self._loop).result())


class DiskReads:
    """One of the two ways to read a Disk."""

    def __init__(self, disk: Disk, *, blocking: bool) -> None:
        self._read = disk.get_blocking if blocking else disk.get_non_blocking
        self._pinned = not blocking
        self._objects: list[MemoryObj | None] = []

    def prepare(self) -> None:
        """Nothing: memory is allocated while it reads."""

    def load(self) -> None:
        self._objects = self._read()

    def buffers(self) -> list[memoryview]:
        return [memoryview(bytearray()) if it is None else _bytes_of(it) for it in self._objects]

    def release(self) -> None:
        for found in self._objects:
            if found is not None and self._pinned:
                found.unpin()
            if found is not None:
                found.ref_count_down()
        self._objects = []


class Adapter:
    """An L2 adapter of the MP server, as its prefetch controller calls it."""

    def __init__(self, pool: Pool, kind: str, settings: dict[str, Any]) -> None:
        self._pool = pool
        settings = {"type": kind, "base_path": str(pool.chunks.directory), **settings}
        config = get_l2_adapter_config_class(kind).from_dict(settings)
        self._adapter = create_l2_adapter_from_registry(config)
        numbers = range(len(pool.chunks.sources))
        self._keys = [ObjectKey(number.to_bytes(32, "big"), "model", 0) for number in numbers]
        self._objects: list[MemoryObj] = []
        for some, objects in pool.batches():
            task = self._adapter.submit_store_task([self._keys[number] for number in some], objects)
            _wait(self._adapter.get_store_event_fd())
            if not self._adapter.pop_completed_store_tasks()[task].is_successful():
                raise OSError(f"the {kind} adapter did not store chunks {some}")

    def prepare(self) -> None:
        self._objects = [self._pool.allocate() for _ in self._keys]

    def load(self) -> None:
        task = self._adapter.submit_load_task(self._keys, self._objects)
        _wait(self._adapter.get_load_event_fd())
        loaded = self._adapter.query_load_result(task)
        if loaded is None or loaded.popcount() != len(self._keys):
            raise OSError("the adapter did not load every chunk")

    def buffers(self) -> list[memoryview]:
        return [_bytes_of(found) for found in self._objects]

    def release(self) -> None:
        for found in self._objects:
            found.ref_count_down()
        self._objects = []


def make(chunks: Chunks) -> dict[str, Way]:
    """Put every chunk through each; the ways of one tier write the same files with the same bytes."""
    pool = Pool(chunks)
    default = Disk(pool, {})
    direct = {"use_odirect": True}
    return {
        "lmcache-disk": DiskReads(default, blocking=True),
        "lmcache-disk-async": DiskReads(default, blocking=False),
        "lmcache-disk-16": DiskReads(Disk(pool, {**direct, "disk_io_threads": 16}), blocking=True),
        "lmcache-mp-fs": Adapter(pool, "fs", {}),
        "lmcache-mp-fs-native": Adapter(pool, "fs_native", {}),
        "lmcache-mp-fs-native-16": Adapter(pool, "fs_native", {**direct, "num_workers": 16}),
    }


def _bytes_of(found: MemoryObj) -> memoryview:
    return memoryview(found.byte_array).cast("B")


def _wait(event_fd: int) -> None:
    poller = select.poll()
    poller.register(event_fd, select.POLLIN)
    if not poller.poll(_TIMEOUT_MS):
        raise TimeoutError("an L2 adapter did not answer")
    consume_fd(event_fd)


if __name__ == "__main__":
    serve(make)
