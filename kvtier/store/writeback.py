"""Write-back: chunks from DRAM to disk in batches, journalled once the device has taken them."""

from __future__ import annotations

import errno
import logging
from collections import deque
from typing import TYPE_CHECKING

from kvtier.config import page_up
from kvtier.store.core import MAX_BATCH_BYTES
from kvtier.types import FlushResult, Reason, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvtier.io.base import Batch
    from kvtier.io.plan import Plan
    from kvtier.store.core import Core
    from kvtier.store.put import Flush, Put, WriteThrough
    from kvtier.tiers.slab.tier import SlabTier

_log = logging.getLogger(__name__)
_WINDOW_BESIDE_READS = 4 << 20  # bytes; whoever reads is waited for, a write is not
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Writeback:
    """Writes chunks to the disk tier. `finish` is told of puts that may be done."""

    def __init__(self, core: Core, finish: Callable[[Iterable[Put]], None]) -> None:
        self._core = core
        self._finish = finish
        self._under_way: dict[bytes, WriteThrough] = {}
        self._waiting: deque[WriteThrough] = deque()
        self._outstanding: set[WriteThrough] = set()
        self._flushes: set[Flush] = set()
        self._window = 0  # bytes in the kernel, or on their way into the journal
        self._failed = 0  # since the last flush

    def is_idle(self) -> bool:
        """Whether no write will free a slot by itself. Called with the lock held."""
        return not self._outstanding

    def under_way(self, key: bytes) -> WriteThrough | None:
        """The write of this key, if it is not done. Called with the lock held."""
        write = self._under_way.get(key)
        return None if write is None or write.deleted else write

    def add(self, write: WriteThrough) -> None:
        """Queue a write; `pump` starts it. Called with the lock held."""
        self._outstanding.add(write)
        self._under_way[write.key] = write
        self._waiting.append(write)

    def forget(self, keys: set[bytes]) -> None:
        """Have writes under way end in nothing. Called with the lock held."""
        for key in keys & self._under_way.keys():
            self._under_way[key].deleted = True

    def give_up(self) -> None:
        """Tell all who wait for the device that the store is closed; what it holds stays its own."""
        with self._core.lock:
            puts = {put: None for write in self._outstanding for put, _, _ in write.waiters}
            for write in self._outstanding:
                for put, i, _ in write.waiters:
                    if put.is_open(i):
                        self._core.close_put(put, i, Status.FAILED, Reason.CLOSED, 0)
            flushes, self._flushes = self._flushes, set()
        self._finish(puts)
        for flush in flushes:
            flush.give_up()

    def flush(self, flush: Flush) -> None:
        """Resolve `flush` when all writes under way have ended and the device has confirmed them."""
        with self._core.lock:
            for write in self._under_way.values():
                write.flushes.append(flush)
            flush.open = len(self._under_way)
            self._flushes.add(flush)
            ready = flush.claim()
        if ready:
            self._sync(flush)

    def pump(self) -> None:
        """Start as many waiting writes as the window and the free slots allow."""
        if not self._waiting:
            return
        batches: list[tuple[Plan, list[WriteThrough]]] = []
        ended: list[WriteThrough] = []
        with self._core.lock:
            window = self._core.config.io_window if self._core.reads_are_idle() else _WINDOW_BESIDE_READS
            while self._waiting and self._window < window:
                write = self._waiting[0]
                if self._place(write):
                    self._add(batches, write)
                elif write.deleted:
                    self._settle(write, Status.FAILED, Reason.DELETED)
                    ended.append(write)
                elif self._may_place_later(write):
                    break
                else:
                    self._failed += 1
                    self._settle(write, Status.REFUSED, Reason.NO_SPACE)
                    ended.append(write)
                self._waiting.popleft()
        if batches:
            self._start(batches)
        if ended:
            self._after(ended)

    def _place(self, write: WriteThrough) -> bool:
        """Give a write its slot on disk; False if it is no longer wanted, or there is none for it."""
        if write.deleted or not write.fits:
            return False
        offset = self._disk.reserve(write.nbytes)
        if offset is not None:
            write.write = self._disk.start_write(write.key, offset, write.nbytes)
        return offset is not None

    def _may_place_later(self, write: WriteThrough) -> bool:
        """Whether something under way will free a slot on disk."""
        return write.fits and bool(self._window or not self._core.reads_are_idle())

    @property
    def _disk(self) -> SlabTier:
        assert self._core.disk is not None, "only a disk tier is written back to"
        return self._core.disk

    def _add(self, batches: list[tuple[Plan, list[WriteThrough]]], write: WriteThrough) -> None:
        if not batches or batches[-1][0].nbytes >= MAX_BATCH_BYTES:
            batches.append((self._disk.plan(), []))
        plan, writes = batches[-1]
        self._disk.plan_write(plan, write.slot, write.tier.address(write.offset))
        writes.append(write)
        self._window += page_up(write.nbytes)

    def _start(self, batches: list[tuple[Plan, list[WriteThrough]]]) -> None:
        """Hand batches to the engine, once the slots' former use is over in the journal, too."""
        try:
            self._disk.write_tombstones()
        except OSError as error:
            for plan, writes in batches:
                self._finish_writes(plan.nbytes, [], [(write, error.errno or errno.EIO) for write in writes])
            return
        for plan, writes in batches:
            self._core.submit(plan.batch(self._on_done, (plan, writes)))

    def _on_done(self, batch: Batch) -> None:
        """Journal what the device has taken: on a thread of the engine."""
        plan, writes = batch.context
        self._disk.collect_sums(plan, batch, [write.slot for write in writes])
        written, failed = [], []
        # Held until the chunks are in the index: a rewrite of the journal copies what is there, and
        # whoever deletes one of them meanwhile waits with its tombstone.
        with self._disk.journal.lock:
            for write, outcome in zip(writes, plan.outcomes(batch), strict=True):
                if outcome or write.deleted:
                    failed.append((write, outcome))
                else:
                    written.append(write)
            if written:
                try:
                    self._disk.journal_puts([write.slot for write in written])
                except OSError as error:
                    _log.warning("cannot append to the journal of %s: %s", self._disk.path, error)
                    failed += [(write, error.errno or errno.EIO) for write in written]
                    written = []
                    with self._core.lock:
                        self._core.counters["disk.journal_failures"] += 1
            self._finish_writes(plan.nbytes, written, failed)
        self._core.pump()

    def _finish_writes(
        self, nbytes: int, written: list[WriteThrough], failed: list[tuple[WriteThrough, int]]
    ) -> None:
        """Enter journalled writes into the index, give up the failed ones, and tell who waits."""
        disk, counters = self._disk, self._core.counters
        with self._core.lock:
            for write in reversed(written):  # tail first, so that the head is used last
                counters["disk.bytes_written"] += page_up(write.nbytes)
                if write.deleted:
                    disk.bury_unborn(write.slot)
                    self._settle(write, Status.FAILED, Reason.DELETED)
                else:
                    disk.index.unpin(disk.insert(write.slot))
                    self._settle(write)
            for write, error in failed:
                disk.abandon(write.slot)
                if write.deleted:
                    self._settle(write, Status.FAILED, Reason.DELETED)
                    continue
                counters["disk.write_failures"] += 1
                self._failed += 1
                full = error in _FULL
                self._settle(
                    write, Status.REFUSED if full else Status.FAILED,
                    Reason.NO_SPACE if full else Reason.IO_ERROR,
                )  # fmt: skip
            self._window -= nbytes
            self._core.changed.notify_all()
        self._after([*written, *(write for write, _ in failed)])

    def _settle(
        self, write: WriteThrough, status: Status | None = None, reason: Reason = Reason.NONE
    ) -> None:
        """End a write: give those who wait `status`, or what each of them was promised."""
        self._outstanding.discard(write)
        if self._under_way.get(write.key) is write:
            del self._under_way[write.key]
        write.put_down()
        write.put.writing -= 1
        if write.put.writing == 0:  # batches ended in any order: the head is to outlive the tail
            self._disk.touch_prefix(write.put.keys)
        for put, i, promised in write.waiters:
            if put.is_open(i):
                outcome = promised if status is None else status
                stored = write.nbytes if outcome is Status.STORED else 0
                self._core.close_put(put, i, outcome, reason, stored)
        for flush in write.flushes:
            flush.open -= 1

    def _after(self, writes: list[WriteThrough]) -> None:
        """Tell the puts and flushes that waited for these writes."""
        self._finish({put: None for write in writes for put, _, _ in write.waiters})
        flushes = {flush: None for write in writes for flush in write.flushes}
        with self._core.lock:
            ready = [flush for flush in flushes if flush.claim()]
        for flush in ready:
            self._core.copier.submit(lambda flush=flush: self._sync(flush))  # type: ignore[misc]

    def _sync(self, flush: Flush) -> None:
        synced = False
        if self._core.disk is not None:
            try:
                self._core.disk.write_tombstones()
                self._core.disk.sync()
                synced = True
            except OSError as error:
                _log.warning("cannot sync %s: %s", self._core.disk.path, error)
        with self._core.lock:
            failed, self._failed = self._failed, 0
            if flush not in self._flushes:
                return
            self._flushes.remove(flush)
        flush.transfer._finish(FlushResult(synced, failed))
