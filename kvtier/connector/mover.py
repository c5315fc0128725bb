"""Who copies between blocks and slots: the connector's thread, or the one that waits."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from kvtier.types import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.connector.operation import Operation

_log = logging.getLogger(__name__)


class Mover:
    """One thread that runs calls, urgent ones before the others, each kind in order.

    Nothing here takes a lock to submit: the collector may do so, anywhere.
    """

    def __init__(self, name: str) -> None:
        """Raises RuntimeError if a thread cannot be had."""
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()  # one for each call
        self._urgent: deque[Callable[[], object]] = deque()
        self._others: deque[Callable[[], object]] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], object], *, urgent: bool = False) -> None:
        """Run `call` after those of its kind that were submitted before."""
        (self._urgent if urgent else self._others).append(call)
        self._tokens.put(None)

    def stop(self) -> None:
        """Have the thread end after what was submitted."""
        self._stopping = True
        self._tokens.put(None)

    def join(self, timeout: float) -> bool:
        """Wait for the thread's end, at most `timeout` seconds; whether it came."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            call = self._next()
            if call is None:
                return
            try:
                call()
            except Exception:
                _log.exception("a call on the thread %s failed", self._thread.name)
            del call

    def _next(self) -> Callable[[], object] | None:
        while True:
            self._tokens.get()
            for calls in (self._urgent, self._others):
                if calls:
                    return calls.popleft()
            if self._stopping:
                return None


class Inline:
    """In place of a mover: runs the calls of one operation on the thread that waits for it."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._is_over = False

    def submit(self, call: Callable[[], object], *, urgent: bool = False) -> None:
        """Have `run` make that call."""
        self._calls.put(call)

    def begin(self, operation: Operation) -> None:
        """Begin with it; `work` goes on."""
        operation.transfer.add_done_callback(lambda _: self._calls.put(None))
        operation.settle()  # if there is nothing to do
        operation.run()

    def work(self, is_enough: Callable[[], bool]) -> None:
        """Make calls until that is so, or all is done."""
        while not (self._is_over or is_enough()):
            call = self._calls.get()
            if call is None:
                self._is_over = True
            else:
                call()

    def run(self, operation: Operation) -> Any:
        """Do all of it; what its transfer resolves to."""
        try:
            self.begin(operation)
            self.work(lambda: False)
        finally:
            operation.stop(Reason.CANCELLED)
        return operation.transfer.result()
