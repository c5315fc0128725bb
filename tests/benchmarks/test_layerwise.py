"""`benchmarks/layerwise.py` with a tiny model: its figures are of the same work, done both ways."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hf_models import computed, prompt, tiny  # noqa: E402
from kvtier.integrations.hf import kv_layout  # noqa: E402
from kvtier.testing.build import obstacle  # noqa: E402

CHUNK = 256


def test_both_ways_come_to_the_same() -> None:
    if reason := obstacle():
        pytest.skip(reason)
    from benchmarks.layerwise import measure

    model = tiny(num_hidden_layers=4, head_dim=128)
    ids = prompt(2 * CHUNK + 30)
    prefix = ids[:, : 2 * CHUNK]
    cache, _ = computed(model, prefix)
    nbytes = 2 * kv_layout(model, chunk_tokens=CHUNK).chunk_bytes
    row = measure(model, ids, prefix, cache, 1.0, CHUNK, 0.05, rounds=2)
    assert row["identical"]
    assert row["MB/s"] == pytest.approx(nbytes / 0.05 / 1e6)
    assert {len(times) for times in row["all"].values()} == {2}
    assert row["load"] >= 0.05, "the device was read, and took its time"
    assert row["in turn"] >= row["load"]
