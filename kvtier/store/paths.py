"""The disk tier's paths: each a tier on its device, with an engine and a budget of bytes in flight."""

from __future__ import annotations

import errno
import logging
import math
import os
import resource
import threading
import time
from collections import deque
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from kvtier.config import page_up
from kvtier.io import open_engine
from kvtier.io.split import SplitEngine
from kvtier.io.window import Window
from kvtier.owner import NOBODY
from kvtier.store.health import Health, Seldom, is_failure
from kvtier.store.opening import open_in_time
from kvtier.store.watcher import Watcher
from kvtier.store.worker import Worker
from kvtier.tiers.base import NO_ROW
from kvtier.tiers.files.tier import FilesTier
from kvtier.tiers.slab.tier import SlabTier

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator

    from kvtier.config import StoreConfig
    from kvtier.index.owners import Owners
    from kvtier.io.base import Batch
    from kvtier.store.flight import Flight, Piece
    from kvtier.tiers.disk import DiskTier

_log = logging.getLogger(__name__)
Chunk = TypeVar("Chunk")
_MAX_BATCH_BYTES = 16 << 20
"""Bytes per batch, and no more than a quarter of the window: copies of one overlap with the next."""
_OPENED_BYTES = 4 << 20
"""Bytes per batch of reads whose files have to be opened first: that goes on beside the read before."""
_BESIDE_READS = 4 << 20
"""Bytes of writes in flight on a device that is read from: whoever reads is waited for, a write is not."""
_MOST_FILES = 256
"""Files of chunks that are open at a time for reads, and for writes; fewer where descriptors are few."""
_HANG = 3.0
"""Seconds in which a device that has something to do must get something done."""
_READ_FROM = 0.25
"""Seconds after its last read that a device counts as read from."""
_SUMMED = (
    "chunks", "bytes", "capacity", "evictions", "pinned_slots", "journal_bytes", "compactions",
    "compactions_failed", "outages", "expired", "bytes_in_directory",
)  # fmt: skip


class DiskPath:
    """One path. The store's lock is held for all that looks at its tier, windows, health or queues, and
    not held for what may wait for the device or call back: read, submit, settle, bury, complain, close.
    """

    def __init__(
        self,
        config: StoreConfig,
        lock: threading.Lock,
        owners: Owners,
        wall: Callable[[], float],
        paths: int,
    ) -> None:
        """Open the tier and the engine. `config` names one of `paths`, with its share of the capacity.

        Raises what SlabTier, FilesTier and open_engine raise.
        """
        with ExitStack() as undo:
            kind = SlabTier if config.kind == "slab" else FilesTier
            self.tier: DiskTier = kind(config, lock, owners, wall)
            undo.callback(self.tier.close)
            self.engine = SplitEngine(partial(open_engine, config))
            undo.callback(self.engine.close, 1.0)
            self.keeper = Worker("kvtier-disk")
            """Writes tombstones and waits for syncs, so that nobody else hangs where the device does."""
            undo.callback(self.keeper.stop, 1.0)
            self.opener = Worker("kvtier-open") if self.tier.shared else None
            """Opens files to read, in case that hangs."""
            undo.pop_all()
        self._is_closing = False
        self._complaints = Seldom()
        slot = page_up(config.chunk_bytes)
        most = _most_files(paths) if self.tier.shared else math.inf
        self.reads = Window(config.io_window, slot, most)
        self.writes = Window(config.io_window, slot, most)
        self._watcher: Watcher | None = None
        self.health = Health()
        self.waiting: deque[Flight] = deque()
        """Reads that wait for the window, or for a slot to land in."""
        self.begun: deque[Flight] = deque()
        """Those that have a slot, and pieces that wait for the window."""
        self.begun_bytes = 0
        """Bytes of the landing slots that these hold."""
        self.dropped: deque[Flight] = deque()
        """Reads that waited when the path was taken out."""
        self.turn = 0.0
        """Seconds of this device's bandwidth given out so far: the path that is furthest behind is next."""

    def may_write(self, now: float) -> bool:
        """Whether another write may start: little may be in flight while somebody reads."""
        is_read_from = self.reads.in_flight or now - self.reads.last_use < _READ_FROM
        limit = min(_BESIDE_READS, self.writes.limit) if is_read_from else self.writes.limit
        return self.writes.has_room and self.writes.in_flight < limit

    def notice(self, now: float) -> None:
        """Take the path out if it hangs."""
        writes = 0.0 if self.tier.waits_for_others else self.writes.stalled(now)
        if max(self.reads.stalled(now), writes) > _HANG and self.health.hung(now):
            self._drop_waiting(f"nothing came back for {_HANG:g} s")

    def learn(self, outcomes: Iterable[int], now: float) -> None:
        """Take in what became of the operations of a batch."""
        failure = next((outcome for outcome in outcomes if is_failure(outcome)), 0)
        if failure and self.health.failed(now):
            self._drop_waiting(f"keeps failing ({os.strerror(failure)})")
        elif not failure and self.health.worked():
            _log.warning("%s: works again", self.tier.path)

    def _drop_waiting(self, reason: str) -> None:
        _log.warning("%s: %s: not asked until it works again", self.tier.path, reason)
        self.dropped += (*self.begun, *self.waiting)
        self.begun.clear()
        self.waiting.clear()

    def next_read(self, *, may_begin: bool) -> Flight:
        """Whose piece to read next; one of a chunk that nothing was read of only if it `may_begin`.

        Chunks that are read in pieces take turns, once all of them have begun that wait before others.
        """
        if self.begun and not (may_begin and self.waiting and len(self.waiting[0].pieces) > 1):
            return self.begun.popleft()
        return self.waiting.popleft()

    def watch(self, forget: Callable[[list[bytes]], None]) -> None:
        """See what other processes do from now on; `forget` is told the keys that they delete."""
        if self.tier.shared:
            self._watcher = Watcher(self, forget)

    def read(self, batch: PathBatch[Piece], on_done: Callable[[Batch], None]) -> None:
        """Start a batch of reads."""
        if self.opener is None:
            self.submit(batch.plan.batch(on_done, batch))
        else:
            self.opener.submit(partial(self._open_and_read, batch, on_done))

    def _open_and_read(self, batch: PathBatch[Piece], on_done: Callable[[Batch], None]) -> None:
        self.tier.open_files(batch.plan)
        self.submit(batch.plan.batch(on_done, batch))

    def submit(self, batch: Batch) -> None:
        """Start a batch; if the engine cannot even take it, every operation of it has failed."""
        try:
            self.engine.submit(batch)
        except Exception as error:
            if not self._is_closing:
                self.complain(f"the I/O engine refused a batch ({error!r})")
            batch.results[:] = errno.EIO
            batch.on_done(batch)

    def complain(self, what: str) -> None:
        """Log what the device does, but not each time: a failing one does it hundreds of times a minute."""
        if (suppressed := self._complaints.due(time.monotonic())) is not None:
            more = f" (and {suppressed} more such lines since the last)" if suppressed else ""
            _log.warning("%s: %s%s", self.tier.path, what, more)

    def settle(self) -> bool:
        """Journal what is over and have the device confirm everything; False if it does not. May hang."""
        try:
            self.tier.bury()
            self.tier.sync()
        except OSError as error:
            self.complain(f"cannot sync: {error}")
            return False
        return True

    def bury(self) -> bool:
        """Journal what is over; False if that fails, and then it is still to be done. May hang."""
        try:
            self.tier.bury()
        except OSError as error:
            self.complain(f"cannot journal a delete, will try again: {error}")
            return False
        return True

    def close(self, timeout: float) -> bool:
        """Stop engine and keeper; False, and everything is kept, if the device does not let go in time."""
        end = time.monotonic() + timeout
        self._is_closing = True
        ended = self._watcher is None or self._watcher.stop(timeout)
        ended = (self.opener is None or self.opener.stop(max(0.1, end - time.monotonic()))) and ended
        drained = self.engine.close(max(0.1, end - time.monotonic()))
        if drained:
            self.keeper.submit(self.settle)
        settled = self.keeper.stop(max(0.1, end - time.monotonic()))
        let_go = self.tier.stop(max(0.1, end - time.monotonic()))
        if not (settled and let_go and drained and ended):
            return False
        self.tier.close()
        return True

    def stats(self) -> dict[str, int | float | str]:
        """Gauges of the path: its tier's, its windows', and the bandwidth it showed when kept busy."""
        return {
            **self.tier.stats(),
            "path": str(self.tier.path),
            "kind": self.tier.kind,
            "engine": self.engine.name,
            "read_window": self.reads.limit,
            "write_window": self.writes.limit,
            "read_gb_s": self.reads.rate / 1e9,
            "write_gb_s": self.writes.rate / 1e9,
            "down": self.health.is_down,
            "outages": self.health.outages,
        }


def _most_files(paths: int) -> int:
    """How many files one of so many paths may have open for reads, and for writes."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(8, min(_MOST_FILES, limit // 8 // paths)) if limit != resource.RLIM_INFINITY else _MOST_FILES


class PathBatch(Generic[Chunk]):
    """Reads or writes of chunks that start together, on one path."""

    __slots__ = ("chunks", "path", "plan", "start")

    def __init__(self, path: DiskPath, start: int) -> None:
        self.path = path
        self.start = start
        self.plan = path.tier.plan()
        self.chunks: list[Chunk] = []


def batch_for(
    batches: list[PathBatch[Chunk]], path: DiskPath, window: Window, start: int = 0
) -> PathBatch[Chunk]:
    """The last of `batches` for `path`, or a new one behind it if that is large enough, or is of pieces that
    do not begin `start` bytes from the start of their chunks: whoever waits for these waits for no others.
    """
    batch = next((batch for batch in reversed(batches) if batch.path is path), None)
    most = _OPENED_BYTES if path.opener is not None and window is path.reads else _MAX_BATCH_BYTES
    if batch is None or batch.start != start or batch.plan.nbytes >= min(most, window.limit // 4):
        batch = PathBatch(path, start)
        batches.append(batch)
    return batch


class Paths(list[DiskPath]):
    """All paths of a store, none for DRAM alone."""

    @classmethod
    def open(
        cls, config: StoreConfig, lock: threading.Lock, owners: Owners, wall: Callable[[], float]
    ) -> Paths:
        """Open every path of `config`. Raises what DiskPath raises, and then none is left open."""
        paths = cls()
        try:
            for path in config.paths:
                make = partial(DiskPath, config.of_path(path), lock, owners, wall, len(config.paths))
                paths.append(open_in_time(path, config.open_timeout, make, lambda late: late.close(1.0)))
        except BaseException:
            paths.close(1.0)
            raise
        return paths

    def notice(self, now: float) -> None:
        """Take out the paths that hang."""
        for path in self:
            path.notice(now)

    def find(self, key: bytes) -> tuple[DiskPath, int] | None:
        """The path that holds a chunk, and its row there; one that works, if several hold it."""
        found = None
        for path in self:
            if (row := path.tier.find(key)) != NO_ROW:
                found = path, row
                if not path.health.is_down:
                    break
        return found

    def by_turn(self, nbytes: int, owner: int = NOBODY) -> list[DiskPath]:
        """The paths in the order in which they should get a chunk: none evicts while another has room, and
        none writes beyond its budget of a day while another need not.
        """
        able = [path for path in self if path.health.is_down or path.tier.budget_left > 0]
        if all(path.health.is_down for path in able):
            able = self
        return sorted(able, key=lambda path: (not path.tier.has_free(nbytes, owner), path.turn))

    def take_turn(self, path: DiskPath, nbytes: int) -> None:
        """Note that `path` got a chunk: the faster a path, the sooner it is its turn again."""
        behind = max(other.turn for other in self) - 1.0  # one that was full does not catch up for ever
        path.turn = max(path.turn, behind) + nbytes / self._rate_of(path)

    def _rate_of(self, path: DiskPath) -> float:
        """Read bandwidth once all are measured, else that of writes, else the same for all."""
        for kind in ("reads", "writes"):
            windows: list[Window] = [getattr(other, kind) for other in self]
            if all(window.rate for window in windows):
                rate: float = getattr(path, kind).rate
                return rate
        return 1e9

    def read_next(self, full: Container[DiskPath]) -> Iterator[DiskPath]:
        """The path whose reads are furthest below its window, as long as one has reads waiting that may
        start: in `full` ones only those that have a slot.
        """
        while ready := [
            path
            for path in self
            if path.reads.has_room and (path.begun or (path.waiting and path not in full))
        ]:
            yield min(ready, key=lambda path: path.reads.in_flight / path.reads.limit)

    def on_each(self, work: Callable[[DiskPath], bool], done: Callable[[bool], None]) -> None:
        """Run `work` on every path's keeper; after the last one `done`, with whether all returned True."""
        left, all_well, lock = len(self), True, threading.Lock()
        if not self:
            done(True)

        def run(path: DiskPath) -> None:
            nonlocal left, all_well
            well = False
            try:
                well = work(path)
            finally:
                with lock:
                    left -= 1
                    all_well = all_well and well
                    is_last = left == 0
                if is_last:
                    done(all_well)

        for path in self:
            path.keeper.submit(partial(run, path))

    def close(self, timeout: float) -> bool:
        """Close every path; False if the kernel still owns memory of one."""
        end = time.monotonic() + timeout
        closed = [path.close(max(0.1, end - time.monotonic())) for path in self]
        return all(closed)

    def stats(self) -> dict[str, int | float | str]:
        """Gauges of the disk tier: totals, and each path's own behind its number."""
        each = [path.stats() for path in self]
        totals: dict[str, int | float | str] = {}
        for name, value in each[0].items() if each else ():
            if name in _SUMMED or name.startswith("recover"):
                totals[name] = sum(stats[name] for stats in each)  # type: ignore[misc]
            elif isinstance(value, bool):
                totals[name] = (any if name == "down" else all)(stats[name] for stats in each)
        for i, stats in enumerate(each):
            totals.update({f"{i}.{name}": value for name, value in stats.items()})
        return totals
