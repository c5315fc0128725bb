"""Models, caches, ids and calls that the transformers integration refuses, and what it says."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hf_models import CHUNK, computed, prompt, tiny  # noqa: E402
from kvtier.errors import InvalidRequest, UnsupportedModel  # noqa: E402
from kvtier.integrations.hf import PrefixCache  # noqa: E402

UNSUPPORTED = {
    "sliding window": ("mistral", {"sliding_window": 64}),
    "images or sound": ("qwen2_vl", {}),
    "encoder": ("t5", {}),
    "latents": ("deepseek_v3", {}),
    "a sliding window of 4096": (
        "qwen3",
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "num_hidden_layers": 2,
            "use_sliding_window": True,
        },
    ),
    "layers of type linear_attention": ("qwen3_next", {}),
    "layers of type sliding_attention": (
        "qwen3",
        {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2},
    ),
    "'dynamic'": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "'longrope'": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "factor": 2.0,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 1024,
            }
        },
    ),
}


@pytest.mark.parametrize("fault", UNSUPPORTED)
def test_models_that_cannot_be_restored_exactly_are_refused(store: Any, fault: str) -> None:
    from kvtier.integrations.hf.checks import check_model

    kind, changes = UNSUPPORTED[fault]
    config = transformers.AutoConfig.for_model(kind, **changes)
    model = torch.nn.Linear(1, 1).eval()
    model.config = config
    with pytest.raises(UnsupportedModel, match=fault):
        check_model(model)


def test_states_of_a_model_that_are_refused(llama: Any, store: Any) -> None:
    with pytest.raises(UnsupportedModel, match="training mode"):
        PrefixCache(copy.deepcopy(llama).train(), store)
    with pytest.raises(UnsupportedModel, match="Linear, needs a transformers"):
        PrefixCache(torch.nn.Linear(1, 1), store)
    with torch.device("meta"):
        empty = tiny()
    with pytest.raises(UnsupportedModel, match="meta device"):
        PrefixCache(empty, store)
    partly = copy.deepcopy(llama)
    partly.lm_head = partly.lm_head.to("meta")
    with pytest.raises(UnsupportedModel, match=r"spread over|meta device"):
        PrefixCache(partly, store)
    packed = copy.deepcopy(llama)
    kind = type("Packed", (torch.nn.Parameter,), {})
    packed.model.norm.weight = packed.model.norm.weight.data.as_subclass(kind)
    with pytest.raises(UnsupportedModel, match="plain tensors"):
        PrefixCache(packed, store)
    prefixed = copy.deepcopy(llama)
    prefixed.peft_config = {"default": type("PrefixTuning", (), {"is_prompt_learning": True})()}
    with pytest.raises(UnsupportedModel, match="in front of every prompt"):
        PrefixCache(prefixed, store)
    model = copy.deepcopy(llama)
    prefix_cache = PrefixCache(model, store)
    model.train()
    with pytest.raises(UnsupportedModel, match="training mode"):
        prefix_cache.restore(prompt(64))


def test_caches_that_are_refused(llama: Any, store: Any) -> None:
    prefix_cache = PrefixCache(llama, store, chunk_tokens=CHUNK)
    ids = prompt(128)
    good, _ = computed(llama, ids)
    static = transformers.StaticCache(config=llama.config, max_cache_len=256)
    with torch.no_grad():
        llama(ids, cache=static)
    window = transformers.DynamicCache(config=tiny("mistral", sliding_window=64).config)
    for index, layer in enumerate(good.layers):
        window.update(layer.keys, layer.values, index)

    def changed(index: int, keys: Any, values: Any) -> Any:
        cache = copy.deepcopy(good)
        cache.layers[index].keys, cache.layers[index].values = keys, values
        return cache

    first = good.layers[0]
    half = [plane.to(torch.float16) for plane in (first.keys, first.values)]
    fewer = copy.deepcopy(good)
    fewer.layers.pop()
    offloaded = copy.deepcopy(good)
    offloaded.offloading = True
    for cache, error, message in (
        (static, UnsupportedModel, "StaticCache"),
        ("no cache", UnsupportedModel, "str"),
        (window, UnsupportedModel, "DynamicSlidingWindowLayer"),
        (offloaded, UnsupportedModel, "offloading=False"),
        (transformers.DynamicCache(config=llama.config), InvalidRequest, "no tokens"),
        (fewer, InvalidRequest, "2 layers, the model has 3"),
        (changed(1, first.keys[:, :, 1:], first.values[:, :, 1:]), InvalidRequest, "layer 1"),
        (changed(0, first.keys, first.values[..., 1:]), InvalidRequest, "values of cache layer 0"),
        (changed(0, *half), InvalidRequest, "float16"),
        (computed(llama, prompt(128, batch=2))[0], InvalidRequest, "the same in every layer"),
    ):
        with pytest.raises(error, match=message):
            prefix_cache.save(ids, cache)
    assert store.match(prefix_cache.keys(ids)[0]) == 0


def test_ids_that_are_refused(llama: Any, store: Any) -> None:
    prefix_cache = PrefixCache(llama, store, chunk_tokens=CHUNK)
    padded = torch.ones(2, 70, dtype=torch.long)
    padded[0, :5] = 0
    for ids, mask, message in (
        ([[1, 2]], None, "list, needs a torch tensor"),
        (torch.ones(1, 70), None, "float32, needs integers"),
        (torch.ones(1, 70, dtype=torch.bool), None, "bool, needs integers"),
        (torch.ones(70, dtype=torch.long), None, r"shape \(70,\)"),
        (torch.ones(1, 0, dtype=torch.long), None, "at least one"),
        (torch.full((1, 70), -1), None, "-1"),
        (torch.ones(2, 70, dtype=torch.long), padded, "zeros, so rows are padded"),
        (torch.ones(2, 70, dtype=torch.long), padded[:1], r"attention_mask has shape \(1, 70\)"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            prefix_cache.restore(ids, attention_mask=mask)
        with pytest.raises(InvalidRequest, match=message):
            prefix_cache.generate(ids, attention_mask=mask)
    known = copy.deepcopy(llama)
    known.config.pad_token_id = 0
    prefix_cache = PrefixCache(known, store, chunk_tokens=CHUNK)
    with pytest.raises(InvalidRequest, match="begins with the padding token 0"):
        prefix_cache.restore(padded)
    assert prefix_cache.restore(padded, attention_mask=torch.ones_like(padded))[1] == 0


def test_calls_that_are_refused(llama: Any, store: Any) -> None:
    prefix_cache = PrefixCache(llama, store, chunk_tokens=CHUNK)
    ids = prompt(128)
    cache, _ = computed(llama, ids)
    with pytest.raises(InvalidRequest, match="holds 128 tokens and input_ids has 128"):
        prefix_cache.prefill(ids, cache)
    for name, value in (
        ("cache", cache),
        ("num_beams", 2),
        ("num_return_sequences", 2),
        ("use_cache", False),
    ):
        with pytest.raises(InvalidRequest, match=name):
            prefix_cache.generate(ids, **{name: value})
    with pytest.raises(InvalidRequest, match="static"):
        prefix_cache.generate(ids, cache_implementation="static")
    with pytest.raises(InvalidRequest, match="chunk_tokens"):
        PrefixCache(llama, store, chunk_tokens=0)
