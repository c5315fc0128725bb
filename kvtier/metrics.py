"""Counters and histograms of a store: plain names and numbers, changed under the store's lock."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvtier.types import Reason, Status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.types import TierName


HISTOGRAM_BOUNDS = tuple(1 << power for power in range(25))
"""Seconds, from 1 to 194 days: upper bounds of all buckets of a Histogram but the last, which has none."""
_LAST = len(HISTOGRAM_BOUNDS)


class Histogram:
    """How often a time was how long, in buckets that double: a fixed 26 numbers."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(HISTOGRAM_BOUNDS) + 1)
        """By bucket; the first is below 1 second."""
        self.total = 0
        """Sum of all times, in seconds."""

    def add(self, seconds: int, count: int = 1) -> None:
        """Count a time of whole seconds, so many times; one below 0, as clocks are set back, is 0."""
        if seconds > 0:
            bucket = seconds.bit_length()
            self.counts[bucket if bucket < _LAST else _LAST] += count
            self.total += seconds * count
        else:
            self.counts[0] += count

    def merge(self, other: Histogram) -> None:
        """Add what another one counted."""
        self.counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


class Counters(Counter[str]):
    """What happened to every chunk asked for. Each one is counted exactly once per request:

    `get.requested` = `dram.hits` + `disk.hits` + the sum of `get.<reason>`, and
    `put.requested` = `put.stored` + `put.known` + the sum of `put.<reason>`.
    """

    def count_get(self, status: Status, reason: Reason, tier: TierName) -> None:
        """Count one chunk of a get or read; `tier` is where a HIT came from."""
        self[f"{tier.name.lower()}.hits" if status is Status.HIT else f"get.{reason.name.lower()}"] += 1

    def count_put(self, status: Status, reason: Reason) -> None:
        """Count one chunk of a put or commit."""
        name = reason if reason else status
        self[f"put.{name.name.lower()}"] += 1


def names() -> Iterator[str]:
    """Every counter that can appear, so that a fresh store shows them as 0."""
    yield from ("get.requested", "put.requested", "dram.hits", "disk.hits")
    yield from ("disk.bytes_read", "disk.bytes_written", "disk.write_failures", "disk.journal_failures")
    yield "disk.admission_refused"  # chunks; those that stay in DRAM are put.stored none the less
    yield from ("put.stored", "put.known")
    yield from ("codec.chunks", "codec.not_smaller", "codec.payload_bytes", "codec.stored_bytes")
    yield from ("scrub.chunks", "scrub.bytes", "scrub.bad", "scrub.unreadable")
    yield from ("scrub.passes", "scrub.last_pass")  # whole ones; when the last ended, in seconds since 1970
    for reason in Reason:
        if reason:
            yield f"get.{reason.name.lower()}"
            yield f"put.{reason.name.lower()}"
