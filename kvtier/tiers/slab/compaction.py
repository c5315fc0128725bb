"""Compaction: a journal's next file is written in the background, while appends go on to the old one.

Nothing of it waits for the device with a lock held but the last few records and the rename, and appends
wait for it only when the journal is full.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from kvtier.format import RECORD_BYTES
from kvtier.tiers.slab.journal import NewJournal
from kvtier.tiers.slab.snapshot import live_records, record_counts

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kvtier.tiers.slab.journal import Journal, Tail

_log = logging.getLogger(__name__)
_STEP = 1 << 13
"""Chunks whose records are put together at a time."""
_FEW = 256
"""Records that may be left to copy with the journal's lock held."""
_ROUNDS = 8
"""Times that what was appended meanwhile is copied without the lock; then it is copied with it."""
_PATIENCE = 30.0
"""Seconds that an append waits for a full journal to be compacted."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""Seconds after a failure before it is tried again, unless the journal is full."""


class Compactor:
    """Compacts one journal, on a thread that lives only as long as that takes.

    `plan` gives the most records that may be alive, the lower bound of generations for the next file's
    header, and the records it begins with; it is called with the journal's lock held. `scan` gives records
    and positions, as snapshot.scan does, and is called with no lock held. `spend` is told the bytes written.
    """

    def __init__(
        self,
        journal: Journal,
        plan: Callable[[], tuple[int, int, npt.NDArray[np.void]]],
        scan: Callable[[Callable[[], None]], tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]],
        spend: Callable[[int], None],
    ) -> None:
        self._journal = journal
        self._spend = spend
        self._plan = plan
        self._scan = scan
        self._new: NewJournal | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._not_before = 0.0
        self._pause = _FIRST_PAUSE
        self._error = 0
        self.done = 0
        """Compactions that came to their end."""
        self.failed = 0
        """Compactions that the device made fail."""

    def start(self, *, at_once: bool = False) -> None:
        """Compact in the background, unless that is going on, or failed lately. Called with the journal's
        lock held.
        """
        if self._thread is not None or self._stopping:
            return
        if not at_once and time.monotonic() < self._not_before:
            return
        thread = threading.Thread(target=self._run, name="kvtier-compact", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can be had now
            self._put_off(errno.EAGAIN)
        else:
            self._thread = thread

    def make_room(self, has_room: Callable[[], bool]) -> None:
        """Have the journal compacted until it has room. The journal's lock is held, but let go meanwhile.

        Raises OSError if that fails or takes too long.
        """
        end = time.monotonic() + _PATIENCE
        done, failed = self.done, self.failed
        while not has_room():
            self.start(at_once=True)
            # Two: the one under way may have begun before what is dead now was.
            if self._thread is None or self.done >= done + 2 or self.failed > failed:
                raise OSError(self._error or errno.ENOSPC, "the journal is full and cannot be compacted")
            if not self._journal.changed.wait(end - time.monotonic()):
                raise OSError(errno.ETIMEDOUT, "the journal is full and its compaction hangs")

    def stop(self, timeout: float) -> bool:
        """Give up what is under way; False if the device does not let go within `timeout` seconds."""
        end = time.monotonic() + timeout
        self._stopping = True
        if not self._journal.lock.acquire(timeout=timeout):
            return False  # whoever has it hangs where the device does
        try:
            thread = self._thread
            self._journal.changed.notify_all()
        finally:
            self._journal.lock.release()
        if thread is not None:
            thread.join(max(0.0, end - time.monotonic()))
        return thread is None or not thread.is_alive()

    def drop_descriptors(self) -> None:
        """In a forked child: close what the parent goes on using."""
        if self._new is not None:
            with contextlib.suppress(OSError):
                os.close(self._new.fd)

    def compact(self) -> None:
        """Write the next file and put it in place. Raises OSError, and then the old one stays in force."""
        journal = self._journal
        with journal.lock:
            live, generation, owners = self._plan()
            tail = journal.follow(min(live, journal.records + len(owners)))
        try:
            old = self._rewrite(tail, generation, owners)
        finally:
            self._new = None
            with journal.lock:
                journal.unfollow()
        os.close(old)  # which frees its space: not with the lock held

    def _run(self) -> None:
        done, error = False, 0
        try:
            self.compact()
            done = True
        except _Stopped:
            pass
        except OSError as failure:
            error = failure.errno or errno.EIO
            if time.monotonic() >= self._not_before:  # else it was said a moment ago
                _log.warning("cannot compact %s, will try again: %s", self._journal.path, failure)
        except Exception:
            error = errno.EIO
            _log.exception("the compaction of %s failed", self._journal.path)
        with self._journal.lock:
            self._thread = None
            if error:
                self.failed += 1
                self._put_off(error)
            elif done:
                self.done += 1
                self._pause, self._error = _FIRST_PAUSE, 0
            self._journal.changed.notify_all()

    def _put_off(self, error: int) -> None:
        self._error = error
        self._not_before = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _rewrite(self, tail: Tail, generation: int, owners: npt.NDArray[np.void]) -> int:
        journal = self._journal
        records, positions = self._scan(self._check)
        with journal.lock:
            # What came since is copied from the journal, in its order.
            since = np.isin(records["generation"][positions], tail.put_generations())
            positions = positions[~since]
            tail.planned = len(owners) + int(record_counts(records, positions).sum())
            if not journal.has_room(0, 0):
                raise OSError(errno.ENOSPC, "the capacity has no room for the journal's next file")
        new = self._new = NewJournal(journal.path, journal.header.for_journal(generation))
        try:
            new.write(owners)
            for first in range(0, len(positions), _STEP):
                self._check()
                new.write(live_records(records, positions[first : first + _STEP]))
            del records
            new.sync()
            synced = self._catch_up(new, tail)
            with journal.lock:
                self._check()
                new.write(tail.take())
                if tail.promised > synced:  # a flush, which the next file must not undo
                    new.sync()
                return journal.replace(new)
        except BaseException:
            new.abandon()
            raise
        finally:
            self._spend(new.records * RECORD_BYTES)

    def _catch_up(self, new: NewJournal, tail: Tail) -> int:
        """Copy what was appended meanwhile, until little is left. Returns how much the device confirmed."""
        synced = 0
        for _ in range(_ROUNDS):
            self._check()
            with self._journal.lock:
                if tail.total - tail.taken <= _FEW and tail.promised <= synced:
                    break
                records = tail.take()
                taken = tail.taken
            new.write(records)
            new.sync()
            synced = taken
        return synced

    def _check(self) -> None:
        if self._stopping:
            raise _Stopped


class _Stopped(Exception):
    """The compaction is no longer wanted."""
