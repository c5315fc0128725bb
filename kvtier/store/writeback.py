"""Write-back: chunks from DRAM to disk in batches, journalled once the device has taken them."""

from __future__ import annotations

import errno
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from kvtier.codec import Codec
from kvtier.store.encoder import Encoder
from kvtier.store.landing import may_hold
from kvtier.store.paths import DiskPath, batch_for
from kvtier.tiers.base import NO_ROW
from kvtier.types import FlushResult, Reason, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvtier.io.base import Batch
    from kvtier.store.core import Core
    from kvtier.store.paths import PathBatch
    from kvtier.store.put import Flush, Put, WriteThrough

_FULL = (errno.ENOSPC, errno.EDQUOT)
_Writes: TypeAlias = "PathBatch[WriteThrough]"


class Writeback:
    """Writes chunks to the disk tier's paths. `finish` is told of puts that may be done."""

    def __init__(self, core: Core, finish: Callable[[Iterable[Put]], None]) -> None:
        self._core = core
        self._finish = finish
        self.encoder = Encoder(core, self._take_encoded)
        self._under_way: dict[bytes, WriteThrough] = {}
        self._waiting: deque[WriteThrough] = deque()
        self._outstanding: set[WriteThrough] = set()
        self._flushes: set[Flush] = set()
        self._failed = 0  # since the last flush

    def is_idle(self) -> bool:
        """Whether no write will free a slot by itself. Called with the lock held."""
        return not self._outstanding

    def under_way(self, key: bytes) -> WriteThrough | None:
        """The write of this key in its time, if it is not done. Called with the lock held."""
        write = self._under_way.get(key)
        return None if write is None or write.deleted or self._is_over(write) else write

    def _is_over(self, write: WriteThrough) -> bool:
        return 0 < write.expires_at <= self._core.wall()

    def add(self, write: WriteThrough) -> None:
        """Queue a write, or refuse it at once; `pump` starts it. Called with the lock held."""
        self._outstanding.add(write)
        self._under_way[write.key] = write
        if not self._core.admission.admits(write):
            self._core.counters["disk.admission_refused"] += 1
            self._failed += 1
            self._settle(write, Status.REFUSED, Reason.ADMISSION)
        elif write.codec is Codec.RAW:
            self._waiting.append(write)
        else:
            self.encoder.submit(write)

    def stop(self) -> None:
        """End the thread that encodes."""
        self.encoder.stop()

    def _take_encoded(self, write: WriteThrough) -> None:
        with self._core.lock:
            self._waiting.append(write)
        self.pump()

    def forget(self, keys: set[bytes]) -> None:
        """Have writes under way end in nothing. Called with the lock held."""
        for key in keys & self._under_way.keys():
            self._under_way[key].deleted = True

    def forget_owners(self, owners: set[int]) -> int:
        """The same of all writes for these owners; how many chunks of them no tier has yet."""
        writes = [write for key, write in self._under_way.items() if write.owner in owners]
        writes = [write for write in writes if self.under_way(write.key)]
        for write in writes:
            write.deleted = True
        tiers = self._core.tiers
        return sum(all(tier.index.find(write.key) == NO_ROW for tier in tiers) for write in writes)

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
            end = time.monotonic() + self._core.config.put_timeout
            flush.late = self._core.clock.call_at(end, partial(self._end_flush, flush, False))
            ready = flush.claim()
        if ready:
            self._sync(flush)

    def pump(self) -> None:
        """Start as many waiting writes as the windows and the free slots allow."""
        if not self._waiting:
            return
        batches: list[_Writes] = []
        ended: list[WriteThrough] = []
        blocked: list[WriteThrough] = []
        with self._core.lock:
            now = time.monotonic()
            self._core.paths.notice(now)
            while self._waiting:
                write = self._waiting[0]
                if write.deleted:
                    self._settle(write, Status.FAILED, Reason.DELETED)
                    ended.append(write)
                elif path := self._place(write, now):
                    self._add(batches, path, write, now)
                elif all(path.health.is_down for path in self._core.paths):
                    self._failed += 1
                    self._settle(write, Status.REFUSED, Reason.TIER_DOWN)
                    ended.append(write)
                elif self._may_place_later(write):
                    if not self._is_over_quota(write):
                        break
                    blocked.append(write)  # others do not wait for its tenant's own chunks
                else:
                    self._failed += 1
                    reason = Reason.QUOTA if self._is_over_quota(write) else Reason.NO_SPACE
                    self._settle(write, Status.REFUSED, reason)
                    ended.append(write)
                self._waiting.popleft()
            self._waiting.extendleft(reversed(blocked))
            if ended:
                self._core.changed.notify_all()
        if batches:
            self._start(batches)
        if ended:
            self._after(ended)

    def _place(self, write: WriteThrough, now: float) -> DiskPath | None:
        """Give a write its slot on the path whose turn it is; None if no path has one for it now."""
        for path in self._core.paths.by_turn(write.slot_bytes, write.owner):
            if not (
                path.may_write(now)
                and write.put.fits(path, write.slot_bytes, write.owner)
                and (write.tier is not self._core.landing or may_hold(self._core, path, write.stored_bytes))
                and path.health.may_ask(now)
            ):
                continue
            offset = path.tier.reserve(write.slot_bytes, write.owner)
            if offset is not None:
                write.write = path.tier.start_write(
                    write.key, offset, write.nbytes, stored_bytes=write.stored_bytes, codec=write.codec,
                    expires_at=write.expires_at,
                )  # fmt: skip
                write.put.charge(path, path.tier.index.slots.size_at(offset), write.owner)
                self._core.paths.take_turn(path, write.stored_bytes)
                return path
        return None

    def _is_over_quota(self, write: WriteThrough) -> bool:
        """Whether only chunks of its own tenant could make room for a write."""
        paths = [path for path in self._core.paths if not path.health.is_down]
        return all(path.tier.is_over_quota(write.slot_bytes, write.owner) for path in paths)

    def _may_place_later(self, write: WriteThrough) -> bool:
        """Whether something under way will free a slot, or a place in a window."""
        under_way = not self._core.reads_are_idle()
        return any(
            not path.health.is_down
            and write.put.fits(path, write.slot_bytes, write.owner)
            and (under_way or path.writes.in_flight)
            for path in self._core.paths
        )

    def _add(self, batches: list[_Writes], path: DiskPath, write: WriteThrough, now: float) -> None:
        batch = batch_for(batches, path, path.writes)
        path.tier.plan_write(batch.plan, write.slot, write.address)
        batch.chunks.append(write)
        path.writes.enter(write.stored_bytes, now)

    def _start(self, batches: list[_Writes]) -> None:
        """Hand batches to the engines, once the slots' former use is over in the journal, too."""
        with self._core.lock:
            first = {batch.path: batch.path.tier.has_graves for batch in batches}
        for path, has_graves in first.items():
            own = [batch for batch in batches if batch.path is path]
            if has_graves or path.tier.shared:
                path.keeper.submit(partial(self._prepare_and_submit, own))
            else:
                self._submit(own)

    def _prepare_and_submit(self, batches: list[_Writes]) -> None:
        for batch in batches:
            try:
                batch.path.tier.prepare(batch.plan)
            except OSError as error:
                self._finish_writes(batch, [], [(write, error.errno or errno.EIO) for write in batch.chunks])
            else:
                self._submit([batch])

    def _submit(self, batches: list[_Writes]) -> None:
        for batch in batches:
            batch.path.submit(batch.plan.batch(self._on_done, batch))

    def _on_done(self, done: Batch) -> None:
        """Have what the device has taken found again: on a thread of the engine, if that need not wait."""
        batch: _Writes = done.context
        if batch.path.tier.shared:
            batch.path.keeper.submit(partial(self._commit, done))
        else:
            self._commit(done)

    def _commit(self, done: Batch) -> None:
        batch: _Writes = done.context
        disk = batch.path.tier
        disk.collect_sums(batch.plan, done, [write.slot for write in batch.chunks])
        written, failed = [], []
        # Held until the chunks are in the index: a rewrite of the journal copies what is there, and
        # whoever deletes one of them meanwhile waits with its tombstone.
        with disk.commit_lock:
            for write, outcome in zip(batch.chunks, batch.plan.outcomes(done), strict=True):
                if outcome or write.deleted:
                    failed.append((write, outcome))
                else:
                    written.append(write)
            try:
                disk.commit([write.slot for write in written], [write.slot for write, _ in failed])
            except OSError as error:
                batch.path.complain(f"cannot commit what was written: {error}")
                failed += [(write, error.errno or errno.EIO) for write in written]
                written = []
                with self._core.lock:
                    self._core.counters["disk.journal_failures"] += 1
            self._finish_writes(batch, written, failed)
        self._core.pump()

    def _finish_writes(
        self,
        batch: _Writes,
        written: list[WriteThrough],
        failed: list[tuple[WriteThrough, int]],
    ) -> None:
        """Enter journalled writes into the index, give up the failed ones, and tell who waits."""
        disk, counters = batch.path.tier, self._core.counters
        with self._core.lock:
            for write in reversed(written):  # tail first, so that the head is used last
                counters["disk.bytes_written"] += write.stored_bytes
                if write.deleted:
                    disk.bury_unborn(write.slot)
                    self._settle(write, Status.FAILED, Reason.DELETED)
                elif self._under_way.get(write.key) is not write:  # its time was over, and it was put again
                    disk.bury_unborn(write.slot)
                    self._settle(write)
                else:
                    disk.index.unpin(disk.insert(write.slot))
                    if write.expires_at:
                        self._core.sweeper.start()
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
            now = time.monotonic()
            batch.path.writes.leave(
                batch.plan.nbytes, now, busy=bool(self._waiting), chunks=len(batch.chunks)
            )
            batch.path.learn([error for _, error in failed], now)
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
        self._core.admission.ended(write)
        write.put.writing -= 1
        if write.put.writing == 0:  # batches ended in any order: the head is to outlive the tail
            for path in self._core.paths:
                path.tier.order_prefix(write.put.keys)
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
            self._sync(flush)

    def _sync(self, flush: Flush) -> None:
        self._core.paths.on_each(DiskPath.settle, partial(self._end_flush, flush))

    def _end_flush(self, flush: Flush, synced: bool) -> None:
        """Give a flush its outcome, unless it has one."""
        with self._core.lock:
            if flush not in self._flushes:
                return
            self._flushes.remove(flush)
            failed, self._failed = self._failed, 0
        if flush.late is not None:
            flush.late.cancel()
        flush.transfer._finish(FlushResult(synced and bool(self._core.paths), failed))
