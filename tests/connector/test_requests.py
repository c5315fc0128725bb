"""Keys of requests: what must differ does, what may be shared is, however the tokens come in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvtier
from engine_sim import CHUNK_TOKENS, DIGEST, blocks, compute, engine_tensors, prompt
from kvtier.errors import InvalidRequest

TOKENS = prompt(300)
HASHES = [bytes([i]) * 32 for i in range(18)]


def test_keys_are_those_of_the_namespace(open_store: Any, connect: Any) -> None:
    """Another integration with the same layout makes the same keys."""
    connector, _ = connect(open_store())
    layout = kvtier.KVLayout(layers=2, kv_heads=2, head_dim=32, dtype="float32", chunk_tokens=CHUNK_TOKENS)
    namespace = kvtier.Namespace(model="simulated", weights=DIGEST, layout=layout)
    assert connector.layout == layout
    assert connector.namespace() == namespace
    assert connector.request(TOKENS).keys == namespace.chunk_keys(TOKENS)
    assert connector.request(np.array(TOKENS)).keys == namespace.chunk_keys(TOKENS)


@pytest.mark.parametrize("steps", [[0], [1, 64], [63, 65, 66], [100, 200, 299], list(range(0, 300, 7))])
def test_tokens_may_come_bit_by_bit(open_store: Any, connect: Any, steps: list[int]) -> None:
    connector, _ = connect(open_store())
    whole = connector.request(TOKENS, extra=b"image")
    request = connector.request([], extra=b"image")
    for start, end in zip([0, *steps], [*steps, len(TOKENS)], strict=True):
        request.extend(TOKENS[start:end])
    assert (request.keys, request.tokens) == (whole.keys, 300)


def test_hashes_stand_for_several_blocks(open_store: Any, connect: Any) -> None:
    connector, tensors = connect(open_store())
    namespace = connector.namespace().digest()
    request = connector.request(hashes=HASHES[:10])
    assert request.keys == kvtier.derived_keys([HASHES[3], HASHES[7]], namespace=namespace)
    assert request.tokens == 160
    request.extend(HASHES[10:13])
    request.extend(HASHES[13:])
    assert request.keys == kvtier.derived_keys(HASHES[3::4], namespace=namespace)
    table = blocks(18, seed=7)
    compute(tensors, TOKENS[:288], table)
    with request:
        assert len(connector.save(request, table).result(20).status) == 4
        assert connector.match(request, computed=32, limit=200) == 160
        assert connector.load(request, blocks(18), 32, 192).result(20).tokens == 160


def test_hashes_of_chunks_are_the_last_of_their_blocks(open_store: Any, connect: Any) -> None:
    connector, _ = connect(open_store())
    request = connector.request(chunk_hashes=HASHES[3:4], extra=b"era")
    request.extend(HASHES[7:16:4])
    assert request.keys == connector.request(hashes=HASHES, extra=b"era").keys
    assert request.tokens == 256


def test_nothing_crosses(open_store: Any, connect: Any) -> None:
    """Adapters, tenants, images, ranks, weights and formats: what one stored, no other finds."""
    store = open_store()
    tensors = engine_tensors()
    first, _ = connect(store, tensors)
    others = [
        connect(store, tensors, **options)[0]
        for options in (
            {"model": "other"},
            {"weights": bytes(32)},
            {"tp_size": 2},
            {"tp_size": 2, "tp_rank": 1},
            {"pp_size": 2},
            {"kv_format": "per-head scales"},
            {"algorithm": "xxh3_128"},
            {"chunk_tokens": 32},
        )
    ]
    makers: list[Any] = []
    for connector in (first, *others):
        makers += [(connector, {}), (connector, {"hashes": HASHES})]
    for options in ({"lora": "a"}, {"salt": "a"}, {"extra": b"a"}, {"lora": "b", "salt": "a"}):
        makers += [(first, options), (first, {**options, "hashes": HASHES})]
    seen: set[bytes] = set()
    for connector, options in makers:
        tokens = None if "hashes" in options else TOKENS
        keys = set(connector.request(tokens, **options).keys)
        assert len(keys) >= 4
        assert not keys & seen, options
        seen |= keys
    table = blocks(19)
    compute(tensors, TOKENS, table)
    with first.request(TOKENS, salt="tenant") as request:
        assert first.save(request, table).result(20).ok
    with first.request(TOKENS) as plain, first.request(TOKENS, salt="other") as other:
        assert first.match(plain) == first.match(other) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs tokens, hashes or chunk_hashes"),
        ({"tokens": [1], "hashes": HASHES}, "needs tokens, hashes or chunk_hashes"),
        ({"tokens": [-1]}, "needs integers from 0"),
        ({"tokens": [1.5]}, "needs integers from 0"),
        ({"tokens": [1] * 64, "extra": "text"}, "extra is str, needs bytes"),
        ({"tokens": [1], "salt": b"bytes"}, "salt is b'bytes', needs a string"),
        ({"hashes": ["text"] * 4}, "needs bytes"),
        ({"hashes": [*HASHES[:4], *([b"short"] * 4)]}, "of one length"),
    ],
)
def test_requests_that_are_refused(
    open_store: Any, connect: Any, options: dict[str, Any], message: str
) -> None:
    connector, _ = connect(open_store())
    with pytest.raises(InvalidRequest, match=message):
        connector.request(**options)
