"""Saves and loads of any range, layout, block and chunk size, against a set of keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvtier
from engine_kv import KNOWN
from engine_sim import compute, connector_of, engine_tensors, kv_of

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["save", "load"]),
        st.integers(0, 3),  # the request
        st.integers(0, 24),  # from and to: blocks
        st.integers(0, 24),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("tier", ["dram", "disk"])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layout=st.sampled_from(sorted(KNOWN)),
    block_tokens=st.sampled_from([1, 2, 16]),
    per_chunk=st.integers(1, 5),
    dtype=st.sampled_from([np.float32, np.float16, np.uint8]),
    operations=OPERATIONS,
    seed=st.integers(0, 5),
    by_layer=st.booleans(),
)
def test_every_load_is_what_was_saved(
    tmp_path_factory: pytest.TempPathFactory,
    tier: str,
    layout: str,
    block_tokens: int,
    per_chunk: int,
    dtype: Any,
    operations: list[tuple[str, int, int, int]],
    seed: int,
    by_layer: bool,
) -> None:
    draw = np.random.default_rng(seed)
    tensors = engine_tensors(layout, dtype, token=block_tokens, block=60, dim=8)
    chunk_tokens = block_tokens * per_chunk
    trunk = draw.integers(0, 2, 24 * block_tokens).tolist()
    prompts = [trunk, trunk[: 9 * block_tokens], trunk[: 5 * block_tokens] + [7] * 40, [3, *trunk]]
    place: dict[str, Any] = {"dram": "8MiB", "chunk_bytes": 1 << 16}
    if tier == "disk":
        place = {**place, "dram": 0, "capacity": "16MiB", "landing": "1MiB"}
    path = tmp_path_factory.mktemp("model") if tier == "disk" else None
    stored: set[bytes] = set()
    with (
        kvtier.open(path, **place) as store,
        connector_of(store, tensors, chunk_tokens=chunk_tokens) as connector,
    ):
        for kind, number, one, two in operations:
            tokens = prompts[number]
            whole = len(tokens) // block_tokens
            first, last = sorted((min(one, whole), min(two, whole)))
            table = draw.permutation(60)[:whole]
            with connector.request(tokens) as request:
                if kind == "save":
                    compute(tensors, tokens, table)
                    start, end = first * block_tokens, last * block_tokens
                    until: Any = tier
                    result = connector.save(request, table, start, end, until=until, timeout=20.0).result(20)
                    expected = request.keys[start // chunk_tokens : end // chunk_tokens]
                    assert len(result.status) == len(expected)
                    assert result.ok
                    stored |= set(expected)
                    continue
                keys = request.keys[first * block_tokens // chunk_tokens :]
                there = next((i for i, key in enumerate(keys) if key not in stored), len(keys))
                reach = (first * block_tokens // chunk_tokens + there) * chunk_tokens
                reach = min(reach, last * block_tokens)
                found = connector.match(request, computed=first * block_tokens, limit=last * block_tokens)
                assert found == max(0, reach - first * block_tokens)
                tensors.plain[:] = 1
                start, end = first * block_tokens, first * block_tokens + found
                load = connector.load(request, table, start, end, by_layer=by_layer)
                assert load.wait_layer(draw.integers(0, 2), 20) == found
                loaded = load.result(20)
            assert (loaded.tokens, loaded.invalid_blocks.size) == (found, 0)
            filled = table[start // block_tokens : end // block_tokens]
            assert (tensors.tokens(filled) == kv_of(tokens, tensors)[:, :, start:end]).all()
            others = np.setdiff1d(np.arange(60), filled)
            assert (tensors.tokens(others) == 1).all()
