"""The read path: hits in DRAM are copied, the rest is read from disk, once for all who wait for it."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from kvtier.buffers import checksum, copy_many
from kvtier.errors import InvalidRequest
from kvtier.io.base import CHECKSUM, GONE, SHORT, Batch
from kvtier.store.flight import Flight
from kvtier.store.hits import HitCopier
from kvtier.store.landing import place
from kvtier.store.lease import Lease
from kvtier.store.paths import PathBatch, batch_for
from kvtier.store.request import LeaseRead, Prefetch, Read, StreamRead
from kvtier.store.transfer import Transfer
from kvtier.tiers.base import NO_ROW
from kvtier.types import Reason, Status, TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvtier.store.core import Core
    from kvtier.store.flight import Piece
    from kvtier.store.paths import DiskPath
    from kvtier.store.request import Progress
    from kvtier.tiers.dram import DramTier
    from kvtier.types import BatchResult

_FAILURES = {
    CHECKSUM: (Status.MISS, Reason.CHECKSUM),
    SHORT: (Status.MISS, Reason.SHORT_READ),
    GONE: (Status.MISS, Reason.ABSENT),
}


class Reader:
    """Runs gets and reads. Its public methods may be called from any thread, without the lock."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._flights: dict[bytes, Flight] = {}  # to join: waiting or in the kernel
        self._in_kernel: set[Flight] = set()
        self._copying = 0  # slots that a copy holds
        self._hits = HitCopier(core, self._finish)

    def get(
        self,
        keys: Sequence[bytes],
        targets: list[int],
        lengths: list[int],
        buffers: object,
        *,
        timeout: float,
        lend: bool,
    ) -> Transfer[BatchResult]:
        """Start a get. Raises InvalidRequest if a target's length is not its chunk's."""
        transfer: Transfer[BatchResult] = Transfer()
        read = Read(keys, transfer, buffers, targets=targets, lend=lend)
        self._start(read, lengths, timeout)
        return transfer

    def lease(
        self, keys: Sequence[bytes], *, timeout: float, on_progress: Progress | None = None
    ) -> Transfer[Lease]:
        """Start a read."""
        transfer: Transfer[Lease] = Transfer()

        def make(read: LeaseRead) -> Lease:
            releases = read.releases
            return Lease(read.result(), read.views, lambda: self._release(releases), self._core.copier.submit)

        if on_progress is None:
            self._start(LeaseRead(keys, transfer, make), None, timeout)
        else:
            self._start(StreamRead(keys, transfer, make, on_progress), None, timeout)
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
        return not (
            self._copying
            or self._hits.copying
            or any(path.reads.in_flight or path.begun for path in self._core.paths)
        )

    def fail_waiting(self) -> None:
        """Give up every item that has not reached the device, because the store closes."""
        with self._core.lock:
            waiting = [waiter for flight in self._waiting() for waiter in flight.open_waiters()]
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
        for path in self._core.paths:
            path.waiting.clear()
            path.begun.clear()
            path.dropped.clear()

    def _waiting(self) -> Iterator[Flight]:
        return chain.from_iterable(chain(path.waiting, path.begun, path.dropped) for path in self._core.paths)

    def _start(self, read: Read, lengths: list[int] | None, timeout: float) -> None:
        core = self._core
        read.transfer._on_cancel = lambda: self._cancel(read)
        with core.lock:
            core.check_open()
            rows = [core.dram.find(key) for key in read.keys]
            if lengths is not None:
                self._check_lengths(read.keys, rows, lengths)
            core.counters["get.requested"] += len(read.keys)
            hits = [(i, row) for i, row in enumerate(rows) if row != NO_ROW]
            core.paths.notice(time.monotonic())
            core.dram.index.lifetimes.use(row for _, row in hits)
            for _, row in hits:
                core.dram.index.pin(row)  # and used last, as it is let go of from tail to head
            if len(hits) < len(rows):
                self._join_all(read, rows)
            for path in core.paths:
                path.tier.touch_prefix(read.keys)
            if isinstance(read, LeaseRead):
                index = core.dram.index
                for i, row in hits:
                    self._show(
                        read, i, core.dram, index.offset[row], index.nbytes[row], partial(index.unpin, row)
                    )
                    self._close([(read, i)], Status.HIT, Reason.NONE, index.nbytes[row], TierName.DRAM)
            elif hits:
                self._hits.start(read, hits)
            if not read.is_done:
                read.alarm = core.clock.call_at(time.monotonic() + timeout, partial(self._expire, read))
        self._finish([read])
        self.pump()

    def _check_lengths(self, keys: Sequence[bytes], rows: list[int], lengths: list[int]) -> None:
        """`rows` are those of the keys in DRAM."""
        known = self._core.dram.index.nbytes
        for i, (key, row) in enumerate(zip(keys, rows, strict=True)):
            if row != NO_ROW:
                nbytes = known[row]
            elif found := self._core.paths.find(key):
                nbytes = found[0].tier.index.nbytes[found[1]]
            else:
                continue
            if nbytes != lengths[i]:
                raise InvalidRequest(
                    f"into[{i}] has {lengths[i]} bytes, needs the {nbytes} bytes of the chunk stored under "
                    "its key"
                )

    def _join_all(self, read: Read, rows: list[int]) -> None:
        """Have the disk serve what is not in DRAM, as far as it can."""
        dram = self._core.dram
        for i, row in enumerate(rows):
            if row != NO_ROW:
                read.dram_left -= dram.share(dram.index.nbytes[row])
            else:
                self._join(read, i, read.keys[i])

    def _join(self, read: Read, i: int, key: bytes) -> None:
        """Wait for the flight of this key, a new one if need be; or have the outcome that there is none."""
        flight = self._flights.get(key)
        # Not the old bytes of a deleted key, one whose time is over, nor what a device that hangs may
        # never bring.
        if flight is None or flight.is_over() or flight.path.health.is_down:
            found = self._core.paths.find(key)
            if found is None:
                return self._close([(read, i)], Status.MISS, Reason.ABSENT)
            path, row = found
            if not path.health.may_ask(time.monotonic()):
                return self._close([(read, i)], Status.FAILED, Reason.TIER_DOWN)
            path.tier.index.pin(row)
            path.tier.index.lifetimes.use((row,))
            flight = self._flights[key] = Flight(key, path, row)
            if isinstance(read, StreamRead):
                flight.cut()
            path.waiting.append(flight)
        flight.waiters.append((read, i))
        return None

    def pump(self) -> None:
        """Start as many waiting flights as the windows and the free slots allow."""
        core = self._core
        if not any(path.waiting or path.begun or path.dropped for path in core.paths):
            return
        batches: list[PathBatch[Piece]] = []
        refused: list[tuple[Read, int]] = []
        with core.lock:
            now = time.monotonic()
            for path in core.paths:
                refused += self._drop(path)
                self._abandon([flight for flight in path.begun if not flight.open_waiters()])
            skipped: list[Flight] = []
            full: set[DiskPath] = set()
            for path in core.paths.read_next(full):
                flight = path.next_read(may_begin=path not in full)
                waiters = flight.open_waiters()
                if flight.next or (waiters and place(core, flight, *waiters[0])):
                    self._add(batches, flight, now)
                    if not flight.is_asked_for:
                        path.begun.append(flight)
                elif waiters and not self._will_be_stuck():
                    skipped.append(flight)
                    if not flight.is_leased():
                        full.add(
                            path
                        )  # its landing slots are all in use: those behind would find none either
                else:
                    # Wanted by nobody any more; or nobody will free a slot, as leases hold them all.
                    self._close(waiters, Status.REFUSED, Reason.NO_SPACE)
                    refused += waiters
                    self._leave(flight)
            for flight in reversed(skipped):
                flight.path.waiting.appendleft(flight)
            if refused:
                core.changed.notify_all()
        for batch in batches:
            batch.path.read(batch, self._on_done)
        self._finish(read for read, _ in refused)

    def _drop(self, path: DiskPath) -> list[tuple[Read, int]]:
        """Fail the reads that waited for a path when it was taken out."""
        failed = []
        while path.dropped:
            flight = path.dropped.popleft()
            waiters = flight.open_waiters()
            self._close(waiters, Status.FAILED, Reason.TIER_DOWN)
            failed += waiters
            if flight.next:
                self._abandon([flight])
            else:
                self._leave(flight)
        return failed

    def _abandon(self, flights: Sequence[Flight]) -> None:
        """Read no more of flights that have a slot: it is free once the kernel is done with it."""
        for flight in flights:
            self._give_up(flight)
            if not (flight.reading or flight.has_left):
                self._leave(flight)
                flight.put_down()
                self._core.changed.notify_all()

    def _give_up(self, flight: Flight) -> None:
        """Ask for no more pieces of a flight, and let nobody join it."""
        with contextlib.suppress(ValueError):
            flight.path.begun.remove(flight)
        if flight.is_begun and flight.tier is self._core.landing:
            flight.path.begun_bytes -= flight.nbytes
        flight.give_up()
        self._shut(flight)

    def _shut(self, flight: Flight) -> None:
        """Nobody joins this flight any more."""
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

    def _will_be_stuck(self) -> bool:
        """Whether nothing that is under way will free a slot."""
        return self.is_idle() and self._core.writes_are_idle()

    def _add(self, batches: list[PathBatch[Piece]], flight: Flight, now: float) -> None:
        path, piece = flight.path, flight.pieces[flight.next]
        batch = batch_for(batches, path, path.reads, piece.start)
        address = flight.read_address + piece.start
        path.tier.plan_read(batch.plan, flight.row, address, start=piece.start, nbytes=piece.nbytes)
        batch.chunks.append(piece)
        path.reads.enter(piece.nbytes, now)
        was_begun = flight.is_begun
        flight.next += 1
        flight.reading += 1
        if flight.tier is self._core.landing:
            path.begun_bytes += flight.nbytes * (flight.is_begun - was_begun)
        self._in_kernel.add(flight)

    def _leave(self, flight: Flight) -> None:
        """Nobody joins this flight any more, and its chunk on disk is free to go."""
        self._shut(flight)
        flight.has_left = True
        self._in_kernel.discard(flight)
        flight.path.tier.index.unpin(flight.row)

    def _on_done(self, done: Batch) -> None:
        """Settle a batch of pieces, and the flights that end with it: on a thread of the engine."""
        batch: PathBatch[Piece] = done.context
        path, plan = batch.path, batch.plan
        outcomes = path.tier.read_outcomes(plan, done)
        flights = self._arrive(batch, outcomes)
        undecoded = {flight: outcome for flight in flights if (outcome := flight.decode())}
        if self._core.config.signs_dram:
            for flight in flights:
                if flight.tier is self._core.dram:
                    flight.checksum = checksum(flight.address, flight.nbytes)
        copies: list[tuple[Flight, Read, int]] = []
        with self._core.lock:
            self._copying += len(flights)
            now = time.monotonic()
            is_busy = bool(path.waiting or path.begun)
            path.reads.leave(plan.nbytes, now, busy=is_busy, chunks=len(batch.chunks))
            path.learn(outcomes, now)
            self._core.counters["disk.bytes_read"] += plan.nbytes
            for flight in flights:
                flight.drop_scratch()
                if flight in undecoded:
                    self._reject(flight, undecoded[flight])
                elif flight.is_whole and not flight.failure:
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
                self._close([(read, i)], Status.HIT, Reason.NONE, flight.nbytes, TierName.DISK)
            for flight in reversed(flights):  # tail first, so that the head is used last
                flight.put_down()
                if flight.lender is not None:
                    flight.lender.lent -= 1
            self._copying -= len(flights)
            self._core.changed.notify_all()
            reads = {read: None for piece in batch.chunks for read, _ in piece.flight.waiters}
            for read in reads:
                if read.is_done:  # batches ended in any order: the head is to outlive the tail
                    for tier in self._core.tiers:
                        tier.order_prefix(read.keys)
        self._finish(reads)
        self._core.pump()

    def _arrive(self, batch: PathBatch[Piece], outcomes: list[int]) -> list[Flight]:
        """Take in what became of pieces, and tell those who follow them. The flights that end."""
        ended: list[Flight] = []
        reads: dict[Read, None] = {}
        with self._core.lock:
            for piece, outcome in zip(batch.chunks, outcomes, strict=True):
                flight = piece.flight
                flight.reading -= 1
                if not outcome:
                    flight.arrive(piece)
                elif not flight.failure:
                    flight.failure = outcome
                    self._reject(flight, outcome)
                    self._give_up(flight)
                if not flight.failure:
                    self._note(flight)
                if not flight.reading and flight.is_asked_for:
                    ended.append(flight)
                reads.update((read, None) for read, _ in flight.waiters if isinstance(read, StreamRead))
        self._tell(reads)
        return ended

    def _note(self, flight: Flight) -> None:
        """Have those who follow a flight told how much of it is there, and let them look at it."""
        for read, i in flight.open_waiters():
            if isinstance(read, StreamRead) and flight.tier is not None and flight.there:
                self._hold(read, i, flight)
                read.note(i, flight.there)

    def _reject(self, flight: Flight, outcome: int) -> None:
        """A flight that brought no good bytes: forget the chunk, or keep it if the device may recover."""
        status, reason = _FAILURES.get(outcome, (Status.FAILED, Reason.IO_ERROR))
        disk = flight.path.tier
        if reason is Reason.IO_ERROR:
            disk.index.suspect(flight.row, True)
        elif not disk.index.is_gone(flight.row):
            disk.discard(flight.row)
        self._close(flight.open_waiters(), status, reason)

    def _land(self, flight: Flight) -> list[tuple[Flight, Read, int]]:
        """Cache a flight if it may be, serve those who read in place, and list the copies to make."""
        dram, index = self._core.dram, flight.path.tier.index
        index.suspect(flight.row, False)
        # A chunk deleted or put meanwhile still serves those who waited, but is not cached.
        if flight.tier is dram and not index.is_gone(flight.row) and dram.find(flight.key) == NO_ROW:
            flight.dram_row = dram.insert(
                flight.key, flight.offset, flight.nbytes, flight.checksum,
                stored_at=flight.stored_at, expires_at=flight.expires_at,
            )  # fmt: skip
        copies = []
        for read, i in flight.open_waiters():
            if not isinstance(read, LeaseRead):
                copies.append((flight, read, i))
                read.copying.add(i)
            elif flight.tier is not None:
                self._hold(read, i, flight)
                self._close([(read, i)], Status.HIT, Reason.NONE, flight.nbytes, TierName.DISK)
            else:  # it joined a loan, whose memory is not ours to lease
                self._close([(read, i)], Status.REFUSED, Reason.NO_SPACE)
        return copies

    def _hold(self, read: LeaseRead, i: int, flight: Flight) -> None:
        """Let a lease see the slot of a flight, and keep it from being used anew."""
        if read.views[i] is None and flight.tier is not None:
            flight.users += 1
            self._show(read, i, flight.tier, flight.offset, flight.nbytes, flight.put_down)

    def _show(
        self,
        read: LeaseRead,
        i: int,
        slot_tier: DramTier,
        offset: int,
        nbytes: int,
        release: Callable[[], None],
    ) -> None:
        """Give a lease the read-only view of a slot, and `release` to call with the lock held."""
        view = slot_tier.view(offset, nbytes)
        view.flags.writeable = False
        read.views[i] = view
        read.releases.append(release)

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
            waiting = [w for flight in self._waiting() for w in flight.open_waiters() if w[0] is read]
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
        source: TierName = TierName.NONE,
    ) -> None:
        for read, i in items:
            read.close(i, status, reason, nbytes, source)
            self._core.counters.count_get(status, reason, source)

    def _finish(self, reads: Iterable[Read]) -> None:
        """Hand out the outcome of every read that is done, and its memory once the kernel is, too."""
        reads = list(reads)
        with self._core.lock:
            done = [read for read in reads if read.claim()]
            released = [read for read in reads if read.is_done and not read.lent]
        self._tell(reads)
        for read in released:
            read.transfer._set_released()
        for read in done:
            read.resolve()

    def _tell(self, reads: Iterable[Read]) -> None:
        """Tell those who follow a read what is new."""
        for read in reads:
            if isinstance(read, StreamRead):
                read.tell(self._core.lock)
