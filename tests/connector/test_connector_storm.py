"""Threads that load, save, cancel and fence at once on a disk that fails, lies and dawdles."""

from __future__ import annotations

import errno
import threading
from typing import Any

import numpy as np
import pytest

from engine_sim import CHUNK_TOKENS, compute, engine_tensors, kv_of, prompt
from kvtier import Status
from kvtier.testing.faults import Fault

WORKERS, OWN, ROUNDS = 4, 48, 30


@pytest.mark.parametrize("dram", [0, 8 * 65536])
def test_whatever_happens_a_hit_is_exact(
    disk_store: Any, device: Any, connect: Any, eventually: Any, dram: int
) -> None:
    store = disk_store(dram=dram, get_timeout=5.0)
    connector, tensors = connect(store, engine_tensors(block=WORKERS * OWN))
    prompts = [prompt(2 * CHUNK_TOKENS) + prompt(4 * CHUNK_TOKENS, seed=i) for i in range(3)]
    kv = [kv_of(tokens, tensors) for tokens in prompts]
    for fault in (
        Fault(op="read", file="slab", probability=0.05, errno=errno.EIO, seed=1),
        Fault(op="read", file="slab", probability=0.05, flip_bit=77, seed=2),
        Fault(op="read", file="slab", probability=0.3, delay=0.002, seed=3),
        Fault(op="write", file="slab", probability=0.05, errno=errno.EIO, seed=4),
    ):
        device.inject(fault)
    faults: list[object] = []
    hits = [0] * WORKERS

    def round_of(number: int, draw: np.random.Generator) -> None:
        own = (number * OWN + draw.permutation(OWN))[:24]
        which = int(draw.integers(3))
        tokens = prompts[which]
        with connector.request(tokens) as request:
            compute(tensors, tokens, own)
            save = connector.save(request, own, timeout=0.05)
            if draw.random() < 0.3:
                save.cancel()
            connector.fence(own)
            assert save.copied
            tensors.plain[:, :, own] = -1
            start = int(draw.integers(3)) * 16
            found = connector.match(request, computed=start)
            load = connector.load(request, own, start, start + found)
            if draw.random() < 0.3:
                load.cancel()
            result = load.result(20)
            assert load.released
        held = tensors.tokens(own)
        for i, status in enumerate(result.chunks.status.tolist()):
            first, last = max(start, i * CHUNK_TOKENS), (i + 1) * CHUNK_TOKENS
            expected = kv[which][:, :, first:last] if status == Status.HIT else -1
            assert (held[:, :, first:last] == expected).all(), Status(status)
            hits[number] += status == Status.HIT
        assert (held[:, :, :start] == -1).all()
        assert (held[:, :, start + found :] == -1).all()

    def work(number: int) -> None:
        draw = np.random.default_rng(number)
        try:
            for _ in range(ROUNDS):
                round_of(number, draw)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    device.clear_faults()
    assert not faults
    assert sum(hits), "no load brought anything"
    eventually(lambda: store.stats()["landing.pinned_slots"] == 0)
