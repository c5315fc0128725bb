"""The transformers integration, on real if tiny models: what is restored is what was computed."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvtier  # noqa: E402
from kvtier.errors import InvalidRequest, UnsupportedModel  # noqa: E402
from kvtier.integrations.hf import PrefixCache, kv_layout, weights_digest  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Models this small only lose by sharing work between threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny()


@pytest.fixture
def store() -> Iterator[Any]:
    with kvtier.open(dram="64MiB", chunk_bytes="1MiB") as store:
        yield store


MODELS = [
    ("llama", "float32"),
    ("llama", "bfloat16"),
    ("qwen2", "float32"),
    ("qwen3", "bfloat16"),
    ("mistral", "float16"),
]


@pytest.mark.parametrize(("kind", "dtype"), MODELS)
@pytest.mark.parametrize("batch", [1, 2])
def test_what_is_restored_is_what_was_computed(store: Any, kind: str, dtype: str, batch: int) -> None:
    model = tiny(kind, dtype=getattr(torch, dtype))
    ids = prompt(200, batch)
    reference, logits = computed(model, ids)
    prefix_cache = PrefixCache(model, store, chunk_tokens=CHUNK)
    assert prefix_cache.save(ids, reference).result().ok

    cache, restored = prefix_cache.restore(ids)
    assert restored == cache.get_seq_length() == 192
    assert_same_kv(cache, reference, restored)
    kept = copy.deepcopy(reference)
    kept.crop(-8)
    with torch.no_grad():
        expected = model(ids[:, 192:], cache=kept, logits_to_keep=1).logits
    # Bit for bit what the same step gives from the original; a prefill in one go rounds differently.
    assert torch.equal(prefix_cache.prefill(ids, cache), expected)
    assert cache.get_seq_length() == 200
    if dtype == "float32":
        torch.testing.assert_close(expected, logits, atol=1e-3, rtol=1e-3)
    kept = copy.deepcopy(reference)
    kept.crop(-8)
    again, _ = prefix_cache.restore(ids)
    assert torch.equal(generated(model, ids, cache=again), generated(model, ids, cache=kept))


def computed_to(model: Any, ids: Any, tokens: int) -> Any:
    return computed(model, ids[:, :tokens])[0]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_full_hit_leaves_exactly_one_token_to_compute(llama: Any, store: Any, batch: int) -> None:
    ids = prompt(4 * CHUNK, batch)
    reference, _ = computed(llama, ids)
    prefix_cache = PrefixCache(llama, store, chunk_tokens=CHUNK)
    prefix_cache.save(ids, reference).result()
    cache, restored = prefix_cache.restore(ids)
    assert restored == cache.get_seq_length() == 4 * CHUNK - 1
    assert_same_kv(cache, reference, restored)

    fed = []
    hook = llama.model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    out = generated(llama, ids, cache=cache)
    hook.remove()
    assert set(fed) == {1}
    assert torch.equal(out, generated(llama, ids))
    assert cache.get_seq_length() == ids.shape[1] + GREEDY["max_new_tokens"] - 1


def test_a_longer_prompt_gets_the_stored_prefix(llama: Any, store: Any) -> None:
    ids = prompt(300)
    prefix_cache = PrefixCache(llama, store, chunk_tokens=CHUNK)
    prefix_cache.save(ids[:, :150], computed_to(llama, ids, 150)).result()
    cache, restored = prefix_cache.restore(ids)
    assert restored == 128
    assert torch.equal(generated(llama, ids, cache=cache), generated(llama, ids))
    changed = ids.clone()
    changed[0, 100] = ids[0, 100] % 511 + 1
    assert prefix_cache.restore(changed)[1] == 64
    changed[0, 0] = ids[0, 0] % 511 + 1
    cache, restored = prefix_cache.restore(changed)
    assert (restored, cache.get_seq_length()) == (0, 0)
    assert torch.equal(generated(llama, changed, cache=cache), generated(llama, changed))


def test_a_batch_gets_what_every_row_has(llama: Any, store: Any) -> None:
    ids = prompt(256, batch=2)
    prefix_cache = PrefixCache(llama, store, chunk_tokens=CHUNK)
    prefix_cache.save(ids[:1], computed(llama, ids[:1])[0]).result()
    assert prefix_cache.restore(ids)[1] == 0
    prefix_cache.save(ids[1:, :140], computed(llama, ids[1:, :140])[0]).result()
    cache, restored = prefix_cache.restore(ids)
    assert restored == 128
    for row in (0, 1):
        alone, _ = prefix_cache.restore(ids[row : row + 1])
        for left, right in zip(kv(cache, 128), kv(alone, 128), strict=True):
            assert torch.equal(left[row : row + 1], right)
    assert torch.equal(generated(llama, ids, cache=cache), generated(llama, ids))


def test_rows_that_share_a_prefix_store_it_once(llama: Any, store: Any) -> None:
    ids = prompt(128, batch=2)
    ids[1, :64] = ids[0, :64]
    result = PrefixCache(llama, store, chunk_tokens=CHUNK).save(ids, computed(llama, ids)[0]).result()
    assert len(result.status) == 3


def test_a_prompt_below_one_chunk_stores_nothing(llama: Any, store: Any) -> None:
    prefix_cache = PrefixCache(llama, store, chunk_tokens=CHUNK)
    ids = prompt(CHUNK - 1)
    assert len(prefix_cache.save(ids, computed(llama, ids)[0]).result().status) == 0
    assert prefix_cache.restore(ids)[1] == 0


def test_known_chunks_move_nothing(llama: Any, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.integrations.hf import prefix_cache as module

    ids = prompt(256)
    cache, _ = computed(llama, ids)
    prefix_cache = PrefixCache(llama, store, chunk_tokens=CHUNK)
    prefix_cache.save(ids[:, :128], cache).result()
    gathered = []
    real = module.gather
    monkeypatch.setattr(
        module,
        "gather",
        lambda cache, row, chunk, *rest: gathered.append(chunk) or real(cache, row, chunk, *rest),
    )
    result = prefix_cache.save(ids, cache).result()
    assert gathered == [2, 3]
    assert result.ok


def test_a_restart_finds_it_on_disk(llama: Any, tmp_path: Path) -> None:
    ids = prompt(256, batch=2)
    reference, _ = computed(llama, ids)
    options = {"capacity": "64MiB", "dram": "8MiB", "chunk_bytes": "128KiB"}
    with kvtier.open(tmp_path, **options) as store:
        assert PrefixCache(llama, store, chunk_tokens=CHUNK).save(ids, reference, until="disk").result().ok
    twin = copy.deepcopy(llama)
    with kvtier.open(tmp_path, **options) as store:
        prefix_cache = PrefixCache(twin, store, chunk_tokens=CHUNK)
        cache, restored = prefix_cache.restore(ids)
        assert restored == 255
        assert_same_kv(cache, reference, restored)
        assert torch.equal(generated(twin, ids, cache=cache), generated(llama, ids))
        assert store.stats()["disk.bytes_read"] >= 8 * prefix_cache.layout.chunk_bytes


@pytest.mark.parametrize("dram", [0, "256KiB"])
def test_a_store_smaller_than_the_prompt_still_restores_it(llama: Any, tmp_path: Path, dram: Any) -> None:
    ids = prompt(16 * CHUNK)
    reference, _ = computed(llama, ids)
    size = kv_layout(llama, chunk_tokens=CHUNK).chunk_bytes
    options = {
        "capacity": "64MiB",
        "dram": dram,
        "chunk_bytes": size,
        "landing": 2 * size,
        "io_window": 2 * size,
    }
    with kvtier.open(tmp_path, **options) as store:
        assert PrefixCache(llama, store, chunk_tokens=CHUNK).save(ids, reference, until="disk").result().ok
    with kvtier.open(tmp_path, **options) as store:
        cache, restored = PrefixCache(llama, store, chunk_tokens=CHUNK).restore(ids)
    assert restored == 16 * CHUNK - 1
    assert_same_kv(cache, reference, restored)


def test_a_damaged_chunk_ends_the_prefix(llama: Any, tmp_path: Path) -> None:
    ids = prompt(256)
    reference, _ = computed(llama, ids)
    options = {"capacity": "64MiB", "dram": "8MiB", "chunk_bytes": "128KiB"}
    with kvtier.open(tmp_path, **options) as store:
        PrefixCache(llama, store, chunk_tokens=CHUNK).save(ids, reference, until="disk").result()
    third = reference.layers[0].keys[0, :, 128:192].transpose(0, 1).contiguous().numpy().tobytes()
    damage(tmp_path, third[:64])
    with kvtier.open(tmp_path, **options) as store:
        prefix_cache = PrefixCache(llama, store, chunk_tokens=CHUNK)
        cache, restored = prefix_cache.restore(ids)
        assert restored == 128
        assert torch.equal(generated(llama, ids, cache=cache), generated(llama, ids))
        # The damaged one is known no longer, so it can be stored again.
        assert prefix_cache.save(ids, reference).result().ok
        assert prefix_cache.restore(ids)[1] == 255


def damage(folder: Path, payload: bytes) -> None:
    """Flip one bit of the stored chunk that begins with `payload`."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("r+b") as file:
                at = file.read().find(payload)
                if at >= 0:
                    file.seek(at + 5)
                    file.write(bytes([payload[5] ^ 1]))
                    return
    raise AssertionError("the payload is in no file")


def test_generate_continues_a_conversation(llama: Any, store: Any) -> None:
    prefix_cache = PrefixCache(llama, store, chunk_tokens=CHUNK)
    ids = prompt(130, batch=2)
    first = prefix_cache.generate(ids, max_new_tokens=80, do_sample=False, pad_token_id=0)
    assert torch.equal(first, generated(llama, ids, max_new_tokens=80))
    following = torch.cat([first, prompt(20, batch=2, seed=5)], dim=1)
    # 209 tokens have passed through the model, the last one generated has not.
    assert prefix_cache.restore(following)[1] == 192
    out = prefix_cache.generate(following, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(out.sequences, generated(llama, following))


def test_a_padding_token_inside_of_a_prompt_is_a_token(llama: Any, store: Any) -> None:
    prefix_cache = PrefixCache(llama, store, chunk_tokens=CHUNK)
    ids = prompt(130)
    ids[0, 30:60] = 0
    for _ in range(2):
        assert torch.equal(prefix_cache.generate(ids, **GREEDY), generated(llama, ids))


def test_restored_caches_do_what_dynamic_caches_do(llama: Any, store: Any) -> None:
    prefix_cache = PrefixCache(llama, store, chunk_tokens=CHUNK)
    ids = prompt(128)
    prefix_cache.save(ids, computed(llama, ids)[0]).result()

    def restored() -> Any:
        return prefix_cache.restore(ids)[0]

    # Generated beyond the room behind the prompt, cut back, copied, and without no_grad.
    long = {"max_new_tokens": 2 * CHUNK, "min_new_tokens": 2 * CHUNK}
    assert torch.equal(generated(llama, ids, cache=restored(), **long), generated(llama, ids, **long))
    cache = restored()
    cache.crop(-27)
    assert torch.equal(generated(llama, ids, cache=cache), generated(llama, ids))
    cache = restored()
    twin = copy.deepcopy(cache)
    other = ids.clone()
    other[0, -1] = 7
    assert torch.equal(generated(llama, other, cache=twin), generated(llama, other))
    assert torch.equal(generated(llama, ids, cache=cache), generated(llama, ids))
    assert llama(ids[:, 127:], cache=restored()).logits.requires_grad
    with torch.inference_mode():
        cache = restored()
    assert torch.equal(generated(llama, ids, cache=cache), generated(llama, ids))
    cache = restored()
    cache.batch_repeat_interleave(2)
    assert torch.equal(generated(llama, ids.repeat(2, 1), cache=cache)[1:], generated(llama, ids))


def test_two_fine_tunes_never_share(llama: Any, store: Any) -> None:
    ids = prompt(128)
    PrefixCache(llama, store, chunk_tokens=CHUNK).save(ids, computed(llama, ids)[0]).result()
    tuned = copy.deepcopy(llama)
    assert PrefixCache(tuned, store, chunk_tokens=CHUNK).restore(ids)[1] == 127
    with torch.no_grad():
        tuned.model.layers[1].mlp.up_proj.weight.view(torch.int32)[3, 5] ^= 1
    assert PrefixCache(tuned, store, chunk_tokens=CHUNK).restore(ids)[1] == 0


def test_a_change_of_the_weights_is_noticed(llama: Any, store: Any) -> None:
    model, ids = copy.deepcopy(llama), prompt(128)
    prefix_cache = PrefixCache(model, store, chunk_tokens=CHUNK)
    prefix_cache.save(ids, computed(model, ids)[0]).result()
    assert prefix_cache.restore(ids)[1] == 127
    with torch.no_grad():
        model.model.norm.weight += 1
    assert prefix_cache.restore(ids)[1] == 0
    model.load_state_dict(llama.state_dict())
    assert prefix_cache.restore(ids)[1] == 127
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 2)
    assert prefix_cache.restore(ids)[1] == 0


def test_what_the_digest_depends_on(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = [weights_digest(llama), weights_digest(tiny(seed=1)), weights_digest(tiny(rms_norm_eps=1e-5))]
    digests.append(weights_digest(tiny(dtype=torch.bfloat16)))
    digests.append(weights_digest(tiny(rope_parameters={"rope_type": "default", "rope_theta": 5e5})))
    digests.append(weights_digest(tiny("qwen2")))
    digests.append(weights_digest(tiny(tie_word_embeddings=True)))
    switched = copy.deepcopy(llama)
    adapter_layer = type(
        "AdapterLayer", (torch.nn.Module,), {"_disable_adapters": False, "_active_adapter": "a"}
    )
    switched.adapter = adapter_layer()
    digests.append(weights_digest(switched))
    switched.adapter._active_adapter = "b"
    digests.append(weights_digest(switched))
    assert len(set(digests)) == len(digests)
    assert all(len(digest) == 32 for digest in digests)
    assert weights_digest(copy.deepcopy(llama)) == digests[0]

    from kvtier.integrations.hf import weights

    monkeypatch.setattr(weights, "SAMPLE_ABOVE", 0)
    monkeypatch.setattr(weights, "SAMPLE_BLOCK", 512)
    sampled, other = tiny(), tiny()
    other.lm_head.weight.data[-1, -1] += 1
    assert weights_digest(sampled) not in digests
    assert weights_digest(sampled) != weights_digest(other)


def test_tenants_never_share(llama: Any, store: Any) -> None:
    ids = prompt(128)
    PrefixCache(llama, store, chunk_tokens=CHUNK, salt="one").save(ids, computed(llama, ids)[0]).result()
    for other in ({"salt": "two"}, {}, {"salt": "one", "lora": "x"}):
        assert PrefixCache(llama, store, chunk_tokens=CHUNK, **other).restore(ids)[1] == 0
    assert PrefixCache(llama, store, chunk_tokens=CHUNK, salt="one").restore(ids)[1] == 127


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


def test_a_payload_lies_as_the_layout_says(llama: Any, store: Any) -> None:
    ids = prompt(CHUNK)
    cache, _ = computed(llama, ids)
    prefix_cache = PrefixCache(llama, store, chunk_tokens=CHUNK)
    prefix_cache.save(ids, cache).result()
    layout = prefix_cache.layout
    with store.read(prefix_cache.keys(ids)[0]).result() as lease:
        payload = lease.views[0].view(np.float32).reshape(layout.shape).copy()
    for index, layer in enumerate(cache.layers):
        assert np.array_equal(payload[index, 0], layer.keys[0].transpose(0, 1))
        assert np.array_equal(payload[index, 1], layer.values[0].transpose(0, 1))
