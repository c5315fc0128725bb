"""The soak in short, and that it would notice."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kvtier
from kvtier.cli.soak.content import LARGEST, Contents
from kvtier.cli.soak.run import Soak
from kvtier.cli.soak.watch import MEMORY_SLACK, Sample, left_behind, sample, trends
from kvtier.cli.soak.worker import Violation, Worker
from kvtier.config import MIB
from kvtier.testing.build import obstacle

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]


SECONDS = 110
"""With opening, closing and the building of the device about two minutes."""


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 130)
@pytest.mark.parametrize(("kind", "seconds"), [("slab", SECONDS), ("files", SECONDS // 3)])
def test_two_minutes(tmp_path: Path, kind: str, seconds: int) -> None:
    if reason := obstacle():
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak",
         "--kind", kind, "--hours", str(seconds / 3600), "--json", tmp_path / "result"],
        cwd=ROOT, capture_output=True, text=True, timeout=SECONDS + 120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed, seed" in done.stdout
    result = json.loads((tmp_path / "result").read_text())
    counts = result["counts"]
    assert result["passed"]
    assert counts["get.hit"] > 500
    assert counts["kills"] >= 1
    assert counts["reopens"] >= 1
    assert sum(result["faults_struck"].values()) > 0


@pytest.mark.parametrize("kind", ["slab", "files"])
def test_without_a_device_there_are_no_faults(tmp_path: Path, kind: str) -> None:
    soak = Soak(tmp_path / "store", None, seed=1, engine="auto", kind=kind)
    soak.run(5.0, lambda passed: None)
    total = soak.total()
    assert total["get.hit"] > 100
    assert not [name for name in total if name.startswith(("fault", "get.failed"))]


def test_it_goes_on_with_a_store_that_is_there(tmp_path: Path) -> None:
    larger: dict[str, Any] = {
        "contents": Contents(2), "chunk_bytes": 2 * LARGEST, "capacity": 64 * MIB, "dram": 16 * MIB,
        "get_timeout": 20.0, "put_timeout": 20.0,
    }  # fmt: skip
    for seed in (1, 2):
        soak = Soak(tmp_path / "store", None, seed, "auto", is_new=seed == 1, **larger)
        soak.run(2.0, lambda passed: None)
        assert soak.total()["get.hit"] > 0
    assert sum((tmp_path / "store" / name).stat().st_size for name in ("slab", "journal")) > 40 * MIB


def test_chunks_scale_but_for_the_odd_ones() -> None:
    sizes = [Contents().size_of(i) for i in range(8)]
    scaled = [Contents(8).size_of(i) for i in range(8)]
    assert {(b / a, a % 4096 == 0) for a, b in zip(sizes, scaled, strict=True)} == {(1.0, False), (8.0, True)}
    assert max(sizes) == LARGEST
    assert [len(Contents(8).content(i)) for i in range(8)] == scaled
    assert Contents(8).mean == sum(scaled) // 8


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvtier.Store]:
    with kvtier.open(tmp_path / "store", capacity=32 * MIB, dram=8 * MIB, chunk_bytes=LARGEST) as opened:
        yield opened


class Lying:
    """A store that flips a byte of what it read, or forgets to delete."""

    def __init__(self, store: kvtier.Store, lie: str) -> None:
        self._store, self._lie = store, lie

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, keys: Any, *, into: Any, **options: Any) -> Any:
        transfer = self._store.get(keys, into=into, **options)
        if self._lie == "bytes" and transfer.result(20).prefix:
            into[0][-1] ^= 1
        return transfer

    def delete(self, keys: Any) -> Any:
        return self._store.delete([] if self._lie == "delete" else keys)


@pytest.mark.parametrize(("lie", "told"), [("bytes", "wrong bytes"), ("delete", "was deleted, and is a hit")])
def test_a_store_that_lies_is_found_out(store: kvtier.Store, lie: str, told: str) -> None:
    stop = threading.Event()
    alarm = threading.Timer(20, stop.set)
    alarm.start()
    try:
        with pytest.raises(Violation, match=told):
            Worker(range(30), seed=1).work(Lying(store, lie), stop)  # type: ignore[arg-type]
    finally:
        alarm.cancel()


def test_an_open_store_is_left_behind(store: kvtier.Store, tmp_path: Path) -> None:
    left = left_behind(tmp_path / "store")
    assert any(item.endswith("store/slab") for item in left)
    assert any(item.startswith("thread kvtier-") for item in left)
    store.close()
    assert left_behind(tmp_path / "store") == []


def samples(rss: list[int], descriptors: list[int]) -> list[Sample]:
    return [Sample(i, r, d, 10) for i, (r, d) in enumerate(zip(rss, descriptors, strict=True))]


def test_what_grows_is_told_from_what_is_flat() -> None:
    flat = trends(samples([10**9] * 30, [20] * 30))
    assert all(trend.is_flat for trend in flat.values())
    leak = trends(
        samples([10**8 + i * MEMORY_SLACK // 8 for i in range(30)], [20 + i // 10 for i in range(30)])
    )
    assert {name for name, trend in leak.items() if not trend.is_flat} == {"rss", "descriptors"}
    warm_up = trends(samples([i * 10**8 for i in range(6)] + [6 * 10**8] * 24, [20] * 30))
    assert all(trend.is_flat for trend in warm_up.values())
    assert trends(samples([1] * 5, [1] * 5)) == {}


def test_a_sample_counts_what_is_open(tmp_path: Path) -> None:
    before = sample(0.0)
    with (tmp_path / "file").open("w"):
        assert sample(0.0).descriptors == before.descriptors + 1
    assert before.rss > 1 << 20
    assert before.threads >= threading.active_count() > 0
