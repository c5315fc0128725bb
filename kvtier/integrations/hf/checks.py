"""Everything that could not be restored exactly is refused here, before anything is read or stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvtier.errors import InvalidRequest, UnsupportedModel
from kvtier.integrations.hf.tensors import GrowingLayer

if TYPE_CHECKING:
    from kvtier.layout import KVLayout


def inner_model(model: Any) -> Any:
    """The transformers model inside of torch.compile's and PEFT's wrappers.

    Raises UnsupportedModel if there is none, or if a PEFT adapter puts tokens in front of the prompt.
    """
    inner = getattr(model, "_orig_mod", model)
    for name, adapter in getattr(inner, "peft_config", {}).items():
        if getattr(adapter, "is_prompt_learning", False):
            raise UnsupportedModel(
                f"adapter {name!r} puts learned tokens in front of every prompt, so cache positions and "
                "token ids do not line up: use an adapter that changes weights only (LoRA, IA3)"
            )
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedModel(f"model is a {type(model).__name__}, needs a transformers PreTrainedModel")
    return inner


def check_model(model: Any) -> None:
    """Refuse a model whose KV at a position depends on more than the token ids up to there.

    Raises UnsupportedModel, naming what was found and what is supported.
    """
    config = model.config
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        _refuse(model, "attends to an encoder's output", "a decoder-only model")
    if config.get_text_config(decoder=True) is not config:
        _refuse(model, "takes images or sound, which token ids do not tell apart", "a text-only model")
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        _refuse(model, "lets tokens attend to later ones", "causal attention")
    if getattr(config, "kv_lora_rank", None):
        _refuse(model, "compresses keys and values into latents (MLA)", "plain keys and values")
    _check_attention(model, config)
    _check_rope(model, config)
    _check_weights(model)
    check_mode(model)


def check_mode(model: Any) -> None:
    """Refuse a model in training mode: dropout would be in the KV. Raises UnsupportedModel."""
    if model.training:
        _refuse(model, "is in training mode, where dropout changes the KV", "model.eval()")


def _refuse(model: Any, fault: str, needs: str) -> None:
    raise UnsupportedModel(f"{type(model).__name__} {fault}; needs {needs}")


def _check_attention(model: Any, config: Any) -> None:
    """Every layer keeps plain keys and values of all tokens."""
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True):
        _refuse(
            model, f"has a sliding window of {window} tokens, so its cache drops old ones", "full attention"
        )
    types = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if types:
        _refuse(model, f"has layers of type {', '.join(sorted(types))}", "full attention in every layer")
    layers = DynamicCache(config=config).layers
    kinds = {type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer}
    if kinds:
        _refuse(model, f"caches in a {', '.join(sorted(kinds))}", "full attention in every layer")
    if len(layers) != config.num_hidden_layers:
        _refuse(
            model, f"has {config.num_hidden_layers} layers and caches {len(layers)}", "a cache in every layer"
        )


def _check_rope(model: Any, config: Any) -> None:
    """The rotation of a key must not depend on how long the whole text gets."""
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in scaling.values() if isinstance(value, Mapping)]
    for parameters in (scaling, *nested):
        kind = str(parameters.get("rope_type", parameters.get("type", "default")))
        if "dynamic" in kind or kind == "longrope":
            _refuse(
                model,
                f"scales RoPE by {kind!r}, so a prefix has other keys in a short text than in a long one",
                "a scaling that is fixed (default, linear, llama3, yarn)",
            )


def _check_weights(model: Any) -> None:
    """All weights are here, on one device, as plain tensors whose bytes say everything."""
    devices = {str(tensor.device) for tensor in model.parameters()}
    if "meta" in devices:
        _refuse(
            model, "has weights on the meta device (offloaded, or not loaded)", "all weights on one device"
        )
    if len(devices) != 1:
        _refuse(model, f"is spread over {', '.join(sorted(devices))}", "all weights on one device")
    for name, parameter in model.named_parameters():
        if type(parameter) is not torch.nn.Parameter or type(parameter.data) is not torch.Tensor:
            _refuse(
                model,
                f"keeps {name!r} as {type(parameter.data).__name__} in a {type(parameter).__name__}, whose "
                "scales may lie outside of its bytes",
                "plain tensors as weights",
            )


def check_ids(input_ids: Any, attention_mask: Any, config: Any) -> None:
    """Refuse what is no batch of unpadded prompts of equal length. Raises InvalidRequest."""
    if not isinstance(input_ids, torch.Tensor):
        raise InvalidRequest(
            f"input_ids is a {type(input_ids).__name__}, needs a torch tensor (batch, tokens)"
        )
    if input_ids.dtype == torch.bool or input_ids.is_floating_point() or input_ids.is_complex():
        raise InvalidRequest(f"input_ids holds {input_ids.dtype}, needs integers")
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise InvalidRequest(
            f"input_ids has shape {tuple(input_ids.shape)}, needs (batch, tokens) with at least one of each"
        )
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            raise InvalidRequest(
                f"attention_mask has shape {tuple(attention_mask.shape)}, needs {tuple(input_ids.shape)}"
            )
        if not bool((attention_mask != 0).all()):
            raise InvalidRequest(
                "attention_mask has zeros, so rows are padded and their positions are shifted: needs "
                "prompts of equal length; call once per length"
            )
        return
    pad, bos = getattr(config, "pad_token_id", None), getattr(config, "bos_token_id", None)
    if pad is not None and pad != bos and bool((input_ids[:, 0] == pad).any()):
        raise InvalidRequest(
            f"input_ids begins with the padding token {pad}: needs unpadded prompts of equal length; if it "
            "belongs to the text, pass an attention_mask of ones"
        )


def check_cache(cache: Any, layout: KVLayout, batch: int) -> int:
    """Tokens in `cache`, after making sure that it holds exactly what `layout` says.

    Raises UnsupportedModel for a kind of cache that cannot be stored, InvalidRequest for one that
    is not of this model or this batch.
    """
    if type(cache) is not DynamicCache:
        raise UnsupportedModel(
            f"cache is a {type(cache).__name__}, needs a plain DynamicCache (not static, quantized or "
            "encoder-decoder)"
        )
    if cache.offloading:
        raise UnsupportedModel("cache offloads its layers, needs a DynamicCache with offloading=False")
    if len(cache.layers) != layout.layers:
        raise InvalidRequest(f"cache has {len(cache.layers)} layers, the model has {layout.layers}")
    tokens: int = cache.get_seq_length()
    if tokens == 0:
        raise InvalidRequest("cache holds no tokens: run the model with cache=cache, use_cache=True first")
    needs = (batch, layout.kv_heads, tokens, layout.head_dim)
    for index, layer in enumerate(cache.layers):
        if type(layer) not in (DynamicLayer, GrowingLayer):
            raise UnsupportedModel(f"cache layer {index} is a {type(layer).__name__}, needs a DynamicLayer")
        for plane, tensor in (("keys", layer.keys), ("values", layer.values)):
            got = None if tensor is None else tuple(tensor.shape)
            if got != needs:
                raise InvalidRequest(
                    f"{plane} of cache layer {index} have shape {got}, need {needs}: "
                    "(batch, kv heads, tokens, head dim), the same in every layer"
                )
            if str(tensor.dtype) != f"torch.{layout.dtype}":
                raise InvalidRequest(
                    f"{plane} of cache layer {index} are {tensor.dtype}, but the model runs in {layout.dtype}"
                )
    return tokens
