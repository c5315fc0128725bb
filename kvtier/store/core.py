"""Core: what the read path and the write path share. Tiers, the lock, the clock, the counters."""

from __future__ import annotations

import errno
import logging
import os
import queue
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from kvtier.errors import StoreClosed
from kvtier.io import open_engine
from kvtier.io.split import SplitEngine
from kvtier.metrics import Counters, names
from kvtier.store.clock import Clock
from kvtier.tiers.dram import DramTier
from kvtier.tiers.slab.tier import SlabTier

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.config import StoreConfig
    from kvtier.io.base import Batch, IOEngine
    from kvtier.store.put import Put
    from kvtier.types import Reason, Status

_log = logging.getLogger(__name__)

MAX_BATCH_BYTES = 16 << 20
"""Bytes per batch of reads or writes: copies of one overlap with the I/O of the next."""
_POPULATE_STEP = 4 << 20


class Core:
    """Shared by reader and writer. `lock` guards the tiers' indexes, the counters and all requests;
    no I/O and no copy happens under it.
    """

    def __init__(self, config: StoreConfig) -> None:
        """Open the tiers and the engine. Raises what SlabTier and open_engine raise."""
        self.config = config
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        """Notified when a slot may have become free, a write ended, or a job came in."""
        self.counters = Counters(dict.fromkeys(names(), 0))
        self.disk: SlabTier | None = SlabTier(config, self.lock) if config.path is not None else None
        self.engine: IOEngine | None = None
        try:
            if self.disk is not None:
                self.engine = SplitEngine(partial(open_engine, config))
            self.dram = DramTier(config.dram, config.chunk_bytes)
            self.landing = DramTier(config.landing if self.disk else 0, config.chunk_bytes)
        except BaseException:
            if self.engine is not None:
                self.engine.close(1.0)
            if self.disk is not None:
                self.disk.close()
            raise
        self.tiers = [self.dram, *([self.disk] if self.disk else [])]
        """The tiers in the order they are asked."""
        self.writes_are_idle: Callable[[], bool] = lambda: True
        """Whether no write will free a slot by itself; the writer's answer."""
        self.reads_are_idle: Callable[[], bool] = lambda: True
        """The same of reads."""
        self.pumps: list[Callable[[], None]] = []
        """What starts reads and writes that waited for a slot: the reader's and the writer's."""
        self.closed = False
        self.clock = Clock()
        self.copier = Worker("kvtier-copy")
        self.stopping = False
        self.populated = 0
        self._populator = threading.Thread(target=self._populate, name="kvtier-populate", daemon=True)
        self._populator.start()

    def close_put(self, put: Put, i: int, status: Status, reason: Reason, nbytes: int) -> None:
        """Give item `i` of a put its outcome, and count it. Called with the lock held."""
        put.close(i, status, reason, nbytes)
        self.counters.count_put(status, reason)

    def pump(self) -> None:
        """Start what a slot that became free lets start. Called without the lock."""
        for pump in self.pumps:
            pump()

    def submit(self, batch: Batch) -> None:
        """Start a batch; if the engine cannot even take it, every operation of it has failed."""
        assert self.engine is not None, "only a disk tier makes batches"
        try:
            self.engine.submit(batch)
        except Exception:
            _log.exception("the I/O engine refused a batch")
            batch.results[:] = errno.EIO
            batch.on_done(batch)

    def check_open(self) -> None:
        """Raise StoreClosed once the store closes, or in a forked child."""
        if self.closed:
            raise StoreClosed("the store is closed: open a new one")

    @property
    def largest_payload(self) -> int:
        """Bytes of the largest payload that every tier can hold."""
        tiers = [self.dram, self.landing, *([self.disk] if self.disk else [])]
        return min(tier.largest_payload for tier in tiers if tier.capacity)

    def wait_until_populated(self, timeout: float) -> bool:
        """Wait until the arenas are backed by memory and offered to the engine."""
        self._populator.join(timeout)
        return not self._populator.is_alive()

    def forget_after_fork(self) -> None:
        """In a forked child: be closed. The threads are gone, the files are the parent's."""
        self.closed = self.stopping = True
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        if self.disk is not None:
            self.disk.drop_descriptors()

    def stop(self, timeout: float) -> None:
        """Stop the threads, the engine and the tiers. Memory that the kernel may still write to, and
        its file, stay for the life of the process.
        """
        self.stopping = True
        self._populator.join()
        self.clock.stop()
        self.copier.stop()
        drained = self.engine.close(timeout) if self.engine else True
        if not drained:
            _log.warning("closed with I/O that the kernel has not finished; its memory is kept")
            _abandoned.append(self)
            return
        if self.disk is not None:
            try:
                self.disk.write_tombstones()
                self.disk.sync()
            except OSError as error:
                _log.warning("cannot sync %s at close: %s", self.disk.path, error)
            self.disk.close()

    def _populate(self) -> None:
        """Back the arenas with memory, off everybody's path, and offer them for registered I/O."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        for tier in (self.dram, self.landing):
            arena = tier.arena
            size = arena.nbytes if tier.capacity else 0
            for offset in range(0, size, _POPULATE_STEP):
                if self.stopping:
                    return
                step = min(_POPULATE_STEP, size - offset)
                start = time.monotonic()
                arena.populate(offset, step)
                self.populated += step
                if not arena.huge:  # whoever needs the memory at once gets it at the first touch
                    time.sleep(3 * (time.monotonic() - start))
            # Small pages would hold the ring up for longer than registering them saves.
            if size and arena.huge and self.engine is not None and not self.stopping:
                self.engine.register(arena.address, size)


_abandoned: list[Core] = []


class Worker:
    """One thread that runs calls in order."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        """Run `call` after those submitted before."""
        self._calls.put(call)

    def stop(self) -> None:
        """Run what was submitted, then end the thread."""
        self._calls.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:
                _log.exception("a copy failed")
            del call
