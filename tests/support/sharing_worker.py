"""A process that uses a store as it is told: an order a line on stdin, an answer a line on stdout, JSON.

The first line is the path and the settings. Keys and payloads are numbered: see `small_stores`.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

import kvtier
from kvtier import Status
from small_stores import numbered_key, random_payload


def put(store: kvtier.Store, first: int, count: int, nbytes: int, batch: int = 16) -> dict[str, int]:
    """Put chunks, some at a time. How many came to each outcome."""
    outcomes: dict[str, int] = {}
    for start in range(first, first + count, batch):
        numbers = range(start, min(start + batch, first + count))
        payloads = [random_payload(i, nbytes) for i in numbers]
        result = store.put([numbered_key(i) for i in numbers], payloads, until="disk").result(60)
        for status in result.status.tolist():
            outcomes[Status(status).name] = outcomes.get(Status(status).name, 0) + 1
    return outcomes


def get(store: kvtier.Store, first: int, count: int, nbytes: int) -> dict[str, int]:
    """Get chunks and compare every byte. How many came to each outcome."""
    targets = np.zeros((count, nbytes), np.uint8)
    result = store.get([numbered_key(first + i) for i in range(count)], into=targets).result(60)
    outcomes: dict[str, int] = {}
    for i, status in enumerate(result.status.tolist()):
        name = Status(status).name
        if status == Status.HIT and not (targets[i] == random_payload(first + i, nbytes)).all():
            name = "WRONG"
        outcomes[name] = outcomes.get(name, 0) + 1
    return outcomes


def match(store: kvtier.Store, first: int, count: int) -> int:
    return store.match([numbered_key(first + i) for i in range(count)])


def delete(store: kvtier.Store, first: int, count: int) -> int:
    return store.delete([numbered_key(first + i) for i in range(count)]).result(60)


def put_owned(store: kvtier.Store, first: int, count: int, nbytes: int, tenant: str) -> bool:
    keys = [numbered_key(first + i) for i in range(count)]
    payloads = [random_payload(first + i, nbytes) for i in range(count)]
    return store.put(keys, payloads, until="disk", owner=kvtier.Owner(tenant=tenant)).result(60).ok


def delete_all(store: kvtier.Store, tenant: str) -> int:
    return store.delete_all(tenant=tenant).result(60)


def churn(store: kvtier.Store, first: int, count: int, nbytes: int, seconds: float) -> int:
    """Put, get and delete the same chunks over and over. How many rounds."""
    end, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        put(store, first, count, nbytes)
        delete(store, first + rounds % count, 3)
        rounds += 1
    return rounds


def look(store: kvtier.Store, first: int, count: int, nbytes: int, seconds: float) -> dict[str, int]:
    """Get the same chunks over and over."""
    end, outcomes = time.monotonic() + seconds, dict[str, int]()
    while time.monotonic() < end:
        for name, n in get(store, first, count, nbytes).items():
            outcomes[name] = outcomes.get(name, 0) + n
    return outcomes


def stats(store: kvtier.Store) -> dict[str, Any]:
    return store.stats()


def flush(store: kvtier.Store) -> bool:
    return store.flush().result(60).synced


CALLS = (put, put_owned, get, match, delete, delete_all, churn, look, stats, flush)
ORDERS = {call.__name__: call for call in CALLS}


def main() -> None:
    path, settings = json.loads(sys.stdin.readline())
    with kvtier.open(path, **settings) as store:
        print("null", flush=True)
        for line in sys.stdin:
            name, arguments = json.loads(line)
            print(json.dumps(ORDERS[name](store, *arguments)), flush=True)


if __name__ == "__main__":
    main()
