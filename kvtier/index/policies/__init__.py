"""Eviction policies: who leaves a tier next. Each is one file; `make` finds them by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtier.index.policies.fifo import Fifo
from kvtier.index.policies.lru import Lru
from kvtier.index.policies.reuse import Reuse
from kvtier.index.policies.s3fifo import S3Fifo
from kvtier.index.policies.sieve import Sieve

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    from kvtier.config import PolicyName
    from kvtier.index.policies.base import Policy

POLICIES: dict[str, type[Policy[Any]]] = {kind.name: kind for kind in (Lru, S3Fifo, Sieve, Fifo, Reuse)}


def make(
    name: PolicyName, pins: array[int], key: Callable[[int], bytes], wall: Callable[[], float]
) -> Policy[Any]:
    """A policy for the entries of an index; the arguments as of Policy."""
    return POLICIES[name](pins, key, wall)
