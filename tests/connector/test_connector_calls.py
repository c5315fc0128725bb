"""Wrong calls are refused with what was wrong, and nothing happens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine_sim import CHUNK_TOKENS, blocks, compute, connector_of, engine_tensors, prompt
from kvtier.errors import InvalidRequest, StoreClosed

TOKENS = prompt(300)
TABLE = blocks(19, seed=7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((TABLE, 8, 64), "start is 8, needs whole blocks of 16 tokens"),
        ((TABLE, 0, 100), "end is 100, needs whole blocks"),
        ((TABLE, -16, 64), "start is -16"),
        ((TABLE, 0.0, 64), "start is 0.0, needs a whole number"),
        ((TABLE, 64, 32), "start is 64, behind end, which is 32"),
        ((TABLE, 0, 272), "end is 272, but the request has full chunks up to token 256"),
        ((TABLE[:7], 0, 128), "has 7 blocks of 16 tokens, needs all up to token 128"),
        (([[1, 2]], 0, 64), r"shape \(1, 2\)"),
        ((["a"] * 4, 0, 64), "needs the ids"),
        (([0, 1, 2, 64], 0, 64), "names block 64, needs ids from 0 to 63"),
        (([0, 1, -1, 3], 0, 64), "names block -1"),
        (([0, 1, 2, 1], 0, 64), "names a block twice"),
    ],
)
def test_loads_that_are_refused(
    open_store: Any, connect: Any, arguments: tuple[Any, ...], message: str
) -> None:
    connector, tensors = connect(open_store())
    compute(tensors, TOKENS, TABLE)
    before = tensors.plain.copy()
    with connector.request(TOKENS) as request:
        assert connector.save(request, TABLE).result(20).ok
        connector.match(request)
        with pytest.raises(InvalidRequest, match=message):
            connector.load(request, *arguments)
    assert (tensors.plain == before).all()
    assert connector.stats()["load.requested"] == 0


def test_a_block_may_be_saved_twice(open_store: Any, connect: Any) -> None:
    """Its content is the same for both, whoever the engine shares it with."""
    connector, _ = connect(open_store())
    with connector.request([1] * 64) as request:
        assert connector.save(request, [3, 3, 3, 3]).result(20).ok


def test_other_calls_that_are_refused(open_store: Any, connect: Any) -> None:
    connector, _ = connect(open_store(paths=(), capacity=0))
    with connector.request(TOKENS) as request:
        for call, message in (
            (lambda: connector.match(request, computed=5), "computed is 5, needs whole blocks"),
            (lambda: connector.match(request, computed=True), "computed is True"),
            (lambda: connector.load(request, TABLE, 0, 64, timeout=0), "timeout is 0, needs seconds above 0"),
            (lambda: connector.save(request, TABLE, until="disk"), "until is 'disk'"),
            (lambda: connector.save(request, TABLE, until="tape"), "until is 'tape'"),
            (lambda: connector.save(request, TABLE, timeout=True), "timeout is True"),
            (lambda: connector.save(request, TABLE, ttl=-1), "ttl is -1"),
            (lambda: connector.save(request, TABLE[:3]), "has 3 blocks of 16 tokens"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                call()
    assert connector.stats()["save.requested"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_tokens": 40}, "chunk_tokens is 40, needs a multiple of the 16 tokens of a block"),
        ({"chunk_tokens": 0}, "needs a whole number of at least 1"),
        ({"chunk_tokens": 64.0}, "needs a whole number of at least 1"),
        ({"chunk_tokens": 4096}, "open it with chunk_bytes of that size"),
        ({"block_tokens": 8}, "block_tokens is 8, but the token axis has 16"),
        ({"weights": b"short"}, "weights is 5 bytes"),
        ({"codec": "zip"}, "codec"),
        ({"tp_rank": 2}, "tp_rank is 2"),
    ],
)
def test_connectors_that_are_refused(open_store: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        connector_of(open_store(), engine_tensors(), **options)


def test_dtypes_that_are_refused(open_store: Any) -> None:
    with pytest.raises(InvalidRequest, match="dtype is 'complex64'"):
        connector_of(open_store(), engine_tensors(dtype=np.complex64))


def test_a_closed_connector_or_store(open_store: Any, connect: Any) -> None:
    store = open_store()
    connector, _ = connect(store)
    request = connector.request(TOKENS)
    connector.match(request)
    connector.close()
    connector.close()
    for call in (
        lambda: connector.match(request),
        lambda: connector.load(request, TABLE, 0, 64),
        lambda: connector.save(request, TABLE),
        connector.__enter__,
    ):
        with pytest.raises(StoreClosed, match="connector is closed"):
            call()
    connector.fence([1])
    request.close()
    other, _ = connect(store)
    held = other.request(TOKENS)
    other.match(held)
    store.close()
    with pytest.raises(StoreClosed):
        other.match(held)
    with pytest.raises(StoreClosed):
        other.load(held, TABLE, 0, CHUNK_TOKENS)
    with pytest.raises(StoreClosed):
        other.save(held, TABLE)
    held.close()
    with pytest.raises(StoreClosed):
        connector_of(store, engine_tensors())
