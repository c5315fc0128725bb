"""Hits in DRAM: copies into callers' memory."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvtier.buffers import copy_hashed, copy_many
from kvtier.types import Reason, Status, TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvtier.store.core import Core
    from kvtier.store.request import Read

Hit = tuple[int, int]
"""The item of a read, and the row of its chunk, which is pinned."""


class HitCopier:
    """Copies what reads find in DRAM, on the thread of `Core.copier` or the one that waits for it."""

    def __init__(self, core: Core, finish: Callable[[Iterable[Read]], None]) -> None:
        """`finish` is told of reads that may be done."""
        self.core = core
        self.finish = finish
        self.copying = 0
        """Slots that copies hold."""

    def start(self, read: Read, hits: list[Hit]) -> None:
        """Copy `hits`, then let go of them. Called with the lock held."""
        read.copying.update(i for i, _ in hits)
        self.copying += len(hits)
        copy = _Copy(self, read, hits)
        read.transfer._help = copy
        self.core.copier.submit(copy)


class _Copy:
    """The hits of one read: a call that does its work once, for whichever thread comes first."""

    def __init__(self, copier: HitCopier, read: Read, hits: list[Hit]) -> None:
        self._copier = copier
        self._read = read
        self._hits = hits
        self._claim = threading.Lock()

    def __call__(self) -> None:
        """Copy and settle, unless another thread does."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            bad = self._copy()
        except BaseException:  # Ctrl-C in the thread that waits: the other one does it all again
            self._claim = threading.Lock()
            self._copier.core.copier.submit(self)
            raise
        self._settle(bad)

    def _copy(self) -> set[int]:
        """Copy; the rows whose bytes are not those that were put, if that is to be checked."""
        dram, hits = self._copier.core.dram, self._hits
        sources = [dram.address(dram.index.offset[row]) for _, row in hits]
        targets = [self._read.targets[i] for i, _ in hits]
        lengths = [dram.index.nbytes[row] for _, row in hits]
        if not self._copier.core.config.check_dram:
            copy_many(sources, targets, lengths)
            return set()
        sums = copy_hashed(sources, targets, lengths)
        return {row for (_, row), found in zip(hits, sums, strict=True) if found != dram.checksum(row)}

    def _settle(self, bad: set[int]) -> None:
        """Give the items their outcome, and let go of the slots."""
        copier, read, hits = self._copier, self._read, self._hits
        core, dram = copier.core, copier.core.dram
        with core.lock:
            core.counters["dram.hits"] += sum(row not in bad for _, row in hits)
            for i, row in hits:
                if row not in bad:
                    read.close(i, Status.HIT, Reason.NONE, dram.index.nbytes[row], TierName.DRAM)
                    continue
                read.close(i, Status.MISS, Reason.CHECKSUM)
                core.counters.count_get(Status.MISS, Reason.CHECKSUM, TierName.NONE)
                if not dram.index.is_gone(row):
                    dram.discard(row)
            for _, row in reversed(hits):  # from tail to head, so that the head is used last
                dram.index.unpin(row)
            read.copying.difference_update(i for i, _ in hits)
            copier.copying -= len(hits)
            core.changed.notify_all()
        copier.finish([read])
        core.pump()
