"""The read path: hits in DRAM are copied, the rest is read from disk, once for all who wait for it."""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from kvtier.buffers import copy_many
from kvtier.config import page_up
from kvtier.errors import InvalidRequest
from kvtier.io.base import CHECKSUM, SHORT, Batch
from kvtier.store.core import MAX_BATCH_BYTES
from kvtier.store.lease import Lease
from kvtier.store.request import Flight, LeaseRead, Prefetch, Read
from kvtier.store.transfer import Transfer
from kvtier.tiers.base import NO_ROW
from kvtier.types import Reason, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvtier.io.plan import Plan
    from kvtier.store.core import Core
    from kvtier.tiers.dram import DramTier
    from kvtier.tiers.slab.tier import SlabTier
    from kvtier.types import BatchResult

_FAILURES = {
    CHECKSUM: (Status.MISS, Reason.CHECKSUM),
    SHORT: (Status.MISS, Reason.SHORT_READ),
}


class Reader:
    """Runs gets and reads. Its public methods may be called from any thread, without the lock."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._flights: dict[bytes, Flight] = {}  # to join: waiting or in the kernel
        self._in_kernel: set[Flight] = set()
        self._waiting: deque[Flight] = deque()
        self._window = 0  # bytes in the kernel
        self._copying = 0  # slots that a copy holds

    def get(
        self,
        keys: Sequence[bytes],
        targets: list[int],
        lengths: list[int],
        owner: object,
        *,
        timeout: float,
        lend: bool,
    ) -> Transfer[BatchResult]:
        """Start a get. Raises InvalidRequest if a target's length is not its chunk's."""
        transfer: Transfer[BatchResult] = Transfer()
        read = Read(keys, transfer, owner, targets=targets, lend=lend)
        self._start(read, lengths, timeout)
        return transfer

    def lease(self, keys: Sequence[bytes], *, timeout: float) -> Transfer[Lease]:
        """Start a read."""
        transfer: Transfer[Lease] = Transfer()

        def make(read: LeaseRead) -> Lease:
            releases = read.releases
            return Lease(read.result(), read.views, lambda: self._release(releases), self._core.copier.submit)

        self._start(LeaseRead(keys, transfer, make), None, timeout)
        return transfer

    def prefetch(self, keys: Sequence[bytes], *, timeout: float) -> Transfer[BatchResult]:
        """Start a read whose slots are let go as soon as all are filled."""
        transfer: Transfer[BatchResult] = Transfer()

        def make(read: LeaseRead) -> BatchResult:
            self._release(read.releases)
            return read.result()

        self._start(Prefetch(keys, transfer, make), None, timeout)
        return transfer

    def is_idle(self) -> bool:
        """Whether no read will free a slot by itself. Called with the lock held."""
        return not (self._window or self._copying)

    def fail_waiting(self) -> None:
        """Give up every item that has not reached the device, because the store closes."""
        with self._core.lock:
            waiting = [waiter for flight in self._waiting for waiter in flight.open_waiters()]
            self._close(waiting, Status.FAILED, Reason.CLOSED)
        self._finish(read for read, _ in waiting)
        self.pump()

    def give_up(self) -> None:
        """Tell all who wait for the device that the store is closed; what it holds stays its own."""
        with self._core.lock:
            open_items = [w for flight in self._in_kernel for w in flight.open_waiters()]
            held = [(read, i) for read, i in open_items if i not in read.copying]
            self._close(held, Status.FAILED, Reason.CLOSED)
        self._finish(read for read, _ in held)

    def forget_after_fork(self) -> None:
        """In a forked child: start nothing any more."""
        self._waiting.clear()

    def _start(self, read: Read, lengths: list[int] | None, timeout: float) -> None:
        core = self._core
        read.transfer._on_cancel = lambda: self._cancel(read)
        hits: list[tuple[int, int]] = []
        with core.lock:
            core.check_open()
            if lengths is not None:
                self._check_lengths(read.keys, lengths)
            core.counters["get.requested"] += len(read.keys)
            for i, key in enumerate(read.keys):
                if (row := core.dram.find(key)) != NO_ROW:
                    core.dram.index.pin(row)
                    hits.append((i, row))
                    read.dram_left -= core.dram.share(core.dram.index.nbytes[row])
                elif not self._join(read, i, key):
                    self._close([(read, i)], Status.MISS, Reason.ABSENT)
            for tier in core.tiers:
                tier.touch_prefix(read.keys)
            if isinstance(read, LeaseRead):
                for i, row in hits:
                    self._grant(read, i, core.dram, core.dram.index.offset[row], core.dram.index.nbytes[row],
                                "dram", partial(core.dram.index.unpin, row))  # fmt: skip
            elif hits:
                read.copying.update(i for i, _ in hits)
                self._copying += len(hits)
                core.copier.submit(lambda: self._copy_hits(read, hits))
            if not read.is_done:
                read.alarm = core.clock.call_at(time.monotonic() + timeout, partial(self._expire, read))
        self._finish([read])
        self.pump()

    def _check_lengths(self, keys: Sequence[bytes], lengths: list[int]) -> None:
        for i, key in enumerate(keys):
            for tier in self._core.tiers:
                if (row := tier.find(key)) != NO_ROW and tier.index.nbytes[row] != lengths[i]:
                    raise InvalidRequest(
                        f"into[{i}] has {lengths[i]} bytes, needs the {tier.index.nbytes[row]} bytes of "
                        "the chunk stored under its key"
                    )

    def _join(self, read: Read, i: int, key: bytes) -> bool:
        """Wait for the flight of this key, a new one if need be; False if it is not on disk."""
        flight = self._flights.get(key)
        if flight is None or self._disk.index.is_gone(flight.row):  # the old bytes of a deleted key
            disk = self._core.disk
            if disk is None or (row := disk.find(key)) == NO_ROW:
                return False
            disk.index.pin(row)
            flight = self._flights[key] = Flight(key, row, disk.index.nbytes[row])
            self._waiting.append(flight)
        flight.waiters.append((read, i))
        return True

    def _copy_hits(self, read: Read, hits: list[tuple[int, int]]) -> None:
        """Copy chunks that are pinned in DRAM: on the copier's thread."""
        dram = self._core.dram
        copy_many(
            [dram.address(dram.index.offset[row]) for _, row in hits],
            [read.targets[i] for i, _ in hits],
            [dram.index.nbytes[row] for _, row in hits],
        )
        with self._core.lock:
            for i, row in reversed(hits):
                self._close([(read, i)], Status.HIT, Reason.NONE, dram.index.nbytes[row], "dram")
                dram.index.unpin(row)
            read.copying.difference_update(i for i, _ in hits)
            self._copying -= len(hits)
            self._core.changed.notify_all()
        self._finish([read])
        self._core.pump()

    def pump(self) -> None:
        """Start as many waiting flights as the window and the free slots allow."""
        if not self._waiting:
            return
        batches: list[tuple[Plan, list[Flight]]] = []
        refused: list[tuple[Read, int]] = []
        with self._core.lock:
            skipped = []
            while self._waiting and self._window < self._core.config.io_window:
                flight = self._waiting.popleft()
                waiters = flight.open_waiters()
                if waiters and self._find_place(flight, *waiters[0]):
                    self._add(batches, flight)
                elif waiters and not self._will_be_stuck():
                    skipped.append(flight)
                    if not flight.is_leased():
                        break  # the landing slots are all in use: those behind would find none either
                else:
                    # Wanted by nobody any more; or nobody will free a slot, as leases hold them all.
                    self._close(waiters, Status.REFUSED, Reason.NO_SPACE)
                    refused += waiters
                    self._leave(flight)
            self._waiting.extendleft(reversed(skipped))
        for plan, flights in batches:
            self._core.submit(plan.batch(self._on_done, (plan, flights)))
        self._finish(read for read, _ in refused)

    def _will_be_stuck(self) -> bool:
        """Whether nothing that is under way will free a slot."""
        return self.is_idle() and self._core.writes_are_idle()

    @property
    def _disk(self) -> SlabTier:
        assert self._core.disk is not None, "only a disk tier makes flights"
        return self._core.disk

    def _find_place(self, flight: Flight, read: Read, i: int) -> bool:
        """A lent target, a slot among the cached chunks, or one to land in; False if none is free."""
        if read.lend:
            flight.address, flight.lender = read.targets[i], read
            read.lent += 1
            return True
        core, size = self._core, page_up(flight.nbytes)
        kinds = {type(waiter) for waiter, _ in flight.waiters}
        # Leases would starve the reads, unless there is nothing else to lease.
        may_land = Prefetch not in kinds and not (LeaseRead in kinds and core.dram.capacity)
        share = core.dram.share(size)
        for tier, allowed in ((core.dram, read.dram_left >= share), (core.landing, may_land)):
            offset = tier.reserve(size) if allowed else None
            if offset is not None:
                read.dram_left -= share if tier is core.dram else 0.0
                flight.tier, flight.offset, flight.address = tier, offset, tier.address(offset)
                return True
        return False

    def _add(self, batches: list[tuple[Plan, list[Flight]]], flight: Flight) -> None:
        if not batches or batches[-1][0].nbytes >= MAX_BATCH_BYTES:
            batches.append((self._disk.plan(), []))
        plan, flights = batches[-1]
        self._disk.plan_read(plan, flight.row, flight.address)
        flights.append(flight)
        self._window += page_up(flight.nbytes)
        self._in_kernel.add(flight)

    def _leave(self, flight: Flight) -> None:
        """Nobody joins this flight any more, and its chunk on disk is free to go."""
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]
        self._in_kernel.discard(flight)
        self._disk.index.unpin(flight.row)

    def _on_done(self, batch: Batch) -> None:
        """Settle a batch of flights: on a thread of the engine."""
        plan, flights = batch.context
        outcomes = plan.outcomes(batch)
        copies: list[tuple[Flight, Read, int]] = []
        with self._core.lock:
            self._copying += len(flights)
            self._window -= plan.nbytes
            self._core.counters["disk.bytes_read"] += plan.nbytes
            for flight, outcome in zip(flights, outcomes, strict=True):
                if outcome:
                    self._reject(flight, outcome)
                else:
                    copies += self._land(flight)
                self._leave(flight)
        away = [copy for copy in copies if copy[1].targets[copy[2]] != copy[0].address]
        copy_many(
            [flight.address for flight, _, _ in away],
            [read.targets[i] for _, read, i in away],
            [flight.nbytes for flight, _, _ in away],
        )
        with self._core.lock:
            for flight, read, i in copies:
                read.copying.discard(i)
                self._close([(read, i)], Status.HIT, Reason.NONE, flight.nbytes, "disk")
            for flight in reversed(flights):  # tail first, so that the head is used last
                flight.put_down()
                if flight.lender is not None:
                    flight.lender.lent -= 1
            self._copying -= len(flights)
            self._core.changed.notify_all()
            reads = {read: None for flight in flights for read, _ in flight.waiters}
            for read in reads:
                if read.is_done:  # batches ended in any order: the head is to outlive the tail
                    for tier in self._core.tiers:
                        tier.touch_prefix(read.keys)
        self._finish(reads)
        self._core.pump()

    def _reject(self, flight: Flight, outcome: int) -> None:
        """A flight that brought no good bytes: forget the chunk, or keep it if the device may recover."""
        status, reason = _FAILURES.get(outcome, (Status.FAILED, Reason.IO_ERROR))
        if reason is Reason.IO_ERROR:
            self._disk.index.suspect(flight.row, True)
        elif not self._disk.index.is_gone(flight.row):
            self._disk.discard(flight.row)
        self._close(flight.open_waiters(), status, reason)

    def _land(self, flight: Flight) -> list[tuple[Flight, Read, int]]:
        """Cache a flight if it may be, serve those who read in place, and list the copies to make."""
        dram, row = self._core.dram, flight.row
        self._disk.index.suspect(row, False)
        # A chunk deleted or put meanwhile still serves those who waited, but is not cached.
        if flight.tier is dram and not self._disk.index.is_gone(row) and dram.find(flight.key) == NO_ROW:
            flight.dram_row = dram.index.insert(flight.key, flight.offset, flight.nbytes)
        copies = []
        for read, i in flight.open_waiters():
            if not isinstance(read, LeaseRead):
                copies.append((flight, read, i))
                read.copying.add(i)
            elif flight.tier is not None:
                flight.users += 1
                self._grant(read, i, flight.tier, flight.offset, flight.nbytes, "disk", flight.put_down)
            else:  # it joined a loan, whose memory is not ours to lease
                self._close([(read, i)], Status.REFUSED, Reason.NO_SPACE)
        return copies

    def _grant(
        self,
        read: LeaseRead,
        i: int,
        slot_tier: DramTier,
        offset: int,
        nbytes: int,
        source: str,
        release: Callable[[], None],
    ) -> None:
        """Give a lease the read-only view of a slot, and `release` to call with the lock held."""
        view = slot_tier.view(offset, nbytes)
        view.flags.writeable = False
        read.views[i] = view
        read.releases.append(release)
        self._close([(read, i)], Status.HIT, Reason.NONE, nbytes, source)

    def _release(self, releases: list[Callable[[], None]]) -> None:
        with self._core.lock:
            for release in reversed(releases):
                release()
            releases.clear()
            self._core.changed.notify_all()
        self._core.pump()

    def _expire(self, read: Read) -> None:
        """Fail what is still open at the deadline; what the kernel holds stays its own until it is done."""
        with self._core.lock:
            late = [i for i in range(len(read.keys)) if read.is_open(i) and i not in read.copying]
            self._close([(read, i) for i in late], Status.FAILED, Reason.DEADLINE)
        self._finish([read])
        self.pump()

    def _cancel(self, read: Read) -> bool:
        with self._core.lock:
            waiting = [w for flight in self._waiting for w in flight.open_waiters() if w[0] is read]
            self._close(waiting, Status.FAILED, Reason.CANCELLED)
        self._finish([read])
        self.pump()
        return bool(waiting)

    def _close(
        self,
        items: Iterable[tuple[Read, int]],
        status: Status,
        reason: Reason,
        nbytes: int = 0,
        source: str = "",
    ) -> None:
        for read, i in items:
            read.close(i, status, reason, nbytes)
            self._core.counters.count_get(status, reason, source)

    def _finish(self, reads: Iterable[Read]) -> None:
        """Hand out the outcome of every read that is done, and its memory once the kernel is, too."""
        reads = list(reads)
        with self._core.lock:
            done = [read for read in reads if read.claim()]
            released = [read for read in reads if read.is_done and not read.lent]
        for read in released:
            read.transfer._set_released()
        for read in done:
            read.resolve()
