"""SlabTier: the index of a slab, its journal, and the plans that read and write its slots."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvtier.config import extent_area, journal_limit, page_up
from kvtier.errors import TierUnavailable
from kvtier.format import SLAB_HEADER_BYTES, put_records, records_for, tombstone
from kvtier.hashing import part_seed
from kvtier.index.cache import SlotCache
from kvtier.io.plan import Plan
from kvtier.tiers.base import Tier
from kvtier.tiers.slab import directory
from kvtier.tiers.slab.journal import Journal
from kvtier.tiers.slab.opening import check_new, open_files
from kvtier.tiers.slab.recovery import Recovered, sums_shape
from kvtier.tiers.slab.snapshot import snapshot

if TYPE_CHECKING:
    import threading

    import numpy.typing as npt

    from kvtier.config import StoreConfig
    from kvtier.io.base import Batch


@dataclass(slots=True)
class Write:
    """A payload on its way into a reserved slot."""

    key: bytes
    offset: int
    generation: int
    payload_bytes: int
    sums: npt.NDArray[np.uint64] | None = None
    """Filled in from the finished batch, before `commit`."""


class SlabTier(Tier):
    """Chunks in one file of slots.

    `lock` is the store's: it guards the index. The journal has its own, taken before the store's
    where both are needed, so that no look-up waits for a write to the journal.
    """

    name = "disk"

    def __init__(self, config: StoreConfig, lock: threading.Lock) -> None:
        """Open or create the tier in `config.path`.

        Raises StoreInUse, IncompatibleStore, TierUnavailable, or InvalidRequest for a setting that
        does not fit what is there.
        """
        assert config.path is not None
        self.path = Path(config.path)
        self._lock = lock
        check_new(self.path, config)
        with contextlib.ExitStack() as undo:
            self._lock_fd = directory.lock_directory(self.path)
            undo.callback(os.close, self._lock_fd)
            try:
                self._header, self._file, recovered = open_files(self.path, config)
                undo.callback(os.close, self._file.fd)
                self.journal = Journal(
                    self.path / directory.JOURNAL,
                    self._file.journal_header,
                    journal_limit(self._header.capacity, self._header.chunk_bytes),
                    recovered.records,
                )
            except OSError as error:
                reason = error.strerror or error
                raise TierUnavailable(f"cannot open the store in {self.path}: {reason}") from error
            undo.pop_all()
        self._load(recovered)

    def _load(self, recovered: Recovered) -> None:
        header = self._header
        area = extent_area(header.capacity, header.chunk_bytes)
        self.index = SlotCache(area, header.extent_bytes, on_evict=self._bury)
        self.index.load(
            recovered.keys,
            recovered.slot_bytes,
            recovered.chunks["offset"].astype(np.int64),
            recovered.chunks["payload_bytes"],
            recovered.chunks["generation"],
        )
        self._sums = recovered.sums
        self._next_generation = recovered.next_generation
        # Records that live chunks take, and reserved slots will: counted by slot size, the most it can be.
        sizes, counts = np.unique(recovered.chunks["slot_bytes"], return_counts=True)
        self._live_records = sum(
            self._records(int(size)) * int(n) for size, n in zip(sizes, counts, strict=True)
        )
        self._graves: list[int] = []  # generations whose tombstone is still to be written
        self.recovery = {
            "recovered": len(recovered.chunks),
            "recovery_damaged": recovered.damaged,
            "recovery_dropped": recovered.dropped,
            "recovery_journal_lost": int(recovered.journal_lost),
        }

    @property
    def capacity(self) -> int:
        """Most bytes the directory's files may take up."""
        return self._header.capacity

    def reserve(self, nbytes: int) -> int | None:
        """Offset of a slot for `nbytes` of payload, or None; see Tier.reserve.

        What it evicts is buried: call `write_tombstones` before writing to the slot.
        """
        if nbytes > self.largest_payload:
            return None
        records = self._records(self.index.slots.size_for(nbytes))
        while self._live_records + records > self.journal.max_live:
            if not self.index.evict_oldest():
                return None
        offset = self.index.reserve(nbytes)
        if offset is not None:
            self._live_records += self._records(self.index.slots.size_at(offset))
        return offset

    def release(self, offset: int) -> None:
        """Give back a reserved slot."""
        self._live_records -= self._records(self.index.slots.size_at(offset))
        self.index.release(offset)

    def discard(self, row: int) -> None:
        """Forget a chunk at once, and bury it."""
        self._bury(row)
        self.index.discard(row)

    def start_write(self, key: bytes, offset: int, payload_bytes: int) -> Write:
        """Begin a new use of a reserved slot."""
        generation = self._next_generation
        self._next_generation += 1
        return Write(key, offset, generation, payload_bytes)

    def abandon(self, write: Write) -> None:
        """Give back the slot of a write that will not be committed."""
        self.release(write.offset)

    def plan(self) -> Plan:
        """An empty plan for this slab's file."""
        return Plan(fd=self._file.fd, part_bytes=self._header.part_bytes)

    def plan_read(self, plan: Plan, row: int, address: int) -> None:
        """Add the read of a pinned chunk to `address`, which has room for whole pages."""
        index = self.index
        offset, nbytes = index.offset[row], index.nbytes[row]
        extent, rest = divmod(offset, self._header.extent_bytes)
        table = self._sums[extent]
        plan.add(
            offset=SLAB_HEADER_BYTES + offset,
            address=address,
            nbytes=page_up(nbytes),
            seed=part_seed(index.key(row), index.generation[row], self._header.slab_id),
            sums=table[rest // int(index.slots.slot_bytes[extent])],
        )

    def plan_write(self, plan: Plan, write: Write, address: int) -> None:
        """Add a write from `address`, which holds the payload and zeros up to whole pages."""
        plan.add(
            offset=SLAB_HEADER_BYTES + write.offset,
            address=address,
            nbytes=page_up(write.payload_bytes),
            seed=part_seed(write.key, write.generation, self._header.slab_id),
            sums=None,
        )

    def collect_sums(self, plan: Plan, batch: Batch, writes: list[Write]) -> None:
        """Hand the checksums that the engine computed to the writes of a finished batch."""
        for write, sums in zip(writes, plan.sums(batch), strict=True):
            write.sums = sums

    def write_tombstones(self) -> None:
        """Journal the end of every slot use that is over. Called without the store's lock.

        No slot may be written before that: its last chunk would still be found after a crash.
        Raises OSError; the tombstones are then still to be written.
        """
        with self.journal.lock:
            with self._lock:
                graves = self._graves
                self._graves = []
            if not graves:
                return
            try:
                self._append(np.concatenate([tombstone(generation) for generation in graves]))
            except OSError:
                with self._lock:
                    self._graves = graves + self._graves
                raise

    def journal_puts(self, writes: list[Write]) -> None:
        """Journal finished writes; the caller holds `journal.lock` until they are in the index.

        Raises OSError, and then none of them is in the journal.
        """
        header = self._header
        records = [
            put_records(
                key=write.key,
                generation=write.generation,
                offset=write.offset,
                slot_bytes=self.index.slots.size_at(write.offset),
                payload_bytes=write.payload_bytes,
                stored_bytes=page_up(write.payload_bytes),
                sums=_known(write.sums),
            )
            for write in writes
        ]
        assert header.slab_id == self.journal.header.slab_id
        self._append(np.concatenate(records))

    def insert(self, write: Write) -> int:
        """Enter a journalled chunk into the index, pinned once. Returns its row."""
        extent, rest = divmod(write.offset, self._header.extent_bytes)
        size = self.index.slots.size_at(write.offset)
        shape = sums_shape(size, self._header.extent_bytes, self._header.part_bytes)
        table = self._sums.get(extent)
        if table is None or table.shape != shape:
            table = self._sums[extent] = np.zeros(shape, np.uint64)
        sums = _known(write.sums)
        table[rest // size, : len(sums)] = sums
        return self.index.insert(write.key, write.offset, write.payload_bytes, write.generation)

    def bury_unborn(self, write: Write) -> None:
        """Give back the slot of a journalled write that must not be found: it was deleted meanwhile."""
        self._graves.append(write.generation)
        self.release(write.offset)

    def sync(self) -> None:
        """Have the device confirm payloads and journal. Raises OSError."""
        os.fdatasync(self._file.fd)
        with self.journal.lock:
            self.journal.sync()

    def close(self) -> None:
        """Close the files and let go of the directory."""
        self.journal.close()
        os.close(self._file.fd)
        os.close(self._lock_fd)

    def drop_descriptors(self) -> None:
        """In a forked child: close what the parent goes on using."""
        for fd in (self._file.fd, self._lock_fd):
            with contextlib.suppress(OSError):
                os.close(fd)
        with contextlib.suppress(OSError):
            self.journal.close()

    def stats(self) -> dict[str, int | float | str]:
        """Gauges of the tier; see Tier.stats."""
        return {
            **super().stats(),
            **self.recovery,
            "direct": self._file.direct,
            "reserved": self._file.reserved,
            "journal_bytes": self.journal.nbytes,
            "extent_bytes": self._header.extent_bytes,
        }

    def _records(self, slot_bytes: int) -> int:
        """Records that a chunk in a slot of this size takes at most."""
        return records_for(-(-slot_bytes // self._header.part_bytes))

    def _bury(self, row: int) -> None:
        self._live_records -= self._records(self.index.slots.size_at(self.index.offset[row]))
        self._graves.append(self.index.generation[row])

    def _append(self, records: npt.NDArray[np.void]) -> None:
        """Append under the journal's lock, rewriting the file first if it would grow too long."""
        if not self.journal.has_room(len(records), self._live_records):
            with self._lock:
                live = snapshot(self.index, self._sums, self._header)
                generation = self._next_generation
            self.journal.rewrite(live, generation)
        self.journal.append(records)


def _known(sums: npt.NDArray[np.uint64] | None) -> npt.NDArray[np.uint64]:
    assert sums is not None, "the write is not finished"
    return sums
