"""A replay hits what a real store hits that does the same requests."""

from __future__ import annotations

import random
from typing import Any, get_args

import numpy as np
import pytest

from kvtier.config import PolicyName, StoreConfig
from kvtier.replay.run import replay
from kvtier.replay.trace import Trace, make_trace
from kvtier.store.store import Store

CHUNK = 4096


def sessions(seed: int) -> Trace:
    """Conversations that grow, pause and come back, some of them from a common head."""
    rng = random.Random(seed)
    grown: list[list[Any]] = []
    requests = []
    for number in range(150):
        if not grown or rng.random() < 0.3:
            grown.append([f"head {rng.randrange(3)}"])
        session = rng.randrange(max(0, len(grown) - 6), len(grown))
        grown[session] += [(session, number, block) for block in range(rng.randint(1, 4))]
        requests.append((float(number), grown[session][:14]))
    return make_trace("sessions", requests)


@pytest.mark.parametrize("policy", get_args(PolicyName))
@pytest.mark.parametrize("seed", range(3))
def test_hits_and_evictions_are_those_of_a_store(policy: PolicyName, seed: int) -> None:
    trace = sessions(seed)
    keys: list[Any] = trace.keys()
    chunks = 40
    config = StoreConfig(dram=chunks * CHUNK, chunk_bytes=CHUNK, dram_policy=policy)
    now, hits = [0.0], 0
    # A put that names the whole prompt has all of it in order again; it is a second use, which only these
    # policies do not mind.
    puts_all = policy in ("lru", "fifo")
    payloads = np.ones((14, CHUNK), np.uint8)
    with Store(config, wall=lambda: now[0]) as store:
        for time, request in zip(trace.times, trace.requests, strict=True):
            now[0] = time
            names = [keys[chunk] for chunk in request]
            found = store.match(names)
            hits += found
            if found:
                assert store.get(names[:found], into=payloads[:found]).result(20).ok
            if found < len(names):
                first = 0 if puts_all else found
                assert store.put(names[first:], payloads[first : len(names)]).result(20).ok
        evictions = store.stats()["dram.evictions"]
    row = replay(trace, keys, policy, chunks)
    if policy in ("lru", "sieve", "s3fifo"):
        assert (row["hits"], row["evictions_disk"]) == (hits, evictions)
    else:  # the store puts a chunk again that its own request has pushed out before its turn came
        assert row["hits"] == pytest.approx(hits, rel=0.04)
    assert 0.2 < row["hit_rate"] < 0.9
