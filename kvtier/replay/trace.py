"""Trace: requests over time, each the chunks of a prefix."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    import numpy.typing as npt


@dataclass(frozen=True)
class Trace:
    """Requests in the order of time. Chunks are numbered from 0 in the order in which they first occur."""

    name: str
    times: list[float]
    """Seconds of each request, from any start, never falling."""
    requests: list[list[int]]
    """The chunks of each, head first, none twice."""
    unique: int
    """Distinct chunks."""

    @property
    def references(self) -> int:
        """Chunks of all requests."""
        return sum(map(len, self.requests))

    def keys(self) -> list[bytes]:
        """A key of 32 bytes for each chunk."""
        return [hashlib.sha256(b"kvtier replay %d" % chunk).digest() for chunk in range(self.unique)]

    def flat(self) -> npt.NDArray[np.int64]:
        """Every reference, requests in order and each from its head: shape (references,)."""
        flat = (chunk for request in self.requests for chunk in request)
        return np.fromiter(flat, np.int64, self.references)

    def first_counted(self, warm: float) -> int:
        """The first request that counts if a share `warm` of them only fills the tiers."""
        return int(len(self.requests) * warm)


def make_trace(name: str, requests: Iterable[tuple[float, list[Hashable]]]) -> Trace:
    """A trace of requests in any order, whose chunks have any names; empty requests are left out."""
    numbers: dict[Hashable, int] = {}
    ordered = sorted((request for request in requests if request[1]), key=lambda request: request[0])
    chunks = [[numbers.setdefault(chunk, len(numbers)) for chunk in names] for _, names in ordered]
    return Trace(name, [time for time, _ in ordered], chunks, len(numbers))
