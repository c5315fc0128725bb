"""The engines of the native core: io_uring, and a pool of native threads."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier import _native
from kvtier.io.base import OP, Batch, IOEngine

if TYPE_CHECKING:
    from collections.abc import Iterable

log = logging.getLogger(__name__)

_EXIT_GRACE = 1.0
"""Seconds that a dropped engine, or the end of the process, waits for running batches."""

_JOIN_GRACE = 1.0
"""Seconds for the last `on_done` calls of a drained engine."""

_NO_LIMIT = 2**63

_held_by_kernel: list[dict[int, Batch]] = []
"""Batches of dropped engines that never finished: their memory must not be freed."""


class NativeEngine(IOEngine):
    """Runs batches in `kvtier._core`, which reads, checks and writes without the GIL.

    The core keeps raw addresses only, so every batch, and with it its arrays, is held here until it
    is done. One thread waits for finished batches and calls their `on_done`.
    """

    def __init__(self, depth: int, max_bytes: int) -> None:
        """Keep up to `depth` operations and `max_bytes` bytes in the kernel; the rest queues.

        Raises OSError or RuntimeError, with the reason, where this machine or build cannot do that.
        """
        if _native.core is None:
            raise RuntimeError(f"no native core: {_native.why_not}")
        self._core: Any = _native.core.Engine(self.name, depth, max_bytes)
        try:
            self._running: dict[int, Batch] = {}
            self._thread = threading.Thread(
                target=_deliver, args=(self._core, self._running), name=f"kvtier-{self.name}", daemon=True
            )
            self._thread.start()
            self._finalizer = weakref.finalize(self, _shut_down, self._core, self._running, self._thread)
        except BaseException:
            self._core.close(_EXIT_GRACE)  # its threads would live on for as long as somebody has the error
            raise

    def submit(self, batch: Batch) -> None:
        """Start every operation of `batch` and return at once."""
        if batch.ops.dtype != OP:
            raise TypeError(f"ops must have the dtype OP, not {batch.ops.dtype}")
        self._running[batch.id] = batch
        try:
            self._core.submit(batch.id, batch.ops.view(np.uint8), batch.sums, batch.results)
        except Exception:
            del self._running[batch.id]
            raise

    def register(self, address: int, nbytes: int) -> bool:
        """Offer a long-lived, populated memory range for registered I/O; True if it was taken."""
        return bool(self._core.register(address, nbytes))

    def close(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for running batches, then stop. Idempotent.

        Batches still running then report late; a later call may return True.
        """
        deadline = time.monotonic() + timeout
        drained = bool(self._core.close(timeout))
        if drained:
            _join(self._thread, max(deadline - time.monotonic(), _JOIN_GRACE))
            self._finalizer.detach()
        return drained


class UringEngine(NativeEngine):
    """io_uring: `depth` operations in flight, one native thread that owns the ring."""

    name = "uring"


class NativeThreadEngine(NativeEngine):
    """Blocking `pread` and `pwrite` on a pool of native threads, one operation on each."""

    name = "threads"

    def __init__(self, threads: int) -> None:
        super().__init__(depth=threads, max_bytes=_NO_LIMIT)


def _deliver(core: Any, running: dict[int, Batch]) -> None:
    while finished := core.wait(math.inf):
        _report(running.pop(batch_id) for batch_id in finished)


def _report(batches: Iterable[Batch]) -> None:
    for batch in batches:
        try:
            batch.on_done(batch)
        except Exception:
            log.exception("on_done of batch %d failed", batch.id)


def _shut_down(core: Any, running: dict[int, Batch], thread: threading.Thread) -> None:
    """Stop an engine that nobody closed, before the interpreter ends under its thread."""
    if not core.close(_EXIT_GRACE):
        _held_by_kernel.append(running)
        core.abandon()
    _join(thread, _JOIN_GRACE)


def _join(thread: threading.Thread, timeout: float) -> None:
    if thread is not threading.current_thread():
        thread.join(timeout)
