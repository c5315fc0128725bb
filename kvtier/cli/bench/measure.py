"""Passes, rounds and medians: how every figure of a benchmark comes about."""

from __future__ import annotations

import gc
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from kvtier.cli.bench.place import ReadCounter


@dataclass(frozen=True, slots=True)
class Sample:
    """What one pass came to."""

    nbytes: int
    wall_s: float
    cpu_s: float | None = None
    cold: bool | None = None
    """Whether the device delivered exactly what was asked for; None where nothing counts that."""
    latencies_s: Sequence[float] = ()

    @property
    def gb_s(self) -> float:
        """10**9 bytes per second."""
        return self.nbytes / 1e9 / self.wall_s


@dataclass(frozen=True, slots=True)
class Contender:
    """Something to measure: `run` does one whole pass, from dropped caches on."""

    name: str
    run: Callable[[], Sample]
    detail: str = ""
    """How it was done, and what its latencies are of."""


@dataclass(frozen=True, slots=True)
class Row:
    """A contender's figures: medians over the rounds, latencies over all their chunks."""

    name: str
    gb_s: float
    fraction_of_fio: float | None
    times_serial: float | None
    cpu_s_per_gb: float | None
    p50_ms: float | None
    p99_ms: float | None
    cold: bool | None
    detail: str
    gb_s_of_rounds: list[float] = field(default_factory=list)


class Meter:
    """Wall and CPU seconds of a block that moves `nbytes`, and whether the device delivered just those."""

    def __init__(self, counter: ReadCounter | None, nbytes: int) -> None:
        self._counter = counter
        self._nbytes = nbytes
        self.wall_s = self.cpu_s = 0.0
        self.cold: bool | None = None

    def __enter__(self) -> Self:
        gc.collect()
        self._before = self._counter.read() if self._counter else None
        self._cpu, self._wall = time.process_time(), time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wall_s = time.perf_counter() - self._wall
        self.cpu_s = time.process_time() - self._cpu
        after = self._counter.read() if self._counter else None
        if self._counter and self._before is not None and after is not None:
            read = after - self._before
            self.cold = self._nbytes <= read <= self._nbytes * (1 + self._counter.slack)

    def sample(self, latencies_s: Sequence[float] = ()) -> Sample:
        """The block as a pass."""
        return Sample(self._nbytes, self.wall_s, self.cpu_s, self.cold, latencies_s)


def interleave(
    contenders: Sequence[Contender], rounds: int, seed: int, on_pass: Callable[[str], object]
) -> dict[str, list[Sample]]:
    """Run every contender once per round, each round in an order of its own; the first is discarded."""
    order = list(contenders)
    draw = random.Random(seed)
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
    for number in range(rounds + 1):
        draw.shuffle(order)
        for contender in order:
            on_pass(contender.name)
            sample = contender.run()
            if number:
                samples[contender.name].append(sample)
    return samples


def rows(contenders: Sequence[Contender], samples: dict[str, list[Sample]]) -> list[Row]:
    """A row per contender, in the order given."""
    return [_row(contender, samples) for contender in contenders]


def ratio(samples: dict[str, list[Sample]], name: str, base: str) -> float | None:
    """Median over the rounds of one bandwidth by another; None if there is no such contender."""
    if base not in samples:
        return None
    pairs = zip(samples[name], samples[base], strict=True)
    return statistics.median(sample.gb_s / other.gb_s for sample, other in pairs)


def percentile_ms(latencies_s: Sequence[float], percent: float) -> float | None:
    """A percentile of latencies in milliseconds; None of none."""
    return float(np.percentile(latencies_s, percent)) * 1e3 if len(latencies_s) else None


def _row(contender: Contender, samples: dict[str, list[Sample]]) -> Row:
    own = samples[contender.name]
    latencies = [latency for sample in own for latency in sample.latencies_s]
    cpu = [sample.cpu_s / sample.nbytes * 1e9 for sample in own if sample.cpu_s is not None]
    bandwidths = [sample.gb_s for sample in own]
    colds = {sample.cold for sample in own}
    return Row(
        name=contender.name,
        gb_s=statistics.median(bandwidths),
        fraction_of_fio=ratio(samples, contender.name, "fio"),
        times_serial=ratio(samples, contender.name, "serial"),
        cpu_s_per_gb=statistics.median(cpu) if cpu else None,
        p50_ms=percentile_ms(latencies, 50),
        p99_ms=percentile_ms(latencies, 99),
        cold=None if None in colds else False not in colds,
        detail=contender.detail,
        gb_s_of_rounds=bandwidths,
    )
