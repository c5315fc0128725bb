"""An engine without a model: its blocks, and KV that depends on all tokens before, as a model's does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from engine_kv import KNOWN, EngineTensors, laid_out
from kvtier.connector import Connector

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    import kvtier

SIZES = {"layer": 2, "plane": 2, "block": 64, "token": 16, "head": 2, "dim": 32}
CHUNK_TOKENS = 64  # 64 KiB of float32, the chunk of a small store
DIGEST = bytes(range(32))


def engine_tensors(
    layout: str = "NHD, keys and values apart", dtype: Any = np.float32, **sizes: int
) -> EngineTensors:
    memory, given = KNOWN[layout]
    return laid_out(memory, {**SIZES, **sizes}, given=given, dtype=dtype)


def connector_of(store: kvtier.Store, tensors: EngineTensors, **options: Any) -> Connector:
    settings = {"model": "simulated", "weights": DIGEST, "chunk_tokens": CHUNK_TOKENS, **options}
    return Connector(store, tensors.kv_caches, axes=tensors.axes, **settings)


def prompt(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, count).tolist()


def kv_of(tokens: Sequence[int], tensors: EngineTensors) -> npt.NDArray[Any]:
    """The KV of tokens, (layers, planes, tokens, heads, dim): small whole numbers, exact in any dtype."""
    state, states = 1, []
    for token in tokens:
        state = (state * 6364136223846793005 + token + 1442695040888963407) % 2**64
        states.append(state)
    layers, planes, _, _, heads, dim = tensors.plain.shape
    places = np.arange(layers * planes * heads * dim, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (np.array(states, np.uint64)[:, None] ^ places) >> np.uint64(57)
    shaped = mixed.reshape(len(states), layers, planes, heads, dim)
    return shaped.transpose(1, 2, 0, 3, 4).astype(tensors.plain.dtype)


def compute(tensors: EngineTensors, tokens: Sequence[int], table: Sequence[int]) -> None:
    """Fill the blocks of all full blocks of tokens."""
    size = tensors.plain.shape[3]
    count = len(tokens) // size
    if count:
        tensors.fill(list(table)[:count], kv_of(tokens[: count * size], tensors))


def blocks(count: int, seed: int = 0, of: int = SIZES["block"]) -> list[int]:
    """Distinct ids in no order."""
    return np.random.default_rng(seed).permutation(of)[:count].tolist()
