"""What a model's KV depends on besides its input, as one digest: weights, buffers, adapters, config."""

from __future__ import annotations

import hashlib
import json
import weakref
from typing import Any

import torch
import xxhash

from kvtier.errors import UnsupportedModel

SAMPLE_ABOVE = 20_000_000_000
"""Bytes of weights above which only headers and sampled blocks are hashed."""
SAMPLE_BLOCK = 1 << 20
SAMPLE_BLOCKS = 8

# Says where a model came from or how to generate with it, not what its KV is.
_IRRELEVANT_CONFIG = {
    *(
        "_name_or_path",
        "_model_name_or_path",
        "architectures",
        "transformers_version",
        "dtype",
        "torch_dtype",
    ),
    *("use_cache", "return_dict", "output_attentions", "output_hidden_states"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}

_known: weakref.WeakKeyDictionary[torch.nn.Module, tuple[list[Any], bytes]] = weakref.WeakKeyDictionary()


def weights_digest(model: torch.nn.Module) -> bytes:
    """32 bytes that differ whenever two models may compute different KV from the same tokens.

    Covers name, shape, dtype and bytes of every parameter and buffer (above 20 GB in total: their
    names, shapes and dtypes, and eight blocks of 1 MiB of each), the state of PEFT adapters, and the
    config. Reads all weights once, at several GB/s; remembered per model until a tensor is replaced
    or written to. Writes through `tensor.data` are the one kind of change that is not noticed.

    Raises UnsupportedModel for weights whose bytes are not here (meta device, offloaded).
    """
    tensors, adapters = _state(model)
    known = _known.get(model)
    if known is not None and _unchanged(known[0], tensors, adapters):
        return known[1]
    digest = _digest(model, tensors, adapters)
    state = [(weakref.ref(tensor), tensor.data_ptr(), _version(tensor)) for _, tensor in tensors]
    _known[model] = ([state, adapters], digest)
    return digest


def _state(model: torch.nn.Module) -> tuple[list[tuple[str, torch.Tensor]], list[tuple[str, str]]]:
    """All parameters and buffers, tied ones under each name; and what PEFT keeps outside of them.

    That is which adapters are on, and how strongly. Quick, as it runs before every restore.
    """
    tensors = []
    adapters = []
    for prefix, module in model.named_modules():
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                if tensor is not None:
                    tensors.append((f"{prefix}.{name}", tensor))
        if hasattr(type(module), "_disable_adapters"):
            parts = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")
            adapters.append((prefix, repr([getattr(module, part, None) for part in parts])))
    return tensors, adapters


def _version(tensor: torch.Tensor) -> int:
    # Tensors made under inference_mode count no versions, and cannot be written to outside of it.
    return 0 if tensor.is_inference() else int(tensor._version)


def _unchanged(
    known: list[Any], tensors: list[tuple[str, torch.Tensor]], adapters: list[tuple[str, str]]
) -> bool:
    state, known_adapters = known
    return (
        len(state) == len(tensors)
        and all(
            ref() is tensor and pointer == tensor.data_ptr() and version == _version(tensor)
            for (ref, pointer, version), (_, tensor) in zip(state, tensors, strict=True)
        )
        and known_adapters == adapters
    )


def _digest(
    model: torch.nn.Module, tensors: list[tuple[str, torch.Tensor]], adapters: list[tuple[str, str]]
) -> bytes:
    for name, tensor in tensors:
        if tensor.is_meta:
            raise UnsupportedModel(
                f"parameter {name!r} is on the meta device (offloaded, or not loaded), so its bytes cannot "
                "be told from another model's: load the whole model onto one device"
            )
    total = sum({id(tensor): tensor.nbytes for _, tensor in tensors}.values())
    sampled = total > SAMPLE_ABOVE
    hashes: dict[int, str] = {}
    lines = []
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        if id(tensor) not in hashes:
            hashes[id(tensor)] = _tensor_hash(tensor, sampled)
        lines.append([name, list(tensor.shape), str(tensor.dtype), hashes[id(tensor)]])
    record = [type(model).__name__, "sampled" if sampled else "whole", lines, adapters, _config_record(model)]
    return hashlib.sha256(json.dumps(record, sort_keys=True, default=str).encode()).digest()


def _config_record(model: torch.nn.Module) -> dict[str, Any]:
    # Positions, norms and scales are set here and leave no trace in the weights.
    config = getattr(model, "config", None)
    items = config.to_dict() if config is not None else {}
    return {name: value for name, value in items.items() if name not in _IRRELEVANT_CONFIG}


def _tensor_hash(tensor: torch.Tensor, sampled: bool) -> str:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    hasher = xxhash.xxh3_128()
    if sampled and flat.numel() > SAMPLE_BLOCK * SAMPLE_BLOCKS:
        last = flat.numel() - SAMPLE_BLOCK
        for block in range(SAMPLE_BLOCKS):
            start = last * block // (SAMPLE_BLOCKS - 1)
            hasher.update(flat[start : start + SAMPLE_BLOCK].cpu().numpy())
    else:
        hasher.update(flat.cpu().numpy())
    return hasher.hexdigest()
