"""Transfer: a started operation, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

T = TypeVar("T")


_WORTH_HELPING = 1.0
"""Seconds: whoever waits for less is not to be kept by a copy."""


class Transfer(Generic[T]):
    """A started operation: `transfer.result()` in a thread, `await transfer` in asyncio, or both.

    The operation borrows the caller's buffers: a put until `copied`, a get until `released`. Both
    come no later than the result, except for a loan (`get(lend=True)`) that misses its deadline:
    then `released` comes when the kernel is done with the memory.
    """

    def __init__(self) -> None:
        self._future: Future[T] = Future()
        self._copied = threading.Event()
        self._released = threading.Event()
        self._on_cancel: Callable[[], bool] | None = None
        self._help: Callable[[], None] | None = None
        """Work of the store's that whoever waits may do himself, instead of waking a thread for it."""

    def result(self, timeout: float | None = None) -> T:
        """Wait for the outcome, at most `timeout` seconds.

        Raises TimeoutError if it is still running then, and StoreClosed if the store is closed first.
        """
        if (help_out := self._help) is not None and (timeout is None or timeout >= _WORTH_HELPING):
            help_out()
        return self._future.result(timeout)

    def __await__(self) -> Generator[Any, None, T]:
        # Shielded: a cancelled task stops waiting, the operation goes on.
        return asyncio.shield(asyncio.wrap_future(self._future)).__await__()

    def done(self) -> bool:
        """Whether the outcome is there."""
        return self._future.done()

    def cancel(self) -> bool:
        """Drop what has not reached a device yet; True if that was anything.

        Dropped keys come out as FAILED with the reason `cancelled`.
        """
        return self._on_cancel is not None and not self.done() and self._on_cancel()

    def add_done_callback(self, call: Callable[[Transfer[T]], object]) -> None:
        """Have `call(self)` run once the outcome is there, on a thread of the store: be brief."""
        self._future.add_done_callback(lambda _: call(self))

    @property
    def copied(self) -> bool:
        """Whether a put is done with its source."""
        return self._copied.is_set()

    def wait_copied(self, timeout: float | None = None) -> bool:
        """Wait until the source of a put may be changed or freed; False if it timed out."""
        return self._copied.wait(timeout)

    @property
    def released(self) -> bool:
        """Whether nothing will write to the targets of a get any more."""
        return self._released.is_set()

    def wait_released(self, timeout: float | None = None) -> bool:
        """Wait until the targets of a get are the caller's own again; False if it timed out."""
        return self._released.wait(timeout)

    def _set_copied(self) -> None:
        self._copied.set()

    def _set_released(self) -> None:
        self._released.set()

    def _finish(self, outcome: T) -> None:
        self._copied.set()
        self._on_cancel = self._help = None  # they refer to the request, and that to this
        self._future.set_result(outcome)

    def _finish_once(self, outcome: T) -> None:
        """As `_finish`, by whoever comes first."""
        with contextlib.suppress(InvalidStateError):
            self._finish(outcome)

    def _fail(self, error: Exception) -> None:
        self._copied.set()
        self._released.set()
        self._on_cancel = self._help = None
        self._future.set_exception(error)
