"""Tiny random models of transformers, and what they compute without a store."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CHUNK = 64
GREEDY = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
SMALL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    # With the default of 0.02 a tiny model repeats one token, whatever is in its cache.
    "initializer_range": 0.2,
}


def tiny(kind: str = "llama", seed: int = 0, dtype: Any = None, **changes: Any) -> Any:
    torch.manual_seed(seed)
    if kind == "mistral":
        changes = {"sliding_window": None, **changes}
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **changes})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32).eval()


def prompt(tokens: int, batch: int = 1, seed: int = 1) -> Any:
    return torch.randint(1, 512, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def computed(model: Any, ids: Any) -> tuple[Any, Any]:
    """Cache and last logits of a plain forward."""
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        return cache, model(ids, cache=cache, use_cache=True).logits[:, -1:]


def kv(cache: Any, tokens: int) -> list[Any]:
    return [plane[:, :, :tokens] for layer in cache.layers for plane in (layer.keys, layer.values)]


def assert_same_kv(got: Any, expected: Any, tokens: int) -> None:
    for left, right in zip(kv(got, tokens), kv(expected, tokens), strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)


def generated(model: Any, ids: Any, **kwargs: Any) -> Any:
    return model.generate(ids, attention_mask=torch.ones_like(ids), **{**GREEDY, **kwargs})
