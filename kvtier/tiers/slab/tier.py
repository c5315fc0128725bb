"""SlabTier: the index of a slab, its journal, and the plans that read and write its slots."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvtier.config import PAGE, extent_area, journal_limit, page_up
from kvtier.errors import TierUnavailable
from kvtier.format import (
    RECORD_BYTES,
    SLAB_HEADER_BYTES,
    StoredChunk,
    owner_records,
    put_records,
    records_for,
    tombstone,
)
from kvtier.hashing import part_seed
from kvtier.index.cache import SlotCache
from kvtier.index.rows import COLUMNS
from kvtier.io.plan import Plan
from kvtier.owner import NOBODY
from kvtier.tiers.disk import DiskTier, Write
from kvtier.tiers.slab import directory
from kvtier.tiers.slab.compaction import Compactor
from kvtier.tiers.slab.endurance import Endurance
from kvtier.tiers.slab.journal import Journal
from kvtier.tiers.slab.opening import check_new, open_files
from kvtier.tiers.slab.recovery import Recovered, sums_shape
from kvtier.tiers.slab.snapshot import scan
from kvtier.tiers.slab.space import FreeSpace

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from kvtier.config import StoreConfig
    from kvtier.index.owners import Owners


class SlabTier(DiskTier):
    """Chunks in one file of slots.

    `lock` is the store's: it guards the index. The journal has its own, taken before the store's
    where both are needed, so that no look-up waits for a write to the journal.
    """

    kind = "slab"

    def __init__(
        self,
        config: StoreConfig,
        lock: threading.Lock,
        owners: Owners | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Open or create the tier in `config.path`; `owners` and `wall` as of SlotCache.

        Raises StoreInUse, IncompatibleStore, TierUnavailable, or InvalidRequest for a setting that
        does not fit what is there.
        """
        assert config.path is not None
        self.path = Path(config.path)
        self._lock = lock
        try:
            recovered = self._open(config)
        except OSError as error:
            reason = error.strerror or error
            if isinstance(error, PermissionError):
                reason = f"{reason}; choose another directory or mend its permissions"
            if error.errno == errno.EIO:
                reason = f"{reason}; `kvtier verify --repair` keeps what can be read"
            raise TierUnavailable(f"cannot open the store in {self.path}: {reason}") from error
        self._load(recovered, SlotCache(
            extent_area(self._header.capacity, self._header.chunk_bytes), self._header.extent_bytes,
            on_evict=self._bury, owners=owners, limits=config.quotas, wall=wall, policy=config.policy,
        ))  # fmt: skip

    def _open(self, config: StoreConfig) -> Recovered:
        check_new(self.path, config)
        with contextlib.ExitStack() as undo:
            self._lock_fd = directory.lock_directory(self.path, config.file_mode, config.directory_mode)
            undo.callback(os.close, self._lock_fd)
            self._header, self._file, recovered = open_files(self.path, config)
            undo.callback(os.close, self._file.fd)
            self.space = FreeSpace(self.path, 0 if self._file.reserved else config.free_space)
            self.endurance = Endurance(self.path, config.endurance, config.file_mode)
            undo.callback(self.endurance.close)
            limit = journal_limit(self._header.capacity, self._header.chunk_bytes)
            self.journal = Journal(
                self.path / directory.JOURNAL,
                self._file.journal_header,
                limit - (PAGE if config.endurance else 0),  # which has a file, too
                recovered.records,
            )
            if self._file.rewritten:
                self.endurance.spend(self.journal.nbytes)
            self.commit_lock = self.journal.lock
            undo.pop_all()
        return recovered

    def _load(self, recovered: Recovered, index: SlotCache) -> None:
        self.index = index
        index.holdings.owners.recover(recovered.owners)
        self._recorded = set(recovered.owners)
        columns = {name: recovered.chunks[name] for name in COLUMNS if name != "nbytes"}
        columns["nbytes"] = recovered.chunks["payload_bytes"]
        self.index.load(recovered.keys, recovered.slot_bytes, columns)
        self._sums = recovered.sums
        self._next_generation = recovered.next_generation
        # Records that live chunks take, and reserved slots will: counted by slot size, the most it can be.
        sizes, counts = np.unique(recovered.chunks["slot_bytes"], return_counts=True)
        self._live_records = sum(
            self._records(int(size)) * int(n) for size, n in zip(sizes, counts, strict=True)
        )
        self.compactor = Compactor(self.journal, self._plan_compaction, self._scan, self.endurance.spend)
        self._graves: list[int] = []  # generations whose tombstone is still to be written
        self._is_burying = False
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

    def reserve(self, nbytes: int, owner: int = NOBODY) -> int | None:
        """Offset of a slot for `nbytes` of payload, or None, also where the file system has no space left
        for it; see Tier.reserve.

        What it evicts is buried: call `write_tombstones` before writing to the slot.
        """
        if nbytes > self.largest_payload or not self.space.has(page_up(nbytes)):
            return None
        records = self._records(self.index.slots.size_for(nbytes))
        held = self.index.holdings.by_owner
        while self._live_records + len(held) + records + (owner not in held) > self.journal.max_live:
            if not self.index.evict_oldest():
                return None
        offset = self.index.reserve(nbytes, owner)
        if offset is not None:
            self._live_records += self._records(self.index.slots.size_at(offset))
        return offset

    @property
    def budget_left(self) -> float:
        """Bytes that may be written now, by the setting `endurance`."""
        return self.endurance.left

    def is_due(self, now: float) -> bool:
        """Whether the file system should be asked for its free space; see Tier.is_due."""
        return self.space.is_due(now)

    def look(self) -> None:
        """Ask the file system for its free space. May wait for the device."""
        with contextlib.suppress(OSError):  # a device that fails is the affair of what is written to it
            self.space.look()

    @property
    def extent_share(self) -> float:
        """The part of the tier that one extent takes up."""
        return 1 / self.index.slots.extents

    def slot_size(self, nbytes: int) -> int:
        """Bytes of the slot that `nbytes` would get now; 0 if they fit none."""
        return self.index.slots.size_for(nbytes) if nbytes <= self.largest_payload else 0

    def has_free(self, nbytes: int, owner: int = NOBODY) -> bool:
        """Whether there is a slot for `nbytes` of payload without evicting anything."""
        return (
            nbytes <= self.largest_payload
            and self.index.slots.has_free(nbytes)
            and not self.is_over_quota(nbytes, owner)
        )

    def release(self, offset: int) -> None:
        """Give back a reserved slot."""
        self._live_records -= self._records(self.index.slots.size_at(offset))
        self.index.release(offset)

    def discard(self, row: int) -> None:
        """Forget a chunk at once, and bury it."""
        self._bury(row)
        self.index.discard(row)

    def start_write(
        self,
        key: bytes,
        offset: int,
        payload_bytes: int,
        *,
        stored_bytes: int = 0,
        codec: int = 0,
        expires_at: int = 0,
    ) -> Write:
        """Begin a new use of a reserved slot, raw unless `stored_bytes` and `codec` say otherwise.

        `expires_at` is in seconds since 1970, 0 for never.
        """
        generation = self._next_generation
        self._next_generation += 1
        return Write(
            key, offset, generation, payload_bytes, stored_bytes or page_up(payload_bytes), codec,
            self.index.reserved_for(offset), self.index.expiry.now(), expires_at,
        )  # fmt: skip

    @property
    def part_bytes(self) -> int:
        """Bytes that a checksum is for; see DiskTier.part_bytes."""
        return self._header.part_bytes

    def plan(self) -> Plan:
        """An empty plan for this slab's file."""
        return Plan(fd=self._file.fd, part_bytes=self._header.part_bytes)

    def plan_read(
        self, plan: Plan, row: int, address: int, *, start: int = 0, nbytes: int | None = None
    ) -> None:
        """Add a read; see DiskTier.plan_read."""
        index = self.index
        offset = index.offset[row]
        extent, rest = divmod(offset, self._header.extent_bytes)
        table = self._sums[extent]
        first = start // self._header.part_bytes
        plan.add(
            offset=SLAB_HEADER_BYTES + offset + start,
            address=address,
            nbytes=index.stored_bytes[row] if nbytes is None else nbytes,
            seed=part_seed(index.key(row), index.generation[row], self._header.slab_id) + first,
            sums=table[rest // int(index.slots.slot_bytes[extent]), first:],
        )

    def plan_write(self, plan: Plan, write: Write, address: int) -> None:
        """Add a write from `address`, which holds payload or encoded form, and zeros up to whole pages."""
        self.space.take(write.stored_bytes)
        self.endurance.spend(write.stored_bytes)
        plan.add(
            offset=SLAB_HEADER_BYTES + write.offset,
            address=address,
            nbytes=write.stored_bytes,
            seed=part_seed(write.key, write.generation, self._header.slab_id),
            sums=None,
        )

    def bury(self) -> None:
        """Journal the end of every slot use that is over; see DiskTier.bury."""
        self.write_tombstones()

    def write_tombstones(self) -> None:
        """Journal the end of every slot use that is over. Called without the store's lock.

        No slot may be written before that: its last chunk would still be found after a crash.
        Raises OSError; the tombstones are then still to be written.
        """
        with self.journal.lock:
            with self._lock:
                graves, self._graves = self._graves, []
                self._is_burying = bool(graves)
            if not graves:
                return
            written = False
            try:
                # By pieces: after a compaction that makes room the rest of them mean nothing, but fit.
                for first in range(0, len(graves), step := max(1, self.journal.max_live // 2)):
                    self._append(np.concatenate([tombstone(g) for g in graves[first : first + step]]))
                written = True
            finally:
                with self._lock:
                    self._is_burying = False
                    self._graves = self._graves if written else graves + self._graves

    @property
    def has_graves(self) -> bool:
        """Whether a slot's former use is not over in the journal. Called with the store's lock held."""
        return self._is_burying or bool(self._graves)

    def commit(self, written: Sequence[Write], dropped: Sequence[Write]) -> None:
        """Journal finished writes; see DiskTier.commit. Of dropped ones nothing is left."""
        if written:
            self.journal_puts(written)

    def journal_puts(self, writes: Sequence[Write]) -> None:
        """Journal finished writes; the caller holds `journal.lock` until they are in the index.

        Raises OSError, and then none of them is in the journal.
        """
        header = self._header
        assert header.slab_id == self.journal.header.slab_id
        chunks = [
            StoredChunk(
                key=write.key,
                generation=write.generation,
                offset=write.offset,
                slot_bytes=self.index.slots.size_at(write.offset),
                payload_bytes=write.payload_bytes,
                stored_bytes=write.stored_bytes,
                sums=_known(write.sums),
                codec=write.codec,
                owner=write.owner,
                stored_at=write.stored_at,
                expires_at=write.expires_at,
            )
            for write in writes
        ]
        names = self.index.holdings.owners.names
        new = {write.owner for write in writes if write.owner in names} - self._recorded
        self._append(np.concatenate([owner_records(names[owner] for owner in new), put_records(chunks)]))
        self._recorded |= new

    def insert(self, write: Write) -> int:
        """Enter a journalled chunk into the index, pinned once. Returns its row.

        It takes the place of what is there under its key: its time was over, or the path was out when
        its key was put again.
        """
        self.make_way(write.key)
        extent, rest = divmod(write.offset, self._header.extent_bytes)
        size = self.index.slots.size_at(write.offset)
        shape = sums_shape(size, self._header.extent_bytes, self._header.part_bytes)
        table = self._sums.get(extent)
        if table is None or table.shape != shape:
            table = self._sums[extent] = np.zeros(shape, np.uint64)
        sums = _known(write.sums)
        table[rest // size, : len(sums)] = sums
        return self.index.insert(
            write.key, write.offset, write.payload_bytes, write.generation,
            stored_bytes=write.stored_bytes, codec=write.codec, stored_at=write.stored_at,
            expires_at=write.expires_at,
        )  # fmt: skip

    def bury_unborn(self, write: Write) -> None:
        """Give back the slot of a journalled write that must not be found: it was deleted meanwhile."""
        self._graves.append(write.generation)
        self.release(write.offset)

    def sync(self) -> None:
        """Have the device confirm payloads and journal. Raises OSError."""
        os.fdatasync(self._file.fd)
        with self.journal.lock:
            self.journal.sync()

    def stop(self, timeout: float) -> bool:
        """Give up a compaction; see DiskTier.stop."""
        return self.compactor.stop(timeout)

    def close(self) -> None:
        """Close the files and the directory; the compactor is stopped before. May wait for the device."""
        self.journal.close()
        self.endurance.save()
        self.endurance.close()
        os.close(self._file.fd)
        os.close(self._lock_fd)

    def drop_descriptors(self) -> None:
        """In a forked child: close what the parent goes on using."""
        for fd in (self._file.fd, self._lock_fd):
            with contextlib.suppress(OSError):
                os.close(fd)
        with contextlib.suppress(OSError):
            self.journal.close()
        self.compactor.drop_descriptors()
        self.endurance.close()

    def stats(self) -> dict[str, int | float | str]:
        """Gauges of the tier; see Tier.stats."""
        return {
            **super().stats(),
            **self.recovery,
            "direct": self._file.direct,
            "reserved": self._file.reserved,
            "low_space": not self.space.has(self._header.chunk_bytes),
            "journal_bytes": self.journal.nbytes,
            "compactions": self.compactor.done,
            "compactions_failed": self.compactor.failed,
            "extent_bytes": self._header.extent_bytes,
            "endurance_budget": self.endurance.per_day,
            "endurance_spent": self.endurance.spent,
        }

    def _records(self, slot_bytes: int) -> int:
        """Records that a chunk in a slot of this size takes at most."""
        return records_for(-(-slot_bytes // self._header.part_bytes))

    def _bury(self, row: int) -> None:
        self._live_records -= self._records(self.index.slots.size_at(self.index.offset[row]))
        self._graves.append(self.index.generation[row])

    def _append(self, records: npt.NDArray[np.void]) -> None:
        """Append under the journal's lock, which is let go of while the journal is full."""
        journal, held = self.journal, self.index.holdings.by_owner
        self.compactor.make_room(lambda: journal.has_room(len(records), self._live_records + len(held)))
        journal.append(records)
        self.endurance.spend(len(records) * RECORD_BYTES)
        self.endurance.save()
        if journal.is_due(self._live_records + len(held)):
            self.compactor.start()

    def _plan_compaction(self) -> tuple[int, int, npt.NDArray[np.void]]:
        with self._lock:
            holdings = self.index.holdings
            names = holdings.owners.names
            named = holdings.by_owner.keys() & names.keys()
            self._recorded &= named  # of all others, the next file has no OWNER record
            owners = owner_records(names[owner] for owner in named)
            return self._live_records + len(owners), self._next_generation, owners

    def _scan(self, check: Callable[[], None]) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
        return scan(self.index, self._sums, self._header, self._lock, check)


def _known(sums: npt.NDArray[np.uint64] | None) -> npt.NDArray[np.uint64]:
    assert sums is not None, "the write is not finished"
    return sums
