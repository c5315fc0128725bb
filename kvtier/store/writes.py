"""The write path: payloads are copied into DRAM by one thread, and written through to disk behind it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Self

from kvtier.buffers import copy_many
from kvtier.store.paths import DiskPath
from kvtier.store.put import Flush, Put, WriteThrough
from kvtier.store.transfer import Transfer
from kvtier.store.writeback import Writeback
from kvtier.tiers.base import NO_ROW
from kvtier.types import Reason, Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvtier.codec import Codec
    from kvtier.owner import OwnerName
    from kvtier.store.core import Core
    from kvtier.store.lease import Until
    from kvtier.types import BatchResult, FlushResult


_log = logging.getLogger(__name__)
_COPY_BYTES = 16 << 20
"""Bytes copied at a time: the write of one lot overlaps with the copy of the next."""


class Writer:
    """Runs puts, commits and flushes in the order they come. `kvtier-write` is its thread."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.writeback = Writeback(core, self._finish)
        self._jobs: deque[Put | Flush] = deque()
        self._current: Put | None = None
        self._queued_chunks = 0
        self._burials: dict[Transfer[int], int] = {}  # deletes that wait for the journal
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvtier-write", daemon=True)

    @classmethod
    def start(cls, core: Core) -> Self:
        """A writer with its thread. Stops `core` if that cannot be had, and raises RuntimeError."""
        writer = cls(core)
        try:
            writer._thread.start()
        except RuntimeError:
            core.stop(1.0)
            raise
        return writer

    def put(
        self,
        keys: Sequence[bytes],
        sources: list[int],
        lengths: list[int],
        buffers: object,
        *,
        until: Until,
        timeout: float,
        codec: Codec,
        owner: OwnerName,
        expires_at: int,
    ) -> Transfer[BatchResult]:
        """Queue a put; what the queue cannot take is refused at once, from the tail."""
        transfer: Transfer[BatchResult] = Transfer()
        end = time.monotonic() + timeout
        put = Put(keys, transfer, buffers, sources, lengths, until, end, codec, owner, expires_at)
        transfer._on_cancel = lambda: self._cancel(put)
        with self._core.lock:
            self._core.check_open()
            self._core.counters["put.requested"] += len(keys)
            room = self._core.config.max_queued_chunks - self._queued_chunks
            put.accepted = max(0, min(len(keys), room))
            for i in range(put.accepted, len(keys)):
                self._close(put, i, Status.REFUSED, Reason.QUEUE_FULL)
            self._queued_chunks += put.accepted
            if put.accepted:
                put.alarm = self._core.clock.call_at(put.deadline, partial(self._expire, put))
                self._jobs.append(put)
                self._core.changed.notify_all()
        self._finish([put])
        return transfer

    def commit(self, put: Put) -> None:
        """Publish a reservation whose slots the caller has filled."""
        put.transfer._set_copied()
        self._sign(put, put.slots)
        with self._core.lock:
            self._core.check_open()
            self._core.counters["put.requested"] += len(put.keys)
            for tier in self._core.tiers:
                tier.touch_prefix(put.keys)
            for i in self._publishing_order(range(len(put.keys))):
                if i in put.slots:
                    self._publish(put, i)
                elif not self._settle_known(put, i):
                    self._close(put, i, Status.REFUSED, self.why_no_room(put, i))
            put.alarm = self._core.clock.call_at(put.deadline, partial(self._expire, put))
        self._after_publishing(put)

    def reserve(self, put: Put) -> None:
        """Reserve slots for the keys of `put` that no tier has, head first, as far as they go now."""
        dram = self._core.dram
        with self._core.lock:
            self._core.check_open()
            for i, key in enumerate(put.keys):
                if self.writeback.under_way(key) or dram.find(key) != NO_ROW or self._is_sound_on_disk(key):
                    continue
                if not self._place(put, i, pass_through=not dram.capacity):
                    break
                put.prepare_slot(i)

    def why_no_room(self, put: Put, i: int) -> Reason:
        """Why item `i` got no slot. Called with the lock held."""
        over = self._core.dram.is_over_quota(put.lengths[i], put.owner.id)
        return Reason.QUOTA if over else Reason.NO_SPACE

    def abort(self, put: Put) -> None:
        """Give back what a reservation holds."""
        with self._core.lock:
            put.release_slots()
            self._core.changed.notify_all()
        self._core.pump()

    def flush(self) -> Transfer[FlushResult]:
        """Queue a flush: it covers what was queued before it."""
        transfer: Transfer[FlushResult] = Transfer()
        with self._core.lock:
            self._core.check_open()
            self._jobs.append(Flush(transfer))
            self._core.changed.notify_all()
        return transfer

    def forget(self, keys: set[bytes]) -> None:
        """Have puts that are still under way not store these keys. Called with the lock held."""
        for job in (*self._jobs, self._current):
            if isinstance(job, Put):
                job.deleted |= keys
        self.writeback.forget(keys)

    def forget_owners(self, owners: set[int]) -> int:
        """The same of all puts of these owners; how many chunks of them no tier has yet."""
        for job in (*self._jobs, self._current):
            if isinstance(job, Put) and job.owner.id in owners:
                job.deleted |= set(job.keys)
        return self.writeback.forget_owners(owners)

    def bury(self, transfer: Transfer[int], count: int) -> None:
        """Have the journals learn of a delete, for at most `put_timeout` seconds, then resolve to `count`."""
        core = self._core
        self._burials[transfer] = count
        late = core.clock.call_at(
            time.monotonic() + core.config.put_timeout, lambda: transfer._finish_once(count)
        )

        def done(_: bool) -> None:
            late.cancel()
            self._burials.pop(transfer, None)
            transfer._finish_once(count)

        core.paths.on_each(DiskPath.bury, done)

    def give_up(self) -> None:
        """Tell all who wait for the device that the store is closed; what it holds stays its own."""
        self.writeback.give_up()
        for transfer, count in list(self._burials.items()):
            transfer._finish_once(count)

    def stop(self, timeout: float) -> None:
        """Finish what was accepted, for at most `timeout` seconds, then end the thread."""
        end = time.monotonic() + timeout
        with self._core.lock:
            self._core.changed.wait_for(
                lambda: not (self._jobs or self._current) and self.writeback.is_idle(), timeout
            )
            self._stopping = True
            puts = [job for job in (*self._jobs, self._current) if isinstance(job, Put)]
            flushes = [job for job in self._jobs if isinstance(job, Flush)]
            self._jobs.clear()
            for put in puts:
                self._close_open(put, Status.FAILED, Reason.CLOSED)
            self._core.changed.notify_all()
        self._finish(puts)
        for flush in flushes:
            flush.give_up()
        if self._thread is not threading.current_thread():
            self._thread.join(max(0.0, end - time.monotonic()))
        self.writeback.stop()

    def _run(self) -> None:
        while True:
            with self._core.lock:
                self._core.changed.wait_for(lambda: self._jobs or self._stopping)
                if self._stopping:
                    return
                job = self._jobs.popleft()
                self._current = job if isinstance(job, Put) else None
            if isinstance(job, Flush):
                try:
                    self.writeback.flush(job)
                except Exception:
                    _log.exception("a flush failed")
                    job.give_up()
            else:
                try:
                    self._copy_in(job)
                except Exception:
                    _log.exception("a put failed; the next ones go on")
                    self._give_up(job)
                with self._core.lock:
                    self._current = None
                    self._queued_chunks -= job.accepted
                    self._core.changed.notify_all()
            del job

    def _give_up(self, put: Put) -> None:
        """End a put that ran into a fault of ours, so that nobody waits for it and no slot is lost."""
        with self._core.lock:
            put.copying = False
            put.release_slots()
            self._close_open(put, Status.FAILED, Reason.IO_ERROR)
        put.transfer._set_copied()
        self._finish([put])

    def _copy_in(self, put: Put) -> None:
        """Take a put's payloads over, a batch at a time, and let go of its source."""
        i = 0
        with self._core.lock:
            for tier in self._core.tiers:
                tier.touch_prefix(put.keys)  # what is known already must not make room for the rest
        while i < put.accepted:
            batch: list[int] = []
            nbytes = 0
            with self._core.lock:
                while i < put.accepted and nbytes < _COPY_BYTES:
                    if put.is_open(i) and self._settle_known(put, i):
                        self._charge(put, i)
                    elif put.is_open(i):
                        if not self._place(put, i):
                            if batch or self._wait_for_room(put):
                                break
                            if put.is_open(i):
                                self._close(put, i, Status.REFUSED, self.why_no_room(put, i))
                        else:
                            batch.append(i)
                            nbytes += put.lengths[i]
                    i += 1
                put.copying = bool(batch)
            copy_many(
                [put.sources[j] for j in batch],
                [put.prepare_slot(j) for j in batch],
                [put.lengths[j] for j in batch],
            )
            self._sign(put, batch)
            with self._core.lock:
                put.copying = False
                for j in self._publishing_order(batch):
                    self._publish(put, j)
            self.writeback.pump()
        put.buffers = None
        put.transfer._set_copied()
        self._after_publishing(put)

    def _sign(self, put: Put, items: Iterable[int]) -> None:
        if self._core.config.signs_dram:
            for i in items:
                put.sign_slot(i)

    def _settle_known(self, put: Put, i: int) -> bool:
        """Whether nothing has to be copied for item `i`: then it has its outcome, or waits for disk."""
        core, key = self._core, put.keys[i]
        if key in put.deleted:
            self._close(put, i, Status.FAILED, Reason.DELETED)
            return True
        write = self.writeback.under_way(key)
        row = core.dram.find(key)
        on_disk = self._is_sound_on_disk(key)
        if write is None and row == NO_ROW and not on_disk:
            return False
        if put.until == "dram" or not core.paths or (on_disk and write is None):
            self._close(put, i, Status.KNOWN)
            if core.admission.is_selective and core.paths and not on_disk and write is None:
                self._write_again(put, key, row)  # it was not admitted, and may be now
        elif write is not None:
            write.waiters.append((put, i, Status.KNOWN))
        else:  # cached, but its write to disk failed or was evicted
            self._write_again(put, key, row, i)
        return True

    def _write_again(self, put: Put, key: bytes, row: int, *waiting: int) -> None:
        """Write a cached chunk through to disk; the items `waiting` of `put` wait for it."""
        index = self._core.dram.index
        index.pin(row)
        write = WriteThrough(put, key, index.nbytes[row], self._core.dram, index.offset[row], row)
        write.waiters += [(put, i, Status.KNOWN) for i in waiting]
        self._write_through(write)

    def _charge(self, put: Put, i: int) -> None:
        """Count a known chunk against the put's share of the tiers that hold it."""
        dram = self._core.dram
        if (row := dram.find(put.keys[i])) != NO_ROW:
            put.dram_left -= dram.share(dram.index.nbytes[row])
        if found := self._core.paths.find(put.keys[i]):
            index = found[0].tier.index
            put.charge(found[0], index.slots.size_at(index.offset[found[1]]), index.owner[found[1]])

    def _is_sound_on_disk(self, key: bytes) -> bool:
        """Whether a disk that works has the chunk. One that it failed to read is dropped, to be put again."""
        found = self._core.paths.find(key)
        if found is None:
            return False
        path, row = found
        if path.tier.index.suspect(row):
            path.tier.discard(row)
            return False
        return not path.health.is_down

    def _place(self, put: Put, i: int, *, pass_through: bool = True) -> bool:
        """Reserve a slot: in the cache while the put fits it, else one to pass through to disk."""
        core, nbytes = self._core, put.lengths[i]
        owner = core.owners.learn(put.owner)
        share = core.dram.share(nbytes)
        fits = core.dram.fits(1.0 - put.dram_left, share, owner)
        offset = core.dram.reserve(nbytes, owner) if fits else None
        if offset is not None:
            put.dram_left -= share
            put.slots[i] = (core.dram, offset)
        elif pass_through and (offset := core.landing.reserve(nbytes, owner)) is not None:
            put.slots[i] = (core.landing, offset)
        return offset is not None

    def _wait_for_room(self, put: Put) -> bool:
        """Wait until a slot may be free; False if no slot will become so, or the time is over."""
        core = self._core
        if self.writeback.is_idle() and core.reads_are_idle():
            return False
        left = min(put.deadline - time.monotonic(), threading.TIMEOUT_MAX)
        return not self._stopping and core.changed.wait(left)

    def _publishing_order(self, items: Sequence[int]) -> Iterable[int]:
        """Heads are written to disk first. In DRAM alone chunks come in as they do from disk, tail first."""
        return items if self._core.paths else reversed(items)

    def _publish(self, put: Put, i: int) -> None:
        """Make a filled slot a chunk of the cache, and start its way to disk."""
        core, key = self._core, put.keys[i]
        tier, offset = put.slots.pop(i)
        if not put.is_open(i) or key in put.deleted:
            tier.release(offset)
            if put.is_open(i):
                self._close(put, i, Status.FAILED, Reason.DELETED)
            return
        if self._settle_known(put, i):  # another put was faster
            tier.release(offset)
            return
        row = NO_ROW
        if tier is core.dram:
            row = tier.insert(key, offset, put.lengths[i], put.checksums.get(i), expires_at=put.expires_at)
            if put.expires_at:
                core.sweeper.start()
        if not core.paths:
            tier.index.unpin(row)
            self._close(put, i, Status.STORED, nbytes=put.lengths[i])
            return
        if row != NO_ROW and put.until == "dram":
            self._close(put, i, Status.STORED, nbytes=put.lengths[i])
        write = WriteThrough(put, key, put.lengths[i], tier, offset, row)
        write.waiters.append((put, i, Status.STORED))
        self._write_through(write)

    def _write_through(self, write: WriteThrough) -> None:
        """Queue the write to disk of a slot that is pinned, or reserved for just that."""
        write.put.writing += 1
        self.writeback.add(write)

    def _after_publishing(self, put: Put) -> None:
        with self._core.lock:
            for tier in self._core.tiers:
                tier.order_prefix(put.keys)
            self._core.changed.notify_all()
        self._finish([put])
        self._core.pump()  # a refused write may have left a slot that a read waits for

    def _expire(self, put: Put) -> None:
        """Fail what is not stored at the deadline. What is being written may still get there."""
        with self._core.lock:
            self._close_open(put, Status.FAILED, Reason.DEADLINE)
            self._core.changed.notify_all()
        self._finish([put])
        self.writeback.pump()  # which finds out whether the disk hangs

    def _cancel(self, put: Put) -> bool:
        with self._core.lock:
            waiting = [i for i in range(len(put.keys)) if put.is_open(i)] if put in self._jobs else []
            for i in waiting:
                self._close(put, i, Status.FAILED, Reason.CANCELLED)
        self._finish([put])
        return bool(waiting)

    def _close_open(self, put: Put, status: Status, reason: Reason) -> None:
        for i in range(len(put.keys)):
            if put.is_open(i):
                self._close(put, i, status, reason)

    def _close(self, put: Put, i: int, status: Status, reason: Reason = Reason.NONE, nbytes: int = 0) -> None:
        self._core.close_put(put, i, status, reason, nbytes)

    def _finish(self, puts: Iterable[Put]) -> None:
        """Hand out the outcome of every put that is done and whose source is not being read."""
        with self._core.lock:
            done = [put for put in puts if not put.copying and put.claim()]
        for put in done:
            put.resolve()
