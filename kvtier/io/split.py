"""Reads and writes on engines of their own, so that no read waits behind queued writes."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from kvtier.io.base import Batch, IOEngine

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)


class SplitEngine(IOEngine):
    """Two engines of one kind; the one for writes is made when the first write comes.

    A batch holds either reads or writes.
    """

    def __init__(self, make: Callable[[], IOEngine]) -> None:
        """Raises what `make` raises."""
        self._make = make
        self._reads = make()
        self._writes: IOEngine | None = None
        self._making = threading.Lock()
        self.name = self._reads.name

    def submit(self, batch: Batch) -> None:
        """Start every operation on the engine for its kind; see IOEngine.submit."""
        is_write = len(batch.ops) > 0 and bool(batch.ops[0]["write"])
        (self._for_writes() if is_write else self._reads).submit(batch)

    def register(self, address: int, nbytes: int) -> bool:
        """Register memory for reads; see IOEngine.register."""
        return self._reads.register(address, nbytes)

    def close(self, timeout: float) -> bool:
        """Close both; see IOEngine.close."""
        end = time.monotonic() + timeout
        drained = self._reads.close(timeout)
        with self._making:
            writes = self._writes
        if writes is not None and writes is not self._reads:
            drained = writes.close(max(0.0, end - time.monotonic())) and drained
        return drained

    def _for_writes(self) -> IOEngine:
        with self._making:
            if self._writes is None:
                try:
                    self._writes = self._make()
                except Exception as error:
                    _log.warning("no second I/O engine for writes (%s): they share one with reads", error)
                    self._writes = self._reads
            return self._writes
