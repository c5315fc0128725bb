"""The namespace of keys: everything that vLLM's block hashes do not cover.

A block hash holds the tokens up to the block's end, and whatever of LoRA, images and salt belongs to
them. It does not know the model, its weights, nor how a block's bytes are laid out.
"""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any

from kvtier.errors import InvalidRequest
from kvtier.integrations.vllm import compat
from kvtier.integrations.vllm.weights import weights_digest
from kvtier.layout import canonical

_VERSION = 1


def tier_namespace(spec: Any, config: Any, *, row_bytes: int, model_id: str) -> bytes:
    """32 bytes that differ whenever two engines' rows under the same block hash may differ in meaning.

    `spec` is vLLM's OffloadingSpec, `config` the engine's VllmConfig. Reads the weights once, unless
    `model_id` names them. Raises InvalidRequest where they cannot be told apart without it.
    """
    offloading = spec.config
    parallel = offloading.parallel
    record = {
        **_engine(config, model_id),
        "kind": "vllm rows",
        "dtype": offloading.model.dtype,
        "kv_layout": str(offloading.kv_cache_layout),
        "canonical": int(offloading.canonical_layout),
        "replicated": int(spec.replicated_layout),
        "row_bytes": row_bytes,
        "tokens_per_hash": offloading.cache.tokens_per_hash,
        "blocks_per_chunk": offloading.cache.blocks_per_chunk,
        "groups": json.dumps(
            [
                [group_id, group.tokens_per_block, list(group.layer_names)]
                for group_id, group in zip(compat.group_ids(spec), offloading.groups, strict=True)
            ]
        ),
        **{name: getattr(parallel, name) for name in ("tp_size", "pp_size", "pcp_size", "dcp_size")},
    }
    return hashlib.sha256(canonical(record)).digest()


def blocks_identity(config: Any, *, kv_format: str, layers: list[str], model_id: str) -> bytes:
    """The same for the blocks of a worker's KV cache, but for its rank and the shape of its tensors.

    `kv_format` is what else decides how the bytes of a block are ordered, `layers` are the names of the
    layers in the order of the tensors.
    """
    record = {
        **_engine(config, model_id),
        "kind": "vllm blocks",
        "dtype": str(config.model_config.dtype),
        "kv_format": kv_format,
        "layers": json.dumps(layers),
    }
    return hashlib.sha256(canonical(record)).digest()


def _engine(config: Any, model_id: str) -> dict[str, Any]:
    """What decides the meaning of KV, wherever it lies."""
    if config.lora_config is not None and not model_id:
        raise InvalidRequest(
            "LoRA is on, and vLLM's hashes know an adapter by its name, not by its weights: set kvtier's "
            "'model_id' to a string that changes whenever the model or an adapter does"
        )
    return {
        "version": _VERSION,
        "vllm": compat.vllm_version(),
        "model": _model(config.model_config, config.load_config, model_id),
        "draft": _draft(config, model_id),
        "cache": config.cache_config.compute_hash(),
        "hash": str(config.cache_config.prefix_caching_hash_algo),
        "attention": config.attention_config.compute_hash(),
        "device": compat.device_identity(),
    }


def _model(model: Any, load: Any, model_id: str) -> str:
    weights = ["id", model_id] if model_id else ["files", weights_digest(model, load.download_dir)]
    if load.load_format == "dummy":
        weights = ["dummy", str(model.seed)]
    # vLLM's own hash of what the computation depends on (architecture, RoPE, quantization), with the
    # path taken out: a model may be moved.
    hashed = _without_path(model)
    return json.dumps([hashed, str(load.load_format), *weights])


def _without_path(model: Any) -> str:
    moved = copy.copy(model)
    moved.model = ""
    return str(moved.compute_hash())


def _draft(config: Any, model_id: str) -> str:
    """A drafter keeps its KV in the same rows."""
    speculative = config.speculative_config
    if speculative is None:
        return ""
    model = getattr(speculative, "draft_model_config", None)
    parts = [str(speculative.method), speculative.compute_hash()]
    if model is not None:
        parts.append(_model(model, config.load_config, model_id))
    return json.dumps(parts)
