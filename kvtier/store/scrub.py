"""Scrubbing: in the background every chunk is read again, so that a bad one is found before it is wanted."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from kvtier.buffers import Arena, checksum
from kvtier.config import MIB
from kvtier.io.base import CHECKSUM, SHORT
from kvtier.store.health import is_failure
from kvtier.tiers.base import NO_ROW
from kvtier.tiers.slab.tier import SlabTier

if TYPE_CHECKING:
    from kvtier.io.base import Batch
    from kvtier.io.plan import Plan
    from kvtier.store.core import Core
    from kvtier.store.paths import DiskPath

_log = logging.getLogger(__name__)
_PIECE = MIB
"""Bytes read at a time: a read that comes meanwhile waits for no more, and it is memory set apart for each
path."""
_YIELD = 0.05
"""Seconds between two looks at a store that has something better to do."""
_HANG = 3.0
"""Seconds after which a device that has not answered is left alone until it has."""
_PASS_EVERY = 600.0
"""Seconds between the beginnings of two passes, at least: a small store is not read all the time."""
_PAUSE = 60.0
"""Seconds until a pass that left something out is tried again."""


class Scrubber:
    """Walks over all chunks in DRAM and on disk, at `StoreConfig.scrub` bytes per second, and drops bad ones.

    It pins nothing: a chunk that went meanwhile is no longer its business. It starts nothing while reads
    or writes are under way, and its bytes are in no counters but its own.
    """

    def __init__(self, core: Core) -> None:
        """Begin. Raises RuntimeError if a thread cannot be had."""
        self.core = core
        self._next = 0.0  # when the rate allows the next bytes
        self._stopping = threading.Event()
        self._disks = [DiskWalk(self, path) for path in core.paths if isinstance(path.tier, SlabTier)]
        self._thread = threading.Thread(target=self._run, name="kvtier-scrub", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End, whatever a device is at."""
        self._stopping.set()
        self._thread.join()

    @property
    def stopping(self) -> bool:
        """Whether the store closes."""
        return self._stopping.is_set() or self.core.closed

    def pause(self, seconds: float) -> None:
        """Wait, unless the store closes."""
        self._stopping.wait(min(max(0.0, seconds), threading.TIMEOUT_MAX))

    def count(self, name: str, amount: int = 1) -> None:
        """Add to one of the counters. Called with the store's lock held."""
        self.core.counters[f"scrub.{name}"] += amount

    def pace(self, nbytes: int) -> None:
        """Wait for as long as so many bytes may take, less what reading them took."""
        now, seconds = time.monotonic(), nbytes / self.core.config.scrub
        self._next = max(now - seconds, self._next) + seconds
        self.pause(self._next - now)

    def _run(self) -> None:
        while not self.stopping:
            begin = time.monotonic()
            try:
                whole = self._pass()
            except Exception:
                _log.exception("scrubbing failed, will try again")
                whole = False
            if whole and not self.stopping:
                with self.core.lock:
                    self.count("passes")
                    self.core.counters["scrub.last_pass"] = int(time.time())
            self.pause(begin + _PASS_EVERY - time.monotonic() if whole else _PAUSE)

    def _pass(self) -> bool:
        """Check everything once; False if something was left out."""
        whole = DramWalk(self).run()
        for walk in self._disks:
            whole = walk.run() and whole
        return whole


class DramWalk:
    """Over the chunks in DRAM: each is compared with the checksum that was taken when it came in."""

    def __init__(self, scrubber: Scrubber) -> None:
        self._scrubber = scrubber

    def run(self) -> bool:
        """Check every chunk once; False if the store closes."""
        scrubber, core = self._scrubber, self._scrubber.core
        row = 0
        while not scrubber.stopping:
            with core.lock:
                is_busy = not (core.reads_are_idle() and core.writes_are_idle())
                row = core.dram.index.next_live(row)
            if row == NO_ROW:
                return True
            if is_busy:
                scrubber.pause(_YIELD)
            else:
                scrubber.pace(self._check(row))
                row += 1
        return False

    def _check(self, row: int) -> int:
        """Check one chunk. Returns how many bytes were read."""
        core = self._scrubber.core
        dram = core.dram
        with core.lock:
            if dram.index.is_gone(row):
                return 0
            key, nbytes, expected = dram.index.key(row), dram.index.nbytes[row], dram.checksum(row)
            address = dram.address(dram.index.offset[row])
        # Not pinned, which would make it the last used one: it may go, and its slot be filled, meanwhile.
        if checksum(address, nbytes) != expected:
            with core.lock:
                is_there = dram.find(key) == row and dram.checksum(row) == expected
                if is_there:
                    dram.index.pin(row)
                    address = dram.address(dram.index.offset[row])
            if is_there:
                self._confirm(row, address, nbytes, expected)
        with core.lock:
            self._scrubber.count("chunks")
            self._scrubber.count("bytes", nbytes)
        return nbytes

    def _confirm(self, row: int, address: int, nbytes: int, expected: int) -> None:
        """Drop a pinned chunk if it is bad."""
        core = self._scrubber.core
        is_bad = checksum(address, nbytes) != expected
        with core.lock:
            if is_bad and not core.dram.index.is_gone(row):
                core.dram.discard(row)
                self._scrubber.count("bad")
                _log.warning("a chunk in DRAM has changed by itself: it is dropped")
            core.dram.index.unpin(row)
            core.changed.notify_all()
        core.pump()


class DiskWalk:
    """Over the chunks of one path, piece by piece, through its engine."""

    def __init__(self, scrubber: Scrubber, path: DiskPath) -> None:
        self._scrubber = scrubber
        self._path = path
        assert isinstance(path.tier, SlabTier)
        self._tier = path.tier
        self._arena: Arena | None = None
        self._done = threading.Event()  # the last read has come back
        self._done.set()

    def run(self) -> bool:
        """Check every chunk once; False if the device is down, hangs or fails, or the store closes."""
        scrubber, core, index = self._scrubber, self._scrubber.core, self._path.tier.index
        row = start = 0  # the piece to read next
        generation = -1  # of the chunk that was begun
        while not scrubber.stopping:
            plan = self._path.tier.plan()
            with core.lock:
                if self._path.health.is_down or not self._done.is_set():
                    return False
                is_busy = self._is_busy()
                if not is_busy:
                    if start and (index.is_gone(row) or index.generation[row] != generation):
                        row, start = row + 1, 0
                    if not start and (row := index.next_live(row)) == NO_ROW:
                        return True
                    key, generation = index.key(row), index.generation[row]
                    left = index.stored_bytes[row] - start
                    nbytes = min(_PIECE, left)
                    self._plan(plan, row, start, nbytes)
            if is_busy:
                scrubber.pause(_YIELD)
                continue
            if (outcome := self._read(plan)) is None:
                return False
            with core.lock:
                is_there = index.find(key) == row and index.generation[row] == generation
                scrubber.count("bytes", nbytes)
                scrubber.count("chunks", int(is_there and left == nbytes and not outcome))
                if outcome and is_there and not scrubber.stopping:
                    self._judge(row, outcome)
            if outcome in (CHECKSUM, SHORT):
                self._path.keeper.submit(self._path.bury)
            elif outcome:
                return False
            row, start = (row + 1, 0) if outcome or left == nbytes else (row, start + nbytes)
            scrubber.pace(nbytes)
        return False

    def _is_busy(self) -> bool:
        path = self._path
        under_way = path.waiting or path.begun or path.reads.in_flight or path.writes.in_flight
        return bool(under_way) or not self._scrubber.core.writes_are_idle()

    def _plan(self, plan: Plan, row: int, start: int, nbytes: int) -> None:
        if self._arena is None:
            self._arena = Arena(_PIECE)
        self._tier.plan_read(plan, row, self._arena.address, start=start, nbytes=nbytes)

    def _read(self, plan: Plan) -> int | None:
        """What became of a read; None if it does not come back in time, and then its memory is its own."""
        self._done.clear()
        batch: Batch = plan.batch(lambda batch: self._done.set(), self._arena)
        self._path.submit(batch)
        end = time.monotonic() + _HANG
        while not self._done.wait(0.05):
            if self._scrubber.stopping or time.monotonic() > end:
                return None
        return plan.outcomes(batch)[0]

    def _judge(self, row: int, outcome: int) -> None:
        """Drop a bad chunk, or mark one that cannot be read, as any read would."""
        tier = self._path.tier
        if outcome in (CHECKSUM, SHORT):
            tier.discard(row)
            self._scrubber.count("bad")
            _log.warning("%s: a chunk is not as it was written: it is dropped", tier.path)
        elif is_failure(outcome):
            tier.index.suspect(row, True)
            self._scrubber.count("unreadable")
