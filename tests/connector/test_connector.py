"""Prompts go out of an engine's blocks and come back into others, on every kind of store."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from engine_sim import CHUNK_TOKENS, blocks, compute, engine_tensors, kv_of, prompt
from kvtier import Status, TierName
from kvtier.store.store import Store

TOKENS = prompt(300)  # four chunks, and some


def saved(connector: Any, tensors: Any, tokens: list[int] = TOKENS, **options: Any) -> Any:
    table = blocks(-(-len(tokens) // connector.block_tokens), seed=7)
    compute(tensors, tokens, table)
    with connector.request(tokens) as request:
        return connector.save(request, table, **options).result(20)


@pytest.mark.parametrize("dram", [0, 2 << 20])
def test_a_prompt_comes_back_after_a_restart(open_store: Any, connect: Any, dram: int) -> None:
    connector, tensors = connect(open_store(dram=dram))
    assert saved(connector, tensors, until="disk").ok
    connector.close()
    connector._store.close()
    connector, tensors = connect(open_store(dram=dram))
    table = blocks(19, seed=1)
    with connector.request(TOKENS) as request:
        found = connector.match(request, limit=len(TOKENS) - 1)
        assert found == 256
        load = connector.load(request, table, 0, found)
        result = load.result(20)
    assert load.released
    assert (result.tokens, result.invalid_blocks.tolist()) == (256, [])
    assert (tensors.tokens(table[:16]) == kv_of(TOKENS[:256], tensors)).all()
    others = [block for block in range(64) if block not in table[:16]]
    assert not tensors.tokens(others).any(), "no other block was written to"
    assert connector.stats()["load.hit"] == 4


@pytest.mark.parametrize(("computed", "limit"), [(0, 299), (16, 299), (48, 208), (64, 240), (192, 299)])
def test_a_load_begins_and_ends_within_chunks(
    open_store: Any, connect: Any, computed: int, limit: int
) -> None:
    """What the engine has computed may be shared by others: it is not written to."""
    connector, tensors = connect(open_store())
    saved(connector, tensors)
    tensors.plain[:] = 5
    table = blocks(19, seed=1)
    with connector.request(TOKENS) as request:
        found = connector.match(request, computed=computed, limit=limit)
        assert found == min(256, limit // 16 * 16) - computed
        result = connector.load(request, table, computed, computed + found).result(20)
    assert result.tokens == found
    span = slice(computed // 16, (computed + found) // 16)
    expected = kv_of(TOKENS[:256], tensors)[:, :, computed : computed + found]
    assert (tensors.tokens(table[span]) == expected).all()
    others = [block for block in range(64) if block not in table[span]]
    assert (tensors.tokens(others) == 5).all()


@pytest.mark.parametrize(("dram", "check_dram"), [(0, False), (2 << 20, False), (2 << 20, True)])
def test_invariant_10_a_load_says_how_many_tokens_each_tier_brought(
    open_store: Any, connect: Any, dram: int, check_dram: bool
) -> None:
    connector, tensors = connect(open_store(dram=dram))
    saved(connector, tensors, until="disk")
    connector.close()
    connector._store.close()
    store = open_store(dram=dram, check_dram=check_dram)
    connector, tensors = connect(store)
    with connector.request(TOKENS) as request:
        store.prefetch(request.keys[:2]).result(20)
        # from within the first chunk to within the last: 48 + 64 tokens, then 64 + 48
        result = connector.load(request, blocks(19, seed=1), 16, 240).result(20)
        assert result.by_tier == {
            TierName.DRAM: 112 if dram else 0,
            TierName.DISK: 112 if dram else 224,
        }
        assert sum(result.by_tier.values()) == result.tokens == 224
        store.delete(request.keys[1:2]).result(20)
        cut = connector.load(request, blocks(19, seed=1), 0, 256).result(20)
        assert sum(cut.by_tier.values()) == cut.tokens == 64
        nothing = connector.load(request, blocks(19, seed=1), 64, 64).result(20)
        assert nothing.by_tier == {TierName.DRAM: 0, TierName.DISK: 0}
    numbers = connector.stats()
    assert numbers["load.hit"] == numbers["hits.dram"] + numbers["hits.disk"]


def test_a_match_is_memory_and_counts_what_is_beyond(open_store: Any, connect: Any) -> None:
    connector, tensors = connect(open_store())
    saved(connector, tensors)
    longer = connector.request([*TOKENS, *prompt(200, seed=3)])
    other = connector.request([1, *TOKENS])
    with longer, other:
        assert connector.match(longer) == 256
        assert connector.match(longer, computed=256) == 0
        assert connector.match(longer, computed=288) == 0
        assert connector.match(longer, limit=10) == 0
        assert connector.match(other) == 0
    assert connector.match(connector.request(TOKENS[:63])) == 0, "no full chunk"


def test_a_prompt_that_grows_is_saved_bit_by_bit(open_store: Any, connect: Any) -> None:
    connector, tensors = connect(open_store())
    table = blocks(19, seed=7)
    compute(tensors, TOKENS, table)
    with connector.request(TOKENS[:100]) as request:
        first = connector.save(request, table[:7]).result(20)
        assert len(first.status) == 1
        request.extend(TOKENS[100:128])
        request.extend(np.array(TOKENS[128:200]))
        second = connector.save(request, table, 64, 192).result(20)
        assert second.status.tolist() == [Status.STORED] * 2
        again = connector.save(request, table).result(20)
        assert again.status.tolist() == [Status.KNOWN] * 3
        assert len(connector.save(request, table, 192, 192).result(20).status) == 0
        with connector.request(TOKENS) as whole:
            assert whole.keys[:3] == request.keys
            assert connector.match(whole) == 192
    assert connector.stats()["save.known"] == 3


def test_a_save_that_begins_within_a_chunk_saves_all_of_it(open_store: Any, connect: Any) -> None:
    connector, tensors = connect(open_store())
    table = blocks(19, seed=7)
    compute(tensors, TOKENS, table)
    with connector.request(TOKENS) as request:
        assert connector.save(request, table, 48, 144).result(20).status.tolist() == [Status.STORED] * 2
        assert connector.match(request) == 128


def test_engines_with_other_blocks_share_plain_chunks(open_store: Any, connect: Any) -> None:
    store = open_store()
    small, tensors = connect(store, engine_tensors(token=8))
    saved(small, tensors)
    large, others = connect(store, engine_tensors("NHD, plane first", token=32))
    with large.request(TOKENS) as request:
        assert large.match(request) == 256
        assert large.load(request, range(8), 0, 256).result(20).tokens == 256
    assert (others.tokens(range(8)) == kv_of(TOKENS[:256], others)).all()
    by_head, _ = connect(store, engine_tensors("HND, plane first"))
    with by_head.request(TOKENS) as request:
        assert by_head.match(request) == 0, "its bytes are ordered in another way"


def test_transfers_may_be_awaited(open_store: Any, connect: Any) -> None:
    connector, tensors = connect(open_store())

    async def run() -> Any:
        table = blocks(19, seed=7)
        compute(tensors, TOKENS, table)
        with connector.request(TOKENS) as request:
            await connector.save(request, table)
            found = connector.match(request)
            loads = [connector.load(request, blocks(19, seed=i), 0, found) for i in range(3)]
            return await asyncio.gather(*loads)

    assert [result.tokens for result in asyncio.run(run())] == [256] * 3


def test_many_threads_load_and_save_at_once(open_store: Any, connect: Any) -> None:
    connector, tensors = connect(open_store(dram=4 << 20), engine_tensors(block=256))
    faults: list[object] = []

    def work(number: int) -> None:
        own = list(range(number * 32, number * 32 + 32))
        tokens = TOKENS[:64] + prompt(128, seed=number)
        expected = kv_of(tokens, tensors)
        try:
            for _ in range(10):
                with connector.request(tokens) as request:
                    compute(tensors, tokens, own[:12])
                    connector.save(request, own[:12]).wait_copied()
                    tensors.fill(own[:12], np.zeros_like(expected))
                    found = connector.match(request)
                    result = connector.load(request, own[16:28], 0, found).result(20)
                    held = tensors.tokens(own[16:28])[:, :, : result.tokens]
                    if not (held == expected[:, :, : result.tokens]).all():
                        faults.append("wrong bytes")
                    if result.tokens < found:
                        faults.append(result)
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults


def test_a_prompt_larger_than_dram_is_loaded_whole(open_store: Any, connect: Any) -> None:
    """What is pinned may hold all of DRAM: the rest comes by way of landing slots."""
    connector, tensors = connect(open_store(dram=4 * 65536), engine_tensors(block=128))
    tokens = prompt(20 * CHUNK_TOKENS)
    table = blocks(80, seed=7, of=128)
    compute(tensors, tokens, table)
    with connector.request(tokens) as request:
        assert connector.save(request, table, until="disk", timeout=20.0).result(20).ok
        tensors.plain[:] = 0
        found = connector.match(request)
        assert found == 20 * CHUNK_TOKENS
        result = connector.load(request, table, 0, found).result(20)
    assert result.tokens == found, result
    assert (tensors.tokens(table) == kv_of(tokens, tensors)).all()


def test_what_is_matched_is_there_when_it_is_loaded(open_store: Any, connect: Any) -> None:
    connector, tensors = connect(open_store(paths=(), capacity=0, dram=8 * 65536), engine_tensors(block=128))
    saved(connector, tensors)
    others = prompt(8 * CHUNK_TOKENS, seed=9)
    with connector.request(TOKENS) as request, connector.request(others) as intruder:
        assert connector.match(request) == 256
        table = blocks(32, seed=2)
        compute(tensors, others, table)
        connector.save(intruder, table).result(20)
        assert connector.load(request, blocks(16), 0, 256).result(20).tokens == 256
        assert connector.save(intruder, table).result(20).prefix == 8
        assert connector.match(request, pin=False) == 0, "nothing keeps them after the load"


def test_what_is_saved_for_a_time_is_gone_after_it(small_config: Any, connect: Any) -> None:
    now = [1e9]
    with Store(small_config(), wall=lambda: now[0]) as store:
        connector, tensors = connect(store)
        saved(connector, tensors, ttl=60)
        with connector.request(TOKENS) as request:
            assert connector.match(request) == 256
            now[0] += 61
            assert connector.match(request) == 0
            late = connector.load(request, blocks(16), 0, 256).result(20)
            assert late.tokens == 0
            assert saved(connector, tensors).status.tolist() == [Status.STORED] * 4
            now[0] += 1e6
            assert connector.match(request) == 256
        connector.close()


def test_pins_end_with_their_request(open_store: Any, connect: Any, eventually: Any) -> None:
    store = open_store()
    connector, tensors = connect(store)
    saved(connector, tensors)
    touched = threading.Event()
    connector._mover.submit(touched.set)
    assert touched.wait(20)
    assert store.flush().result(20).synced

    def pinned() -> int:
        return sum(int(n) for name, n in store.stats().items() if name.endswith("pinned_slots"))

    assert pinned() == 0
    request = connector.request(TOKENS)
    connector.match(request)
    connector.match(request)
    assert pinned() >= 4
    connector.match(request, computed=192)
    less = pinned()
    assert 0 < less < 8, "a match takes the place of the one before"
    request.close()
    request.close()
    assert pinned() == 0
    connector.match(request)
    del request
    eventually(lambda: pinned() == 0)


def test_heads_outlive_tails(open_store: Any, connect: Any, eventually: Any) -> None:
    """Also where the engine computed the head itself, or a prompt is saved from its head on."""
    store = open_store(paths=(), capacity=0, dram=8 * 65536)
    connector, tensors = connect(store)
    table = blocks(25, seed=7)
    tokens = prompt(6 * CHUNK_TOKENS)
    compute(tensors, tokens, table)
    with connector.request(tokens) as request:
        for end in range(64, 6 * 64 + 1, 64):
            assert connector.save(request, table, end - 64, end).result(20).ok
        assert connector.match(request, computed=192) == 192
        assert connector.load(request, table, 192, 384).result(20).tokens == 192
    connector.close()  # so that all is touched that is to be
    other, others = connect(store)
    saved(other, others, prompt(6 * CHUNK_TOKENS, seed=4))
    with other.request(tokens) as request:
        assert other.match(request, pin=False) == 2 * CHUNK_TOKENS
