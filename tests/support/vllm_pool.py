"""vLLM's manager and DRAM pool around a `kvtier` tier, without an engine: requests and rows made by hand."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = 32
ROW_BYTES = 64 << 10


def make_spec(vllm_config: Any, **tier: Any) -> Any:
    """vLLM's TieringOffloadingSpec over one `kvtier` tier."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
    )

    from kvtier.integrations.vllm.plugin import register
    from vllm_cpu_spec import CPUTieringSpec
    from vllm_models import BLOCK

    register()
    vllm_config.kv_transfer_config.kv_connector_extra_config.clear()
    vllm_config.kv_transfer_config.kv_connector_extra_config.update(
        cpu_bytes_to_use=ROWS * ROW_BYTES, secondary_tiers=[{"type": "kvtier", **tier}]
    )
    attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    layers = [f"model.layers.{i}.self_attn.attn" for i in range(4)]
    page = attention.page_size_bytes
    tensor = KVCacheTensor(
        size=ROWS * ROW_BYTES, layers=layers, layer_stride=page * ROWS, block_stride=page
    )  # in 0.29 this alone tells how large a block is
    caches = KVCacheConfig(
        num_blocks=ROWS, kv_cache_tensors=[tensor], kv_cache_groups=[KVCacheGroupSpec(layers, attention)]
    )
    return CPUTieringSpec(build_offloading_config(vllm_config, caches))


class Pool:
    """vLLM's manager with a `kvtier` tier below it, driven as its scheduler does."""

    def __init__(self, vllm_config: Any, **tier: Any) -> None:
        self.spec = make_spec(vllm_config, **tier)
        self.manager = self.spec.get_manager()
        self.tier = self.manager.secondary_tiers[0]
        self.view = self.manager.primary_tier.get_kv_memoryview()
        self.requests = 0
        self.closed = False

    def content(self, i: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.random.default_rng(i).integers(0, 256, ROW_BYTES, np.uint8)

    def loads(self) -> list[Any]:
        """The tier's loads under way."""
        return list(self.tier._loads._jobs.values())

    def key(self, i: int) -> Any:
        from vllm.v1.kv_offload.base import make_offload_key

        return make_offload_key(i.to_bytes(32, "big"), 0)

    def request(self) -> Any:
        from vllm.v1.kv_offload.base import ReqContext

        self.requests += 1
        context = ReqContext(req_id=f"request {self.requests}")
        self.manager.on_new_request(context)
        return context

    def row(self, row: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.asarray(self.view).view(np.uint8)[row]

    def store(self, *numbers: int) -> None:
        """Fill a row for each number, as a GPU would, and have it stored."""
        context = self.request()
        keys = [self.key(i) for i in numbers]
        prepared = self.manager.prepare_store(keys, context)
        for i, row in zip(numbers, prepared.store_spec.block_ids.tolist(), strict=True):
            self.row(row)[:] = self.content(i)
        self.manager.complete_store(keys, context)
        self.manager.on_request_finished(context)

    def step(self) -> None:
        from vllm.v1.kv_offload.base import ScheduleEndContext

        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def step_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 30
        self.step()
        while not condition():
            self.step()
            assert time.monotonic() < end, "that does not come about"
            time.sleep(0.001)

    def settle(self) -> None:
        """Step until nothing is going on, with everything on disk."""
        self.step_until(lambda: not self.manager.has_pending_work())
        self.tier._store.flush().result(30)

    def forget(self) -> None:
        """Empty the pool, so that what is found after it comes from disk."""
        self.settle()
        self.manager.reset_cache()
        np.asarray(self.view)[:] = 0

    def find(self, *numbers: int) -> tuple[Any, list[Any]]:
        """Look numbers up for a new request, as a scheduler does that wants all of them."""
        context = self.request()
        return context, [self.manager.lookup(self.key(i), context) for i in numbers]

    def look(self, context: Any, *numbers: int) -> list[str]:
        """Look numbers up again for a request."""
        return [self.manager.lookup(self.key(i), context).name for i in numbers]

    def settle_loads(self) -> None:
        """Step until no load is under way."""
        self.step_until(lambda: not self.tier._loads)

    def rows_of(self, context: Any, *numbers: int) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
        keys = [self.key(i) for i in numbers]
        spec = self.manager.prepare_load(keys, context)
        self.manager.complete_load(keys, context)
        return [self.row(row) for row in spec.block_ids.tolist()]

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.manager.shutdown()
