"""The transformers integration, on real if tiny models: what is restored is what was computed."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import kvtier  # noqa: E402
from hf_models import (  # noqa: E402
    CHUNK,
    GREEDY,
    assert_same_kv,
    computed,
    generated,
    kv,
    prompt,
    tiny,
)
from kvtier.integrations.hf import PrefixCache, kv_layout  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

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
        lambda *args: gathered.extend(args[-1].tolist()) or real(*args),
    )
    result = prefix_cache.save(ids, cache).result()
    assert gathered == [[0, 2], [0, 3]]
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


def test_a_codec_changes_nothing_but_the_disk(tmp_path: Path) -> None:
    model = tiny("llama", dtype=torch.bfloat16)
    ids = prompt(512)
    reference, _ = computed(model, ids)
    options = {"capacity": "64MiB", "dram": 0, "chunk_bytes": "1MiB"}
    with kvtier.open(tmp_path, **options) as store:
        prefix_cache = PrefixCache(model, store, chunk_tokens=256, codec="lz4-16bit")
        assert prefix_cache.save(ids, reference, until="disk").result().ok
        stats = store.stats()
        assert (stats["codec.chunks"], stats["codec.not_smaller"]) == (2, 0)
        assert stats["codec.stored_bytes"] < stats["codec.payload_bytes"]
    with kvtier.open(tmp_path, **options) as store:
        cache, restored = PrefixCache(model, store, chunk_tokens=256).restore(ids)
        assert restored == 511
        assert_same_kv(cache, reference, restored)
        with pytest.raises(kvtier.InvalidRequest, match="codec is 'zip'"):
            PrefixCache(model, store, codec="zip")


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
