"""The parts of `kvtier bench`: rounds, medians, proof of coldness, curves, how many devices."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from kvtier.cli.bench.data import Amount, Data
from kvtier.cli.bench.measure import Contender, Meter, Sample, interleave, rows
from kvtier.cli.bench.place import ReadCounter
from kvtier.cli.bench.scale import _counts
from kvtier.testing.emulated import device_stats


class Counter(ReadCounter):
    """Counts what it is told."""

    def __init__(self, *counts: int | None) -> None:
        self._next = iter(counts)
        self.slack = 0.0

    def read(self) -> int | None:
        return next(self._next)


@pytest.mark.parametrize(
    ("after", "cold"), [(1500, True), (1499, False), (1501, False), (500, False), (None, None)]
)
def test_cold_is_what_the_device_delivered(after: int | None, cold: bool | None) -> None:
    with Meter(Counter(500, after), 1000) as meter:
        pass
    assert meter.sample().cold is cold


def test_a_file_system_without_counters_counts_nothing() -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or device_stats(memory):
        pytest.skip("no tmpfs here")
    assert ReadCounter([memory]).read() is None


def test_rounds_are_interleaved_and_the_first_is_discarded() -> None:
    order: list[str] = []
    contenders = [Contender(name, lambda: Sample(10**9, len(order))) for name in ("fio", "one", "two")]
    samples = interleave(contenders, 4, 1, order.append)
    assert all(len(found) == 4 for found in samples.values())
    passes = [order[i : i + 3] for i in range(0, 15, 3)]
    assert all(sorted(names) == ["fio", "one", "two"] for names in passes)
    assert len({tuple(names) for names in passes}) > 1


def test_fractions_are_medians_of_ratios() -> None:
    seconds = {"fio": (1.0, 2.0, 4.0), "one": (2.0, 2.0, 2.0)}
    contenders = [Contender(name, lambda: Sample(0, 1)) for name in seconds]
    samples = {name: [Sample(10**9, wall, cold=True) for wall in walls] for name, walls in seconds.items()}
    samples["one"][2] = Sample(10**9, 2.0, cold=False, latencies_s=[0.001, 0.003])
    found = {row.name: row for row in rows(contenders, samples)}
    assert found["one"].fraction_of_fio == 1.0
    assert found["one"].gb_s == 0.5
    assert found["one"].cold is False
    assert found["fio"].cold is True
    assert found["one"].p50_ms is not None
    assert math.isclose(found["one"].p50_ms, 2.0)


def test_bytes_that_were_not_read_are_noticed(tmp_path: Path) -> None:
    data = Data([tmp_path], Amount(4, 64 << 10), lambda: None)
    memory = np.stack([np.fromfile(file, np.uint8) for file in data.files])
    data.check(memory)
    data.smudge(memory[2:3])
    with pytest.raises(AssertionError, match="chunk 2 was not read"):
        data.check(memory)


def test_curves_are_by_bytes_in_flight_and_by_chunk_size() -> None:
    pytest.importorskip("matplotlib")
    from kvtier.cli.bench import matplotlib

    figures = {
        "in_flight": [{"name": "kvtier-uring", "bytes_in_flight": 8 << 20, "gb_s": 3.0}],
        "fio_probe": [{"engine": "psync", "block": 1 << 20, "depth": 16, "gb_s": 2.0}],
    }
    assert matplotlib._by_bytes_in_flight(figures) == {
        "kvtier-uring": [(8.0, 3.0)], "fio psync, 1 MiB": [(16.0, 2.0)]
    }  # fmt: skip
    sizes = [{"chunk_mib": mib, "rows": [{"name": "fio", "gb_s": 2 * mib}]} for mib in (2.0, 0.5)]
    assert matplotlib._by_chunk_size(sizes) == {"fio": [(2.0, 4.0), (0.5, 1.0)]}


@pytest.mark.parametrize(
    ("devices", "counts"), [(2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])]
)
def test_scale_reads_from_one_two_four_and_all_devices(devices: int, counts: list[int]) -> None:
    assert _counts(devices) == counts
