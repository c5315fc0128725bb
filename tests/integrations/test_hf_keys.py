"""What the transformers integration's keys depend on: weights, adapters and tenants never share."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hf_models import CHUNK, computed, prompt, tiny  # noqa: E402
from kvtier import Owner  # noqa: E402
from kvtier.integrations.hf import PrefixCache, weights_digest  # noqa: E402


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


def test_a_cache_owns_what_it_saves(llama: Any, store: Any) -> None:
    ids = prompt(128)
    cache = PrefixCache(llama, store, chunk_tokens=CHUNK, salt="one", tenant="acme", ttl=3600)
    cache.save(ids, computed(llama, ids)[0]).result()
    PrefixCache(llama, store, chunk_tokens=CHUNK).save(ids, computed(llama, ids)[0]).result()
    owner = Owner(cache.namespace().digest(), "acme")
    nameless = Owner(PrefixCache(llama, store, chunk_tokens=CHUNK).namespace().digest())
    found = {row.id: row for row in store.owners()}
    assert set(found) == {owner.id, nameless.id}
    assert found[owner.id].tenant == "acme"
    index = store._core.dram.index
    with store._core.lock:
        assert all(index.expires_at[row] for row in index.rows_of({owner.id}))
    assert store.delete_all(tenant="acme").result() == found[owner.id].chunks
    assert cache.restore(ids)[1] == 0
    assert PrefixCache(llama, store, chunk_tokens=CHUNK).restore(ids)[1] == 127


def test_tenants_never_share(llama: Any, store: Any) -> None:
    ids = prompt(128)
    PrefixCache(llama, store, chunk_tokens=CHUNK, salt="one").save(ids, computed(llama, ids)[0]).result()
    for other in ({"salt": "two"}, {}, {"salt": "one", "lora": "x"}):
        assert PrefixCache(llama, store, chunk_tokens=CHUNK, **other).restore(ids)[1] == 0
    assert PrefixCache(llama, store, chunk_tokens=CHUNK, salt="one").restore(ids)[1] == 127
