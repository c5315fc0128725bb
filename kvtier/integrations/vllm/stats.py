"""The connector's metrics, `vllm:kvtier_*`: what both sides count, on its way to vLLM's front end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.connector import Connector, Economy

    Numbers = Mapping[tuple[str, ...], float]
    """By name and labels."""

_EVERY = 1.0
"""Seconds between two looks at a store's counters, which cost more than a step should."""
_CHUNKS = "vllm:kvtier_chunks"
_HITS = "vllm:kvtier_hits"
_BYTES = "vllm:kvtier_bytes"
_SECONDS = "vllm:kvtier_seconds"
_DECISIONS = "vllm:kvtier_decisions"
_USED = "vllm:kvtier_used_bytes"
_ESTIMATES = "vllm:kvtier_estimated_seconds"
_CHUNK_TOKENS = "vllm:kvtier_chunk_tokens"
_COUNTERS = {
    _CHUNKS: (
        "Chunks by operation (get, put) and outcome: hit, stored, known, or why not.",
        ("operation", "outcome"),
    ),
    _HITS: ("Chunks that were loaded, by the tier that had them.", ("tier",)),
    _BYTES: (
        "Bytes copied between KV cache and store (loaded, saved), and read from and written to disk.",
        ("operation",),
    ),
    _SECONDS: ("Seconds from the start of each load and save to its outcome, added up.", ("operation",)),
    _DECISIONS: (
        "Prefixes that were stored, by whether it was faster to load them: load, recompute, and probe for "
        "those that were loaded to measure.",
        ("decision",),
    ),
}
_GAUGES = {
    _USED: ("Bytes of chunks in each tier, of all workers.", ("tier",)),
    _ESTIMATES: (
        "Seconds that prefill takes per token, a load per token, and a load at least.",
        ("of",),
    ),
    _CHUNK_TOKENS: ("Tokens that are stored as one.", ()),
}
_SET = (_ESTIMATES, _CHUNK_TOKENS)
"""Gauges that are told as they are; the others are added up over workers, so they are told as differences."""


class Told:
    """What vLLM was told so far."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, ...], float] = {}
        self._next = 0.0

    def is_due(self) -> bool:
        """Whether it is time to look again."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _EVERY
        return True

    def take(self, numbers: Numbers) -> Stats | None:
        """What is new; None if that is nothing."""
        data: dict[str, float] = {}
        for key, value in numbers.items():
            before = self._numbers.get(key, 0.0)
            if value != before:
                self._numbers[key] = value
                data["|".join(key)] = value if key[0] in _SET else value - before
        return Stats(data) if data else None


def of_worker(connector: Connector, store: Mapping[str, float | str]) -> Numbers:
    """What a worker counts; `store` are the counters of its store."""
    numbers = connector.stats()
    found: dict[tuple[str, ...], float] = {
        (_BYTES, "loaded"): numbers["load.bytes"],
        (_BYTES, "saved"): numbers["save.bytes"],
        (_BYTES, "read"): float(store["disk.bytes_read"]),
        (_BYTES, "written"): float(store["disk.bytes_written"]),
    }
    for operation, kind in (("get", "load"), ("put", "save")):
        found[_SECONDS, operation] = numbers[f"{kind}.seconds"]
        for name, value in numbers.items():
            first, _, outcome = name.partition(".")
            if first == kind and outcome not in ("requested", "bytes", "seconds"):
                found[_CHUNKS, operation, outcome] = value
    for tier in ("dram", "disk"):
        found[_HITS, tier] = numbers[f"hits.{tier}"]
        found[_USED, tier] = float(store[f"{tier}.bytes"])
    return found


def of_scheduler(economy: Economy | None, chunk_tokens: int) -> Numbers:
    """What the scheduler's side decides."""
    found: dict[tuple[str, ...], float] = {(_CHUNK_TOKENS,): chunk_tokens}
    if economy is not None:
        numbers = economy.stats()
        found[_DECISIONS, "load"] = numbers["loaded"] - numbers["probes"]
        found[_DECISIONS, "recompute"] = numbers["recomputed"]
        found[_DECISIONS, "probe"] = numbers["probes"]
        for name in ("prefill_seconds_per_token", "load_seconds_per_token", "load_latency_seconds"):
            found[_ESTIMATES, name.replace("_seconds", "")] = numbers[name]
    return found


@dataclass
class Stats(KVConnectorStats):  # type: ignore[misc]
    """Differences by name and labels, joined by `|`."""

    def reset(self) -> None:
        """Begin anew."""
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another worker's, or those of a later step."""
        for key, value in other.data.items():
            is_set = key.partition("|")[0] in _SET
            self.data[key] = value if is_set else self.data.get(key, 0.0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log: what is not 0, by short names."""
        short = {
            key.removeprefix("vllm:kvtier_").replace("|", "."): value for key, value in self.data.items()
        }
        return {name: round(value, 6) for name, value in short.items() if value}

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.data


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same as Prometheus metrics of each engine."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._metrics = {}
        for metrics, kind in ((_COUNTERS, self._counter_cls), (_GAUGES, self._gauge_cls)):
            for name, (documentation, labels) in metrics.items():
                self._metrics[name] = kind(
                    name=name, documentation=documentation, labelnames=[*self._labelnames, *labels]
                )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take in what `Stats` holds."""
        engine = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data.items():
            name, *labels = key.split("|")
            metric = self._metrics[name].labels(*engine, *labels)
            if name in _SET:
                metric.set(value)
            else:
                metric.inc(value)
