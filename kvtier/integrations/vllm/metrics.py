"""The tier's metrics, `vllm:kvtier_*`: what the store counts, handed to vLLM as differences."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.store.store import Store

_EVERY = 1.0
"""Seconds between two looks at the store's counters, which cost more than a step should."""
_CHUNKS = "vllm:kvtier_chunks"
_BYTES = "vllm:kvtier_bytes"
_USED = "vllm:kvtier_disk_used_bytes"


def definitions() -> dict[str, Any]:
    """vLLM's definitions of the metrics."""
    from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

    return {
        _CHUNKS: OffloadingCounterMetadata(
            documentation="Chunks by operation (get, put) and outcome: hit, stored, known, or why not.",
            labelnames=("operation", "outcome"),
        ),
        _BYTES: OffloadingCounterMetadata(
            documentation="Bytes read from and written to the disk tier.", labelnames=("operation",)
        ),
        _USED: OffloadingGaugeMetadata(documentation="Bytes of chunks in the disk tier."),
    }


class Observed:
    """What vLLM was told so far."""

    def __init__(self) -> None:
        self._next = 0.0
        self._told: dict[tuple[str, tuple[str, ...]], float] = {}

    def take(self, store: Store, shed: int) -> Any:
        """An OffloadingConnectorStats with what is new; None if nothing is, or it is too soon."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + _EVERY
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

        stats = OffloadingConnectorStats()
        numbers = store.stats()
        for counter, value in _counters(numbers, shed).items():
            if new := value - self._told.get(counter, 0):
                self._told[counter] = value
                name, labels = counter
                stats.increase_counter(name, new, labels)
        if not stats.is_empty():
            stats.set_gauge(_USED, numbers["disk.bytes"])
        return None if stats.is_empty() else stats


def _counters(numbers: dict[str, int | float | str], shed: int) -> dict[tuple[str, tuple[str, ...]], float]:
    found: dict[tuple[str, tuple[str, ...]], float] = {
        (_CHUNKS, ("put", "shed")): shed,
        (_CHUNKS, ("get", "hit")): float(numbers["dram.hits"]) + float(numbers["disk.hits"]),
        (_BYTES, ("read",)): float(numbers["disk.bytes_read"]),
        (_BYTES, ("written",)): float(numbers["disk.bytes_written"]),
    }
    for name, value in numbers.items():
        operation, _, outcome = name.partition(".")
        if operation in ("get", "put") and outcome != "requested":
            found[_CHUNKS, (operation, outcome)] = float(value)
    return found
