"""The exporter: what a scrape shows is what the store counted, and nothing of a store that is gone."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtier
from kvtier.config import KIB

prometheus_client = pytest.importorskip("prometheus_client")

from kvtier.integrations.prometheus import register  # noqa: E402  needs prometheus_client

if TYPE_CHECKING:
    from pathlib import Path

CHUNK = 64 * KIB
KEYS = [kvtier.ChunkKey(bytes([i]) * 32) for i in range(24)]
SIZES: dict[str, Any] = {"dram": "1MiB", "landing": "1MiB", "chunk_bytes": CHUNK, "part_bytes": "64KiB",
                         "io_window": "1MiB"}  # fmt: skip


@pytest.fixture
def registry() -> Any:
    return prometheus_client.CollectorRegistry()


def samples(registry: Any, name: str, **labels: str) -> dict[tuple[str, ...], float]:
    """Values of a sample by the labels that are not given."""
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                rest = tuple(value for label, value in sample.labels.items() if label not in labels)
                found[rest] = sample.value
    return found


def used(store: Any) -> None:
    """Puts and gets of every common outcome."""
    payloads = np.arange(24 * CHUNK, dtype=np.uint64).astype(np.uint8).reshape(24, CHUNK)
    assert store.put(KEYS[:20], payloads[:20], until="disk").result(20).ok
    assert store.put(KEYS[:5], payloads[:5]).result(20).ok
    store.get(KEYS, into=np.empty_like(payloads)).result(20)
    store.get(KEYS[:3], into=np.empty_like(payloads[:3])).result(20)


def test_invariant_10_the_outcomes_of_a_scrape_add_up(tmp_path: Path, registry: Any) -> None:
    with kvtier.open(tmp_path / "s", capacity="8MiB", quotas={"acme": "1MiB"}, **SIZES) as store:
        register(store, registry=registry)
        used(store)
        for operation, requested in (("get", 27), ("put", 25)):
            outcomes = samples(registry, "kvtier_chunks_total", operation=operation)
            assert sum(outcomes.values()) == requested
            assert samples(registry, "kvtier_requested_chunks_total", operation=operation) == {(): requested}
        gets = samples(registry, "kvtier_chunks_total", operation="get")
        stats = store.stats()
        assert gets["absent",] == 4
        assert gets["hit_dram",] + gets["hit_disk",] == 23
        assert gets["hit_disk",] == stats["disk.hits"] > 0
        assert samples(registry, "kvtier_disk_bytes_total") == {
            ("read",): stats["disk.bytes_read"], ("written",): stats["disk.bytes_written"],
        }  # fmt: skip
        assert samples(registry, "kvtier_stored_chunks", tier="disk") == {(): 20}
        assert samples(registry, "kvtier_tenant_bytes", tenant="acme") == {("dram",): 0, ("disk",): 0}


def test_histograms_are_cumulative(tmp_path: Path, registry: Any) -> None:
    with kvtier.open(tmp_path / "s", capacity="8MiB", **SIZES) as store:
        register(store, registry=registry)
        used(store)
        for name in ("reuse_gap", "residence"):
            for tier in ("dram", "disk"):
                below = list(samples(registry, f"kvtier_{name}_seconds_bucket", tier=tier).values())
                histogram = store.histograms()[f"{tier}.{name}"]
                assert len(below) == 26
                assert below == np.cumsum(histogram.counts).tolist()
                assert samples(registry, f"kvtier_{name}_seconds_sum", tier=tier) == {(): histogram.total}
        assert sum(samples(registry, "kvtier_reuse_gap_seconds_count").values()) == 23


def test_of_a_closed_store_there_is_nothing(registry: Any) -> None:
    store = kvtier.open(**SIZES)
    register(store, registry=registry)
    assert b"kvtier_used_bytes" in prometheus_client.generate_latest(registry)
    store.close()
    assert prometheus_client.generate_latest(registry) == b""


def test_it_keeps_no_store_alive(registry: Any) -> None:
    store = kvtier.open(**SIZES)
    register(store, registry=registry)
    store.close()
    del store
    gc.collect()
    assert prometheus_client.generate_latest(registry) == b""


def test_labels_tell_stores_apart(registry: Any) -> None:
    with kvtier.open(**SIZES) as one, kvtier.open(**{**SIZES, "dram": "2MiB"}) as two:
        register(one, {"store": "one", "gpu": "0"}, registry)
        register(two, {"gpu": "0", "store": "two"}, registry)
        found = samples(registry, "kvtier_capacity_bytes", tier="dram", gpu="0")
        assert {name: value / 2**20 for (name,), value in found.items()} == {"one": 1, "two": 2}
        text = prometheus_client.generate_latest(registry).decode()
        assert text.count("# TYPE kvtier_capacity_bytes gauge") == 1
        for labels, says in (
            ({"tier": "x"}, "have the labels tier already"),
            ({"store": "three"}, "give the same"),
            ({"store": "one", "gpu": "0"}, "give each its own"),
        ):
            with pytest.raises(ValueError, match=says):
                register(one, labels, registry)


def test_a_store_that_is_opened_again_takes_the_place_of_the_closed_one(registry: Any) -> None:
    for dram in (1, 2):
        with kvtier.open(**{**SIZES, "dram": f"{dram}MiB"}) as store:
            register(store, {"store": "one"}, registry)
            found = samples(registry, "kvtier_capacity_bytes", tier="dram")
            assert found == {("one",): dram * 2**20}


def test_nothing_else_imports_prometheus_client() -> None:
    code = "import kvtier, kvtier.store.store, sys; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False, timeout=60).returncode == 0
