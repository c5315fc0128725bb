"""What stores count, for Prometheus: `register(store)`, with `pip install 'kvtier[metrics]'`.

Each scrape asks a store once; between scrapes it costs nothing. Of an operation, `kvtier_chunks_total` over
all outcomes is `kvtier_requested_chunks_total`, but for the chunks that are under way.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from kvtier.errors import StoreClosed
from kvtier.metrics import HISTOGRAM_BOUNDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from prometheus_client import CollectorRegistry, Metric

    from kvtier.metrics import Histogram
    from kvtier.store.store import Store

_TIERS = ("dram", "disk")


@dataclass(frozen=True, slots=True)
class _Family:
    """A metric without its values; `counter` names get a `_total` behind them."""

    kind: Any
    name: str
    text: str
    labels: tuple[str, ...] = ()


def _counter(name: str, text: str, *labels: str) -> _Family:
    return _Family(CounterMetricFamily, f"kvtier_{name}", text, labels)


def _gauge(name: str, text: str, *labels: str) -> _Family:
    return _Family(GaugeMetricFamily, f"kvtier_{name}", text, labels)


def _histogram(name: str, text: str, *labels: str) -> _Family:
    return _Family(HistogramMetricFamily, f"kvtier_{name}", text, labels)


_REQUESTED = _counter("requested_chunks", "Chunks that gets and puts asked for.", "operation")
_CHUNKS = _counter(
    "chunks",
    "Chunks of gets and puts by outcome: hit_dram, hit_disk, stored, known, or why not.",
    "operation", "outcome",
)  # fmt: skip
_DISK_BYTES = _counter("disk_bytes", "Bytes moved between store and disk.", "direction")
_TENANT = _gauge("tenant_bytes", "Bytes of a tenant that has a quota.", "tenant", "tier")
_PLAIN = {
    "disk.write_failures": _counter("disk_write_failures", "Chunks that could not be written to disk."),
    "disk.journal_failures": _counter("disk_journal_failures", "Journal records that could not be written."),
    "disk.admission_refused": _counter("disk_admission_refused", "Chunks not written to disk by admission."),
    "disk.outages": _counter("disk_outages", "Times that a path was taken out as it failed."),
    "scrub.bad": _counter("scrub_bad", "Chunks that the scrub found bad."),
}
_OF_TIERS = {
    "evictions": _counter("evictions", "Chunks evicted to make room.", "tier"),
    "expired": _counter("expired", "Chunks dropped as their time was over.", "tier"),
    "chunks": _gauge("stored_chunks", "Chunks in the tier.", "tier"),
    "bytes": _gauge("used_bytes", "Bytes of slots in use.", "tier"),
    "capacity": _gauge("capacity_bytes", "Most bytes the tier may hold.", "tier"),
    "down": _gauge("tier_down", "Whether paths of the tier are taken out, as they fail.", "tier"),
    "pinned_slots": _gauge("pinned_slots", "Slots that are being read, written or leased.", "tier"),
}
_HISTOGRAMS = {
    "residence": _histogram(
        "residence_seconds", "From when a chunk came into the tier to its eviction.", "tier"
    ),
    "reuse_gap": _histogram(
        "reuse_gap_seconds",
        "From when a chunk came into the tier, or was last asked for there, to when it is asked for there.",
        "tier",
    ),
}
_LABELS = {"operation", "outcome", "direction", "tenant", "tier", "le"}

_collectors: weakref.WeakKeyDictionary[CollectorRegistry, StoreCollector] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def register(
    store: Store, labels: Mapping[str, str] | None = None, registry: CollectorRegistry = REGISTRY
) -> None:
    """Have `registry` show a store until it is closed or forgotten.

    Of several stores each needs `labels` of its own, of the same names. Raises ValueError for other names, or
    those that the metrics have themselves, or values that another store has that is open.
    """
    with _lock:
        collector = _collectors.get(registry)
        if collector is None:
            collector = StoreCollector()
            collector.add(store, labels or {})
            registry.register(collector)
            _collectors[registry] = collector
        else:
            collector.add(store, labels or {})


class StoreCollector(Collector):
    """The metrics of stores, which it does not keep alive; of closed ones there are none."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._stores: dict[tuple[str, ...], weakref.ref[Store]] = {}

    def add(self, store: Store, labels: Mapping[str, str]) -> None:
        """Show a store under `labels`. Raises ValueError as `register` does."""
        names, values = tuple(labels), tuple(labels.values())
        if taken := sorted(_LABELS & labels.keys()):
            raise ValueError(f"the metrics have the labels {', '.join(taken)} already: take others")
        there = {at: ref for at, ref in self._stores.items() if _numbers(ref()) is not None}
        if there and set(names) != set(self._names):
            raise ValueError(
                f"labels are {names}, but those of another store are {self._names}: give the same"
            )
        if there:
            values = tuple(labels[name] for name in self._names)
        else:
            self._names = names
        if values in there:
            raise ValueError(f"another store has the labels {dict(labels)}: give each its own")
        self._stores = {**there, values: weakref.ref(store)}

    def describe(self) -> Iterable[Metric]:
        """Nothing: what there is depends on the stores, and a registry need not ask them to register."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The families as they are now, from one look at each store's counters and one at its histograms."""
        made: dict[str, Metric] = {}
        for values, ref in self._stores.items():
            if (found := _numbers(ref())) is None:
                continue
            for family, labels, value in _samples(*found):
                metric: Any = made.get(family.name)
                if metric is None:
                    names = (*self._names, *family.labels)
                    metric = made[family.name] = family.kind(family.name, family.text, labels=names)
                metric.add_metric((*values, *labels), *value)
        yield from made.values()


def _numbers(store: Store | None) -> tuple[dict[str, float], dict[str, Histogram]] | None:
    """What a store counted; None if it is closed or gone."""
    try:
        if store is None:
            return None
        numbers, histograms = store.stats(), store.histograms()
    except StoreClosed:
        return None
    return {name: float(value) for name, value in numbers.items() if not isinstance(value, str)}, histograms


def _samples(
    counts: Mapping[str, float], histograms: Mapping[str, Histogram]
) -> Iterator[tuple[_Family, tuple[str, ...], tuple[Any, ...]]]:
    """Each value with its family and labels."""
    for operation in ("get", "put"):
        yield _REQUESTED, (operation,), (counts[f"{operation}.requested"],)
    for tier in _TIERS:
        yield _CHUNKS, ("get", f"hit_{tier}"), (counts[f"{tier}.hits"],)
    for name, value in counts.items():
        operation, _, outcome = name.partition(".")
        if operation in ("get", "put") and outcome != "requested":
            yield _CHUNKS, (operation, outcome), (value,)
        elif operation == "tenant":
            tenant, _, of = outcome.rpartition(".")
            yield _TENANT, (tenant, of.removesuffix("_bytes")), (value,)
        elif name in _PLAIN:
            yield _PLAIN[name], (), (value,)
        elif operation in _TIERS and outcome in _OF_TIERS:
            yield _OF_TIERS[outcome], (operation,), (value,)
    for direction in ("read", "written"):
        yield _DISK_BYTES, (direction,), (counts[f"disk.bytes_{direction}"],)
    for name, histogram in histograms.items():
        tier, _, of = name.partition(".")
        yield _HISTOGRAMS[of], (tier,), (_buckets(histogram), float(histogram.total))


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Bounds and how many are up to them, as Prometheus has it."""
    buckets, below = [], 0
    for bound, count in zip((*map(str, HISTOGRAM_BOUNDS), "+Inf"), histogram.counts, strict=True):
        below += count
        buckets.append((bound, float(below)))
    return buckets
