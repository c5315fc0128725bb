"""The `threads` engine in Python: a pool of preadv and pwritev, the system calls without the GIL."""

from __future__ import annotations

import errno
import logging
import os
import queue
import threading
import time
from typing import TYPE_CHECKING, TypeAlias

from kvtier.io.base import SHORT, Batch, IOEngine
from kvtier.io.parts import Operation

if TYPE_CHECKING:
    from collections.abc import Callable

_Call: TypeAlias = "Callable[[int, list[memoryview], int], int]"
_log = logging.getLogger(__name__)
_MOST_REFUSALS = 1000  # a device that says "again" this often is reported as it is
_NOTHING = -1  # stands for the operations of a batch that has none


class ThreadEngine(IOEngine):
    """Each thread takes one operation at a time, so that a slow one holds up no other."""

    name = "threads"

    def __init__(self, threads: int) -> None:
        """Raises RuntimeError if so many threads cannot be had, and then none is left."""
        self._queue: queue.SimpleQueue[tuple[_Progress, int] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._running = 0
        self._closed = False
        self._threads: list[threading.Thread] = []
        try:
            for i in range(threads):
                thread = threading.Thread(target=self._work, name=f"kvtier-io-{i}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close(1.0)
            raise

    def submit(self, batch: Batch) -> None:
        """Queue every operation; see IOEngine.submit."""
        progress = _Progress(batch)
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine is closed")
            self._running += 1
        if not len(batch.ops):
            self._queue.put((progress, _NOTHING))
        for i in range(len(batch.ops)):
            self._queue.put((progress, i))

    def close(self, timeout: float) -> bool:
        """Wait for running batches, then let the threads end; see IOEngine.close."""
        end = time.monotonic() + timeout
        with self._idle:
            drained = self._idle.wait_for(lambda: self._running == 0, timeout)
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._queue.put(None)
        for thread in self._threads:
            if drained and thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
        return drained

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            progress, i = item
            try:
                result = run(Operation.of(progress.batch, i)) if i != _NOTHING else 0
            except OSError as error:
                result = error.errno or errno.EIO
            except Exception:
                _log.exception("an I/O thread failed")
                result = errno.EIO
            if progress.finish(i, result):
                try:
                    progress.batch.on_done(progress.batch)
                except Exception:
                    _log.exception("the completion of a batch failed")
                with self._idle:
                    self._running -= 1
                    self._idle.notify_all()
            del item, progress  # an idle thread keeps no batch alive


class _Progress:
    """Counts a batch's open operations."""

    __slots__ = ("_lock", "_open", "batch")

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self._open = len(batch.ops)
        self._lock = threading.Lock()

    def finish(self, i: int, result: int) -> bool:
        """Note a result; True for the last operation."""
        if i == _NOTHING:
            return True
        with self._lock:
            self.batch.results[i] = result
            self._open -= 1
            return self._open == 0


def run(operation: Operation) -> int:
    """Do one operation here and now; its result as in IOEngine. Raises OSError."""
    memory = operation.memory()
    if operation.is_write:
        operation.sign()
        return _transfer(os.pwritev, operation.fd, memory, operation.offset, at_end=errno.EIO)
    result = _transfer(os.preadv, operation.fd, memory, operation.offset, at_end=SHORT)
    return result or operation.check()


def _transfer(call: _Call, fd: int, memory: memoryview, offset: int, *, at_end: int) -> int:
    """Move all of `memory`; `at_end` if the call makes no progress. Raises OSError."""
    done = refused = 0
    while done < len(memory):
        try:
            moved = call(fd, [memory[done:]], offset + done)
        except BlockingIOError:
            refused += 1
            if refused == _MOST_REFUSALS:
                raise
            continue
        if moved == 0:
            return at_end
        done += moved
    return 0
