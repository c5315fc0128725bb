"""Counters of a store: plain names and numbers, changed under the store's lock."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvtier.types import Reason, Status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.types import TierName


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
