"""Watcher: what other processes do in a directory that is shared with them."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.store.paths import DiskPath

_log = logging.getLogger(__name__)
_EVERY = 0.25
"""Seconds between two looks: what others write is found within a second."""


class Watcher:
    """A thread of its own, since a look hangs where the device does."""

    def __init__(self, path: DiskPath, forget: Callable[[list[bytes]], None]) -> None:
        """`forget` is called, without the store's lock, with keys that others deleted."""
        self._path = path
        self._forget = forget
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-watch", daemon=True)
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """End the thread; False if that takes longer than `timeout` seconds."""
        self._stopping.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.wait(_EVERY):
            try:
                deleted = self._path.tier.poll()
                if deleted:
                    self._forget(deleted)
            except OSError as error:
                self._path.complain(f"cannot see what other processes do: {error}")
            except Exception:
                _log.exception("a look at what other processes do failed")
