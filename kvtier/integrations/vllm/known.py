"""What the scheduler knows of the workers' stores: which chunks every one of them has."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvtier.hashing import derived_keys
from kvtier.integrations.vllm.messages import unpacked

if TYPE_CHECKING:
    from kvtier.integrations.vllm.messages import Changes
    from kvtier.types import ChunkKey

_DISTRUST = 60.0
"""Seconds for which a chunk that could not be loaded counts as absent, unless it is stored anew."""


class KnownChunks:
    """A chunk counts as stored when all workers have it. One thread at a time."""

    def __init__(self, workers: int) -> None:
        self._keys: list[set[bytes]] = [set() for _ in range(workers)]
        self._namespaces: list[bytes] = [b""] * workers
        self._missing = set(range(workers))  # that have not told anything yet
        self._distrusted: dict[bytes, float] = {}  # until when
        self.version = 0
        """Another number whenever something may have changed."""

    def take(self, worker: int, changes: Changes) -> None:
        """Learn what has changed in a worker's store."""
        self._namespaces[worker] = changes.namespace
        self._missing.discard(worker)
        added, removed = unpacked(changes.added), unpacked(changes.removed)
        self._keys[worker].update(added)
        self._keys[worker].difference_update(removed)
        for key in added if self._distrusted else ():
            self._distrusted.pop(key, None)
        until = time.monotonic() + _DISTRUST
        self._distrusted.update(dict.fromkeys(unpacked(changes.failed), until))
        self.version += 1

    def is_stored(self, names: list[ChunkKey]) -> bool:
        """Whether all workers have a chunk, of which `names` has the key at each of them."""
        if self._distrusted and not self._distrusted.keys().isdisjoint(names):
            self._forgive()
            if not self._distrusted.keys().isdisjoint(names):
                return False
        return all(name in keys for name, keys in zip(names, self._keys, strict=True))

    def names(self, hashes: list[bytes], era: bytes) -> list[list[ChunkKey]] | None:
        """The keys at each worker of each of the chunks with these hashes; None as long as some worker has
        not told of itself.
        """
        if self._missing:
            return None
        of_workers = [derived_keys(hashes, namespace=space, extra=era) for space in self._namespaces]
        return [list(names) for names in zip(*of_workers, strict=True)]

    def _forgive(self) -> None:
        now = time.monotonic()
        for key in [key for key, until in self._distrusted.items() if until <= now]:
            del self._distrusted[key]
            self.version += 1
