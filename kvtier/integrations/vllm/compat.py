"""All that depends on vLLM's version: which ones work, and what differs between them."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from kvtier.errors import InvalidRequest, TierUnavailable
from kvtier.integrations.vllm.settings import Rank

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

SUPPORTED = ("0.29", "0.32")
"""Release series that the tests run on."""


def check_version(version: str | None = None) -> None:
    """Raise TierUnavailable unless `version` (this process's vLLM) is supported."""
    if version is None:
        version = vllm_version()
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        series = " and ".join(SUPPORTED)
        raise TierUnavailable(f"this is vLLM {version}, but kvtier works with {series}: install one of these")


def vllm_version() -> str:
    """The version of this process's vLLM, such as "0.32.0"."""
    from vllm import __version__

    return str(__version__)


def base_arguments(backpressure_detector: Any) -> dict[str, Any]:
    """What `SecondaryTierManager.__init__` takes besides spec, view and type; 0.29 has no detectors."""
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

    return (
        {"backpressure_detector": backpressure_detector}
        if hasattr(SecondaryTierManager, "bp_detector")
        else {}
    )


def row_ids(job: Any) -> npt.NDArray[np.int32]:
    """Rows of the primary tier that a TransferJob reads or fills, shape (keys,)."""
    ids: npt.NDArray[np.int32] = job.block_ids if hasattr(job, "block_ids") else job.chunk_ids
    return ids


def job_result(
    job_id: int, *, success: bool, keys: Collection[bytes] | None, seconds: float, nbytes: int
) -> Any:
    """A JobResult; `keys` are those of a failed load that did arrive. 0.29 counts the bytes itself."""
    from vllm.v1.kv_offload.tiering.base import JobResult

    more = {"transfer_bytes": nbytes} if "transfer_bytes" in JobResult.__dataclass_fields__ else {}
    return JobResult(job_id, success, successful_keys=keys, transfer_time=seconds, **more)


def engine_config(spec: Any) -> Any:
    """The VllmConfig of the engine whose OffloadingSpec is `spec`.

    No version hands it to a tier, whose keys would be wrong without it: it is taken from those who
    are calling, and recognised by the engine's id. Raises TierUnavailable if none of them has it.
    """
    frame = sys._getframe(1)
    while frame is not None:
        config = frame.f_locals.get("vllm_config")
        transfer = getattr(config, "kv_transfer_config", None)
        if transfer is not None and transfer.engine_id == spec.config.engine_id:
            return config
        frame = frame.f_back  # type: ignore[assignment]
    raise TierUnavailable(
        "vLLM's configuration is not where this version keeps it, so KV of different models could not be "
        "told apart: use kvtier through vLLM's OffloadingConnector"
    )


def device_identity() -> str:
    """What decides, besides the settings, how an attention backend lays out a block."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import torch

        # CPU attention packs blocks for the instructions it has.
        return f"cpu {current_platform.get_cpu_architecture()} amx={torch.cpu._is_amx_tile_supported()}"
    return f"{current_platform.device_type} {current_platform.get_device_name()}"


def group_ids(spec: Any) -> list[int]:
    """The number of each offloaded KV cache group; 0.29 offloads all of them, in order."""
    return [getattr(group, "group_id", i) for i, group in enumerate(spec.config.groups)]


def kv_layers(kv_caches: Mapping[str, Any], kv_cache_config: Any) -> tuple[dict[str, Any], str]:
    """A worker's KV tensors by layer, and the names of their axes, see `EngineKV.of`.

    What layers share is there once. A block of the tensors is a block of the scheduler's: where kernels
    have smaller ones, a block is bytes without a shape.
    """
    layers: dict[str, Any] = {}
    seen = set()
    for name, tensor in kv_caches.items():
        place = (tensor.data_ptr(), tensor.stride())
        if place not in seen:
            seen.add(place)
            layers[name] = tensor
    blocks = kv_cache_config.num_blocks
    if all(tensor.ndim == 4 and tensor.shape[0] == blocks for tensor in layers.values()):
        return layers, "block head token dim"
    tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    return {name: _opaque(name, tensor, blocks, tokens) for name, tensor in layers.items()}, "block token dim"


def _opaque(name: str, tensor: Any, blocks: int, tokens: int) -> Any:
    """A layer's blocks as bytes, of shape (blocks, tokens, bytes per token)."""
    import torch

    ratio, size = tensor.shape[0] // blocks, tensor.element_size()
    dense = torch.empty(tensor.shape[1:], device="meta").stride()
    page = ratio * tensor[0].numel() * size
    if tensor.shape[0] % blocks or page % tokens or tensor.stride()[1:] != dense:
        raise InvalidRequest(
            f"the KV cache of layer {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, "
            f"which do not make {blocks} blocks of {tokens} tokens each in one piece: leave out "
            "VLLM_KV_CACHE_LAYOUT"
        )
    stride = tensor.stride(0) * size * ratio
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * size,
        (blocks, tokens, page // tokens),
        (stride, page // tokens, 1),
    )


def kv_format(config: Any, kv_cache_config: Any) -> str:
    """What decides, besides the shape of the tensors, how the bytes of a block are ordered."""
    layers = config.compilation_config.static_forward_context
    backends = {
        layers[name].attn_backend.get_name()
        for group in kv_cache_config.kv_cache_groups
        for name in group.layer_names
        if hasattr(layers.get(name), "attn_backend")
    }
    return f"vllm:{','.join(sorted(backends))}:{config.cache_config.kv_cache_layout}"


def worker_rank(config: Any) -> Rank:
    """Which worker this process is."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    tp, pp, parallel = get_tp_group(), get_pp_group(), config.parallel_config
    return Rank(
        parallel.data_parallel_index,
        parallel.data_parallel_size,
        pp.rank_in_group,
        pp.world_size,
        tp.rank_in_group,
        tp.world_size,
    )


def block_tables(output: Any) -> Mapping[str, Sequence[list[int]]]:
    """Block tables by request and group, of those whose table changes with a step; 0.32 has them apart."""
    tables: Mapping[str, Sequence[list[int]]] = getattr(output.kv_connector_block_state, "block_ids", {})
    return tables


def block_table(output: Any, request_id: str) -> list[int] | None:
    """The block table of a request of a step; None in 0.29, see `block_tables`."""
    state = output.kv_connector_block_state
    if not hasattr(state, "get_block_ids"):
        return None
    (table,) = state.get_block_ids(request_id)
    return list(table)


def add_written_blocks(output: Any, block_tokens: int, blocks: list[int]) -> None:
    """Append the blocks that a step writes to for the first time since they were allocated."""
    for request in output.scheduled_new_reqs:
        blocks += request.block_ids[0][request.num_computed_tokens // block_tokens :]
    cached = output.scheduled_cached_reqs
    for request_id, ids, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if ids:
            first = computed // block_tokens if request_id in cached.resumed_req_ids else 0
            blocks += ids[0][first:]


def tokens_with_kv(request: Any) -> int:
    """How many tokens of an ended request have their KV in its blocks."""
    computed: int = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
    return min(computed, int(request.num_tokens))


def check_engine(config: Any) -> None:
    """Refuse what would make kvtier useless or its keys unsafe, whatever its settings."""
    if config.lora_config is not None and vllm_version().startswith("0.29."):
        raise InvalidRequest(
            "LoRA is on, and vLLM 0.29 hashes an adapter's name as it does a salt, so that requests with the "
            "one could get blocks of the other: use 0.32 for LoRA"
        )
    if config.cache_config.enable_prefix_caching is False:
        raise InvalidRequest(
            "prefix caching is off, so vLLM has no block hashes to store KV under: leave out "
            "--no-enable-prefix-caching"
        )
    algorithm = config.cache_config.prefix_caching_hash_algo
    if algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in os.environ:
        raise InvalidRequest(
            f"block hashes by {algorithm!r} start from a random seed in each process, so nothing would be "
            "found after a restart: use --prefix-caching-hash-algo sha256, or set PYTHONHASHSEED"
        )
