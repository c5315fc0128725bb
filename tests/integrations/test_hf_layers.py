"""A prefix that is loaded layer by layer beside the model: the same tokens, whatever happens on the way."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from devices import instant_device  # noqa: E402
from hf_models import CHUNK, GREEDY, assert_same_kv, computed, generated, prompt, tiny  # noqa: E402
from kvtier.config import MIB  # noqa: E402
from kvtier.format import SLAB_HEADER_BYTES  # noqa: E402
from kvtier.integrations.hf import PrefixCache, kv_layout  # noqa: E402
from kvtier.store import flight  # noqa: E402
from kvtier.testing.faults import Fault  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtier.testing.emulated import EmulatedDevice

LAYERS = 8
CHUNKS = 4
TOKENS = CHUNKS * CHUNK + 9


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny(num_hidden_layers=LAYERS, head_dim=64)


@pytest.fixture(scope="module")
def shared_device() -> Iterator[EmulatedDevice]:
    yield from instant_device("64MiB")


@pytest.fixture
def device(shared_device: EmulatedDevice) -> Iterator[EmulatedDevice]:
    yield shared_device
    shared_device.clear_faults()
    for folder in shared_device.paths[0].iterdir():
        shutil.rmtree(folder)


@pytest.fixture
def stored(
    device: EmulatedDevice, open_store: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., PrefixCache]:
    """`stored(model, ids, **settings)`: a cache that has the prompt on the device only, in chunks whose
    layers are a piece each.
    """

    def make(model: Any, ids: Any, **settings: Any) -> PrefixCache:
        chunk_bytes = kv_layout(model, chunk_tokens=CHUNK).chunk_bytes
        monkeypatch.setattr(flight, "PIECE_BYTES", chunk_bytes // LAYERS)
        settings = {
            **{"paths": (device.paths[0] / "store",), "capacity": 16 * MIB, "dram": 16 * MIB},
            **{"chunk_bytes": chunk_bytes, "io_window": chunk_bytes},
            **settings,
        }
        store = open_store(**settings)
        cache, _ = computed(model, ids)
        prefix_cache = PrefixCache(model, store, chunk_tokens=CHUNK)
        assert prefix_cache.save(ids, cache, until="disk").result(20).ok
        store.close()
        return PrefixCache(model, open_store(**settings), chunk_tokens=CHUNK)

    return make


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("kind", "dtype"), [("llama", "float32"), ("qwen3", "bfloat16")])
def test_it_is_what_a_restore_and_then_a_prefill_give(stored: Any, kind: str, dtype: str, batch: int) -> None:
    model = tiny(kind, dtype=getattr(torch, dtype), num_hidden_layers=LAYERS, head_dim=64)
    ids = prompt(TOKENS, batch)
    prefix_cache = stored(model, ids)
    logits, cache, restored = prefix_cache.restore_and_prefill(ids)
    assert restored == CHUNKS * CHUNK
    expected, count = prefix_cache.restore(ids)
    assert count == restored
    assert torch.equal(logits, prefix_cache.prefill(ids, expected))
    assert_same_kv(cache, expected, TOKENS)
    assert torch.equal(prefix_cache.generate(ids, **GREEDY), generated(model, ids))
    assert prefix_cache.restore_and_prefill(ids)[2] == restored, "from DRAM"


def test_layers_compute_while_others_are_read(model: Any, stored: Any, device: Any) -> None:
    ids = prompt(TOKENS)
    prefix_cache = stored(model, ids)
    # By its place: the order in which threads read is theirs.
    index = prefix_cache._store._core.paths[0].tier.index
    layer_bytes = index.nbytes[0] // LAYERS
    fourth = SLAB_HEADER_BYTES + index.offset[0] + 3 * layer_bytes
    hang = device.inject(Fault(op="read", file="slab", offset=fourth, length=layer_bytes, hang=True))
    through = threading.Semaphore(0)
    hooks = [layer.register_forward_hook(lambda *_: through.release()) for layer in model.model.layers]
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(prefix_cache.restore_and_prefill(ids)))
    thread.start()
    try:
        for _ in range(3):
            assert through.acquire(timeout=20)
        assert device.stats()[0].hanging, "what the fourth layer waits for"
        assert not found
    finally:
        hang.remove()
        thread.join(20)
        for hook in hooks:
            hook.remove()
    logits, _, restored = found[0]
    assert restored == CHUNKS * CHUNK
    cache, _ = prefix_cache.restore(ids)
    assert torch.equal(logits, prefix_cache.prefill(ids, cache))


@pytest.mark.parametrize("fault", [{"errno": errno.EIO}, {"flip_bit": 4097}], ids=["EIO", "flip"])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_bad_layer_is_never_attended_to(
    model: Any, stored: Any, device: Any, fault: dict[str, int], layer: int
) -> None:
    """A part of one chunk is bad: the model recomputes from there on, whatever it had computed before."""
    ids = prompt(TOKENS)
    prefix_cache = stored(model, ids)
    device.inject(Fault(op="read", file="slab", nth=CHUNKS * layer + 3, count=1, **fault))
    logits, cache, restored = prefix_cache.restore_and_prefill(ids)
    assert restored < CHUNKS * CHUNK
    device.clear_faults()
    expected, plain = computed(model, ids)
    torch.testing.assert_close(logits, plain, atol=1e-3, rtol=1e-3)
    assert_same_kv(cache, expected, restored)
    for got, want in zip(cache.layers, expected.layers, strict=True):
        torch.testing.assert_close(got.keys, want.keys, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(got.values, want.values, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("nth", [1, 6, 14, 22, 30])
def test_generate_says_the_same_whatever_fails(model: Any, stored: Any, device: Any, nth: int) -> None:
    ids = prompt(TOKENS, batch=2)
    prefix_cache = stored(model, ids)
    device.inject(Fault(op="read", file="slab", nth=nth, count=5, errno=errno.EIO))
    assert torch.equal(prefix_cache.generate(ids, **GREEDY), generated(model, ids))


def test_a_deadline_in_mid_load_recomputes_all(model: Any, stored: Any, device: Any) -> None:
    ids = prompt(TOKENS)
    prefix_cache = stored(model, ids, get_timeout=3.0)
    device.inject(Fault(op="read", file="slab", nth=CHUNKS * 4 + 1, hang=True))
    before = time.monotonic()
    logits, cache, restored = prefix_cache.restore_and_prefill(ids)
    assert time.monotonic() - before >= 2.5
    assert restored == 0
    device.clear_faults()
    expected, plain = computed(model, ids)
    torch.testing.assert_close(logits, plain, atol=1e-3, rtol=1e-3)
    assert_same_kv(cache, expected, TOKENS)


def test_an_error_of_the_models_own_ends_the_load(model: Any, stored: Any) -> None:
    ids = prompt(TOKENS)
    prefix_cache = stored(model, ids)

    def fails(*_: Any) -> None:
        raise RuntimeError("of the model's own")

    hook = model.model.layers[2].register_forward_hook(fails)
    with pytest.raises(RuntimeError, match="model's own"):
        prefix_cache.restore_and_prefill(ids)
    hook.remove()
    assert prefix_cache.restore_and_prefill(ids)[2] == CHUNKS * CHUNK


@pytest.mark.parametrize("settings", [{"kind": "files"}, {"dram": 0}, {"check_dram": True}], ids=str)
def test_stores_that_cannot_read_by_layer_restore_all_the_same(
    model: Any, stored: Any, settings: dict[str, Any]
) -> None:
    ids = prompt(TOKENS)
    prefix_cache = stored(model, ids, **settings)
    logits, _, restored = prefix_cache.restore_and_prefill(ids)
    assert restored == CHUNKS * CHUNK
    cache, _ = prefix_cache.restore(ids)
    assert torch.equal(logits, prefix_cache.prefill(ids, cache))


def test_without_anything_stored_all_is_computed(llama: Any, store: Any) -> None:
    ids = prompt(150, batch=2)
    prefix_cache = PrefixCache(llama, store, chunk_tokens=CHUNK)
    logits, cache, restored = prefix_cache.restore_and_prefill(ids)
    assert restored == 0
    expected, plain = computed(llama, ids)
    torch.testing.assert_close(logits, plain, atol=1e-3, rtol=1e-3)
    assert_same_kv(cache, expected, 150)
    prefix_cache.save(ids, cache).result()
    full = ids[:, :128]
    logits, cache, restored = prefix_cache.restore_and_prefill(full)
    assert restored == 127
    torch.testing.assert_close(logits, computed(llama, full)[1], atol=1e-3, rtol=1e-3)
