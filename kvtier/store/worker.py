"""One thread that runs calls in order."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)


class Worker:
    """One thread that runs calls in order."""

    def __init__(self, name: str) -> None:
        """Raises RuntimeError if a thread cannot be had."""
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], object]) -> None:
        """Run `call` after those submitted before."""
        self._calls.put(call)

    def stop(self, timeout: float | None = None) -> bool:
        """Run what was submitted, then end the thread; False if that takes longer than `timeout` seconds."""
        self._calls.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return self._thread is threading.current_thread() or not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:
                _log.exception("a call on the thread %s failed", self._thread.name)
            del call
