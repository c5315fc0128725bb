"""One store per process: whoever asks for the same settings gets the same store."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from kvtier.errors import InvalidRequest, StoreClosed
from kvtier.settings import load
from kvtier.store.store import Store

if TYPE_CHECKING:
    from types import TracebackType

    from kvtier.config import StoreConfig
    from kvtier.settings import Source


@dataclass(slots=True, eq=False)
class _Entry:
    store: Store
    users: int = 0


_entries: list[_Entry] = []
_lock = threading.Lock()
_hooked = False


class SharedStore:
    """One user's hold on a store: a context manager that gives it, or `store` and `close`.

    The last one to close it closes the store: close connectors first.
    """

    def __init__(self, entry: _Entry) -> None:
        self.store = entry.store
        """The store, for all who share it."""
        self._entry: _Entry | None = entry

    def close(self) -> None:
        """Give it back. Idempotent."""
        with _lock:
            entry, self._entry = self._entry, None
            if entry is None:
                return
            entry.users -= 1
            if entry.users:
                return
            _entries.remove(entry)
            # Under the lock: who opens the same directory now must find it free.
            entry.store.close()

    def __enter__(self) -> Store:
        return self.store

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def shared_store(source: Source = None, **settings: Any) -> SharedStore:
    """As `kvtier.open`, except that a store with the same settings that is open in this process is shared.

    Raises InvalidRequest if one of its directories is open here with other settings, and what
    `kvtier.open` raises.
    """
    config = load(source, settings)
    with _lock:
        _hook()
        open_here = [entry for entry in _entries if not _is_closed(entry.store)]
        entry = next((entry for entry in open_here if entry.store.config == config), None)
        if entry is None:
            _check_apart(config, [entry.store.config for entry in open_here])
            entry = _Entry(Store(config))
            _entries.append(entry)
        entry.users += 1
        return SharedStore(entry)


def _is_closed(store: Store) -> bool:
    try:
        store.match([])
    except StoreClosed:
        return True
    return False


def _check_apart(config: StoreConfig, others: list[StoreConfig]) -> None:
    ours = {path.resolve() for path in config.paths}
    for other in others:
        if shared := ours & {path.resolve() for path in other.paths}:
            names = [f.name for f in fields(config) if getattr(config, f.name) != getattr(other, f.name)]
            names = [name for name in names if name != "paths"] or names
            raise InvalidRequest(
                f"{next(iter(shared))} is open in this process with other settings ({', '.join(names)}): "
                "use the same everywhere"
            )


def _hook() -> None:
    """Have a forked child begin with nothing: its parent's stores are closed there."""
    global _hooked
    if not _hooked:
        os.register_at_fork(after_in_child=_forget)
        _hooked = True


def _forget() -> None:
    global _lock
    _lock = threading.Lock()
    _entries.clear()
