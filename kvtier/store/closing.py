"""Closing: the end of a store, which may come from its owner, the collector, or the interpreter."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.store.core import Core
    from kvtier.store.reads import Reader
    from kvtier.store.store import Store
    from kvtier.store.writes import Writer


class Closing:
    """Closes a store once, for whoever comes first: its owner, the collector, or the interpreter's end."""

    def __init__(self, core: Core, reader: Reader, writer: Writer) -> None:
        self._core = core
        self._reader = reader
        self._writer = writer
        self._lock = threading.Lock()

    def __call__(self) -> None:
        """Close, or wait for whoever is doing it."""
        with self._lock:
            self._close()

    def forget_after_fork(self) -> None:
        """In a forked child: whoever was closing is not here."""
        self._lock = threading.Lock()

    def unless_begun(self) -> None:
        """Close if nobody has begun to: for the copier, whose end the others wait for."""
        if self._lock.acquire(blocking=False):
            try:
                self._close()
            finally:
                self._lock.release()

    def _close(self) -> None:
        core = self._core
        with core.lock:
            if core.closed:
                return
            core.closed = True
        timeout = min(core.config.close_timeout, threading.TIMEOUT_MAX)
        end = time.monotonic() + timeout
        self._reader.fail_waiting()
        self._writer.stop(timeout)
        core.stop(max(0.1, end - time.monotonic()))
        self._reader.give_up()
        self._writer.give_up()
        _unfinished.discard(self)


_open_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_unfinished: set[Closing] = set()  # of stores that are open, or were dropped and are not closed yet
_hooked = False


def remember(store: Store) -> None:
    """Have forked children close their copy of the store, and the interpreter's end close this one."""
    global _hooked
    _open_stores.add(store)
    _unfinished.add(store._close)
    if not _hooked:
        os.register_at_fork(after_in_child=_close_in_child)
        atexit.register(_close_at_exit)
        _hooked = True


def _close_at_exit() -> None:
    for close in list(_unfinished):
        close()


def _close_in_child() -> None:
    _unfinished.clear()
    for store in list(_open_stores):
        store._finalizer.detach()
        store._close.forget_after_fork()
        store._core.forget_after_fork()
        store._reader.forget_after_fork()
