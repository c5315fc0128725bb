"""Counters of a store: plain names and numbers, changed under the store's lock."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvtier.types import Reason, Status

if TYPE_CHECKING:
    from collections.abc import Iterator


class Counters(Counter[str]):
    """What happened to every chunk asked for. Each one is counted exactly once per request:

    `get.requested` = `dram.hits` + `disk.hits` + the sum of `get.<reason>`, and
    `put.requested` = `put.stored` + `put.known` + the sum of `put.<reason>`.
    """

    def count_get(self, status: Status, reason: Reason, tier: str) -> None:
        """Count one chunk of a get or read; `tier` is where a HIT came from."""
        self[f"{tier}.hits" if status is Status.HIT else f"get.{reason.name.lower()}"] += 1

    def count_put(self, status: Status, reason: Reason) -> None:
        """Count one chunk of a put or commit."""
        name = reason if reason else status
        self[f"put.{name.name.lower()}"] += 1


def names() -> Iterator[str]:
    """Every counter that can appear, so that a fresh store shows them as 0."""
    yield from ("get.requested", "put.requested", "dram.hits", "disk.hits")
    yield from ("disk.bytes_read", "disk.bytes_written", "disk.write_failures", "disk.journal_failures")
    yield from ("put.stored", "put.known")
    for reason in Reason:
        if reason:
            yield f"get.{reason.name.lower()}"
            yield f"put.{reason.name.lower()}"
