"""vLLM's tiered offloading on the CPU platform, which its own spec refuses: tests have no GPU."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


class CopyingWorker(OffloadingWorker):
    """Moves blocks between the model's KV tensors and the rows at once, when it is told to."""

    def __init__(self, caches: Any, region: Any, blocks_per_chunk: int) -> None:
        self._caches = caches
        self._region = region
        self._per_chunk = blocks_per_chunk
        self._columns = [
            region.create_next_worker_view(tensor.page_size_bytes * blocks_per_chunk)
            for tensor in caches.tensors
        ]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        start = time.monotonic()
        nbytes = 0
        for block, place in self._pairs(src_spec, dst_spec):
            place.copy_(block)
            nbytes += place.numel()
        return self._finish(job_id, nbytes, start)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        start = time.monotonic()
        nbytes = 0
        for block, place in self._pairs(dst_spec, src_spec):
            block.copy_(place)
            nbytes += place.numel()
        return self._finish(job_id, nbytes, start)

    def _finish(self, job_id: int, nbytes: int, start: float) -> bool:
        self._done.append(TransferResult(job_id, True, nbytes, time.monotonic() - start))
        return True

    def _pairs(self, blocks: Any, rows: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Bytes of a block of the KV tensors, and their place in a row, group after group."""
        block_ids, row_ids = iter(blocks.block_ids.tolist()), rows.block_ids.tolist()
        used = 0
        for group, (count, first) in enumerate(zip(blocks.group_sizes, blocks.block_indices, strict=True)):
            skip = first % self._per_chunk
            for i in range(count):
                block_id = next(block_ids)
                chunk, part = divmod(skip + i, self._per_chunk)
                for ref in self._caches.group_data_refs[group]:
                    cache, nbytes = self._caches.tensors[ref.tensor_idx], ref.page_size_bytes
                    start = part * cache.page_size_bytes
                    row = self._columns[ref.tensor_idx][row_ids[used + chunk]]
                    yield cache.tensor[block_id][:nbytes], row[start : start + nbytes]
            used += -(-(skip + count) // self._per_chunk) if count else 0

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._columns.clear()
        self._region.cleanup()


class CPUTieringSpec(TieringOffloadingSpec):
    """The real scheduler side, and a worker that needs no GPU."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            rows = self.num_chunks if hasattr(self, "num_chunks") else self.num_blocks  # the latter in 0.29
            region = SharedOffloadRegion(
                self._engine_id, rows, self.config.parallel.rank, self.kv_bytes_per_chunk,
                self.cpu_page_size_per_worker,
            )  # fmt: skip
            self._worker = CopyingWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker
