"""Core: what the read path and the write path share. Tiers, the lock, the clock, the counters."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvtier.config import page_up
from kvtier.errors import StoreClosed
from kvtier.index.owners import Owners
from kvtier.metrics import Counters, names
from kvtier.store.admission import Admission
from kvtier.store.clock import Clock
from kvtier.store.follow import Followers
from kvtier.store.paths import Paths
from kvtier.store.scrub import Scrubber
from kvtier.store.sweeper import Sweeper
from kvtier.store.worker import Worker
from kvtier.tiers.base import NO_ROW
from kvtier.tiers.dram import DramTier

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.config import StoreConfig
    from kvtier.store.put import Put
    from kvtier.types import Reason, Status

_log = logging.getLogger(__name__)

_POPULATE_STEP = 4 << 20


class Core:
    """Shared by reader and writer. `lock` guards the tiers' indexes, the counters and all requests;
    no I/O and no copy happens under it.
    """

    def __init__(self, config: StoreConfig, wall: Callable[[], float]) -> None:
        """Open the tiers. Raises what Paths.open and DramTier raise. `wall` tells the seconds since 1970."""
        self.config = config
        self.wall = wall
        self.owners = Owners(config.quotas)
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        """Notified when a slot may have become free, a write ended, or a job came in."""
        self.counters = Counters(dict.fromkeys(names(), 0))
        self.writes_are_idle: Callable[[], bool] = lambda: True
        """Whether no write will free a slot by itself; the writer's answer."""
        self.reads_are_idle: Callable[[], bool] = lambda: True
        """The same of reads."""
        self.pumps: list[Callable[[], None]] = []
        """What starts reads and writes that waited for a slot: the reader's and the writer's."""
        self.closed = False
        self.stopping = False
        self.populated = 0
        with ExitStack() as undo:
            self.paths = Paths.open(config, self.lock, self.owners, wall)
            undo.callback(self.paths.close, 1.0)
            self.admission = Admission(config, self.paths)
            self.dram = DramTier(
                config.dram, config.chunk_bytes, self.owners, self._dram_quotas(), wall, config.dram_policy
            )
            self.landing = DramTier(
                config.landing if self.paths else 0, config.chunk_bytes, self.owners, wall=wall
            )
            self.tiers = [self.dram, *(path.tier for path in self.paths)]
            self.followers = Followers(self)
            self.clock = Clock()
            undo.callback(self.clock.stop)
            self.sweeper = Sweeper(self)
            """Started by whatever brings in a chunk that expires."""
            self.sweeper.start()
            self.copier = Worker("kvtier-copy")
            undo.callback(self.copier.stop)
            self._populator = threading.Thread(target=self._populate, name="kvtier-populate", daemon=True)
            self._scrubber = Scrubber(self) if config.scrub else None
            if self._scrubber is not None:
                undo.callback(self._scrubber.stop)
            self._populator.start()
            for path in self.paths:
                path.watch(self._forget)
            undo.pop_all()

    def _dram_quotas(self) -> dict[str, int]:
        """Bytes of DRAM by tenant: the same part of it as of the disk tier, or one chunk."""
        quotas, disk = self.config.quotas, sum(path.tier.capacity for path in self.paths)
        if not disk:
            return dict(quotas)
        one = page_up(self.config.chunk_bytes)
        return {tenant: max(one, self.config.dram * quota // disk) for tenant, quota in quotas.items()}

    def close_put(self, put: Put, i: int, status: Status, reason: Reason, nbytes: int) -> None:
        """Give item `i` of a put its outcome, and count it. Called with the lock held."""
        put.close(i, status, reason, nbytes)
        self.counters.count_put(status, reason)

    def _forget(self, keys: list[bytes]) -> None:
        """Drop from DRAM what other processes deleted."""
        with self.lock:
            for key in keys:
                if (row := self.dram.find(key)) != NO_ROW:
                    self.dram.discard(row)
            self.changed.notify_all()
        self.pump()

    def pump(self) -> None:
        """Start what a slot that became free lets start. Called without the lock."""
        for pump in self.pumps:
            pump()

    def check_open(self) -> None:
        """Raise StoreClosed once the store closes, or in a forked child."""
        if self.closed:
            raise StoreClosed("the store is closed: open a new one")

    @property
    def largest_payload(self) -> int:
        """Bytes of the largest payload that every tier can hold."""
        return min(tier.largest_payload for tier in (*self.tiers, self.landing) if tier.capacity)

    def wait_until_populated(self, timeout: float) -> bool:
        """Wait until the arenas are backed by memory and offered to the engine."""
        self._populator.join(timeout)
        return not self._populator.is_alive()

    def forget_after_fork(self) -> None:
        """In a forked child: be closed. The threads are gone, the files are the parent's."""
        self.closed = self.stopping = True
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        for path in self.paths:
            path.tier.drop_descriptors()

    def stop(self, timeout: float) -> None:
        """Stop the threads, the engines and the tiers. Memory that the kernel may still write to, and
        its file, stay for the life of the process.
        """
        self.stopping = True
        if self._scrubber is not None:
            self._scrubber.stop()
        self._populator.join()
        self.clock.stop()
        self.copier.stop()
        if not self.paths.close(timeout):
            _log.warning("closed with I/O that the kernel has not finished; its memory is kept")
            _abandoned.append(self)

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
            if size and arena.huge and not self.stopping:
                for path in self.paths:
                    path.engine.register(arena.address, size)


_abandoned: list[Core] = []
