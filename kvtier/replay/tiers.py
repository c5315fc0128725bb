"""Tiers without payloads: the real index and policy of each, and what a request does to them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kvtier.config import PAGE
from kvtier.index.admission import make as make_admission
from kvtier.index.cache import SlotCache
from kvtier.owner import NOBODY
from kvtier.tiers.base import NO_ROW, Tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.config import AdmissionName, PolicyName


class EmptyTier(Tier):
    """A tier of so many slots of one size, in which nothing is stored."""

    name = "replay"

    def __init__(self, chunks: int, policy: PolicyName, wall: Callable[[], float]) -> None:
        """`wall` tells the seconds of the trace."""
        self.chunks = chunks
        self.index = SlotCache(chunks * PAGE, chunks * PAGE, policy=policy, wall=wall)
        self.written = 0

    @property
    def capacity(self) -> int:
        """See Tier."""
        return self.chunks * PAGE

    def reserve(self, nbytes: int, owner: int = NOBODY) -> int | None:
        """See Tier."""
        return self.index.reserve(nbytes, owner)

    def find_all(self, keys: list[bytes]) -> list[int]:
        """Rows of the head of a request that the tier can hold, NO_ROW for what is absent."""
        return self.index.table.find_all(keys[: self.chunks])

    def serve(self, keys: list[bytes], rows: list[int], absent: list[bytes]) -> None:
        """Use what a request found at `rows`, then enter `absent` of its keys, head first."""
        index = self.index
        known = [row for row in reversed(rows) if row != NO_ROW]
        index.touch(known)
        if not absent:
            return
        self.written += len(index.fill(absent, PAGE))
        if known and known[0] == rows[len(known) - 1]:  # they are the head: what came in is behind them
            index.order(known)
        elif known:
            self.order_prefix(keys[: self.chunks])


@dataclass
class Counts:
    """What a replay counted, in chunks."""

    references: int = 0
    hits_dram: int = 0
    hits_disk: int = 0
    orphans: int = 0
    """References to chunks that some tier had, behind one that none had."""
    written_dram: int = 0
    written_disk: int = 0
    evicted_dram: int = 0
    evicted_disk: int = 0
    refused: int = 0
    """References to chunks that were not admitted to the lowest tier."""

    def minus(self, other: Counts) -> Counts:
        """What was counted since `other`."""
        names = [field.name for field in fields(self)]
        return Counts(**{name: getattr(self, name) - getattr(other, name) for name in names})


class Tiers:
    """DRAM above disk, or the disk tier alone. The rules are those of the store:

    A get takes the longest prefix that is in any tier, and brings into DRAM what only the disk has. What is
    behind it is put, into DRAM and through to disk, unless a tier has it. A request larger than a tier
    keeps its head there. Every tier sees every use.
    """

    def __init__(
        self,
        chunks: int,
        policy: PolicyName,
        *,
        dram_chunks: int = 0,
        dram_policy: PolicyName = "lru",
        admission: AdmissionName = "always",
    ) -> None:
        self.now = 0.0
        self.disk = EmptyTier(chunks, policy, lambda: self.now)
        self.dram = EmptyTier(dram_chunks, dram_policy, lambda: self.now) if dram_chunks else None
        self._admission = make_admission(admission)
        self._counts = Counts()

    def serve(self, time: float, keys: list[bytes]) -> None:
        """Play a request: its keys, head first."""
        self.now = time
        counts, disk, dram = self._counts, self.disk, self.dram
        counts.references += len(keys)
        on_disk = disk.find_all(keys)
        if dram is None:
            found = _prefix(on_disk)
            counts.hits_disk += found
            absent = [key for key, row in zip(keys, on_disk, strict=False) if row == NO_ROW]
            counts.orphans += len(on_disk) - found - len(absent)
        else:
            absent = self._serve_from_dram(dram, keys, on_disk)
        if self._admission.is_selective:
            absent = self._admit(absent)
        disk.serve(keys, on_disk, absent)

    def _serve_from_dram(self, dram: EmptyTier, keys: list[bytes], on_disk: list[int]) -> list[bytes]:
        """The same in two tiers, as far as DRAM is concerned. Returns what the disk is to get."""
        counts, count = self._counts, len(keys)
        in_dram = dram.find_all(keys)
        if count == len(on_disk) == len(in_dram) and NO_ROW not in in_dram:
            counts.hits_dram += count
            dram.serve(keys, in_dram, [])
            return []
        upper = in_dram + [NO_ROW] * (count - len(in_dram))
        lower = on_disk + [NO_ROW] * (count - len(on_disk))
        nowhere = [NO_ROW == row == other for row, other in zip(upper, lower, strict=True)]
        found = nowhere.index(True) if True in nowhere else count
        hits = found - upper[:found].count(NO_ROW)
        counts.hits_dram += hits
        counts.hits_disk += found - hits
        new = [key for key, is_new in zip(keys, nowhere, strict=True) if is_new]
        counts.orphans += count - found - len(new)
        promoted = [key for key, row in zip(keys[:found], in_dram, strict=False) if row == NO_ROW]
        fits = sum(nowhere[: dram.chunks])
        dram.serve(keys, in_dram, promoted + new[:fits])
        return new[: sum(nowhere[: self.disk.chunks])]

    def _admit(self, absent: list[bytes]) -> list[bytes]:
        index, admits = self.disk.index, self._admission.admits
        left = self.disk.chunks - len(index)
        admitted: list[bytes] = []
        for key in absent:
            if admits(key, lambda: len(admitted) < left):
                admitted.append(key)
        self._counts.refused += len(absent) - len(admitted)
        return admitted

    def counts(self) -> Counts:
        """What was counted up to now; a copy."""
        counts = self._counts
        counts.written_disk, counts.evicted_disk = self.disk.written, self.disk.index.evicted
        if self.dram is not None:
            counts.written_dram, counts.evicted_dram = self.dram.written, self.dram.index.evicted
        return counts.minus(Counts())


def _prefix(rows: list[int]) -> int:
    return rows.index(NO_ROW) if NO_ROW in rows else len(rows)
