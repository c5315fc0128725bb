"""Calls of a store that many tests make, and the names of what comes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier import Reason, Status
from small_stores import CHUNK

if TYPE_CHECKING:
    import kvtier

STORED, KNOWN, HIT, MISS, REFUSED = (
    Status.STORED, Status.KNOWN, Status.HIT, Status.MISS, Status.REFUSED,
)  # fmt: skip


def got(store: kvtier.Store, keys: list[Any], **options: Any) -> tuple[kvtier.BatchResult, Any]:
    targets = np.zeros((len(keys), CHUNK), np.uint8)
    return store.get(keys, into=targets, **options).result(20), targets


def idle(store: kvtier.Store) -> None:
    assert store.flush().result(20).synced


def outcome(result: kvtier.BatchResult, i: int = 0) -> tuple[Status, Reason]:
    return Status(result.status[i]), Reason(result.reason[i])


def put_and_get(store: kvtier.Store, key: kvtier.ChunkKey, value: Any) -> None:
    assert store.put([key], [value], until="disk").result(10).ok
    target = np.empty_like(value)
    assert store.get([key], into=[target]).result(10).ok
    assert (target == value).all()
