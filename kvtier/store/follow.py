"""Follower: what has become stored and what is gone, for those who keep a picture of a store elsewhere."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self

from kvtier.errors import StoreClosed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from kvtier.index.cache import SlotCache
    from kvtier.store.core import Core
    from kvtier.types import ChunkKey

_ROWS = 1 << 14
"""Rows that are looked at while the store's lock is held: less than a millisecond."""


@dataclass(frozen=True, slots=True)
class KeyChanges:
    """What a follower is told. No key is in both, or twice; the order means nothing."""

    added: list[ChunkKey]
    """Keys that became stored: a get finds them, in whatever tier."""
    removed: list[ChunkKey]
    """Keys that no tier has any more: evicted, deleted, over, or found unreadable."""

    def __bool__(self) -> bool:
        return bool(self.added or self.removed)


class Followers:
    """All that follow a store. The store's lock guards it; while there are none, indexes tell nothing."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._changes: list[Changes] = []

    def add(self, changes: Changes) -> None:
        """Tell `changes` of every change from now on."""
        self._changes.append(changes)
        indexes = [tier.index for tier in self._core.tiers]
        for index in indexes:
            others = [other for other in indexes if other is not index]
            index.on_change = partial(self._note, others)

    def remove(self, changes: Changes) -> None:
        """Tell it no more. Idempotent."""
        self._changes = [other for other in self._changes if other is not changes]
        if not self._changes:
            for tier in self._core.tiers:
                tier.index.on_change = None

    def _note(self, others: list[SlotCache], key: ChunkKey, is_there: bool) -> None:
        is_elsewhere = any(other.has(key) for other in others)
        for changes in self._changes:
            changes.note(key, is_there or is_elsewhere, is_elsewhere)


class Changes:
    """What has become of keys since somebody was told. The store's lock guards it."""

    def __init__(self) -> None:
        self.is_listing = True
        """Whether what is stored is still being listed: then every key that changes counts, since the list
        may have it or not."""
        self._by_key: dict[ChunkKey, bool] = {}

    def note(self, key: ChunkKey, is_stored: bool, is_elsewhere: bool) -> None:
        """Note that a key came into a tier, or left one. `is_elsewhere`: others have it."""
        if not self.is_listing and (is_elsewhere or self._by_key.pop(key, None) is not None):
            return  # nothing has changed, or it is again as was told
        self._by_key[key] = is_stored

    def take(self) -> dict[ChunkKey, bool]:
        """By key whether it is stored now; then begin anew."""
        taken, self._by_key, self.is_listing = self._by_key, {}, False
        return taken


class Follower:
    """Tells what has become stored in a store and what is gone, whoever did it: `Store.follow` makes it.

        with store.follow() as follower:
            while True:
                changes = follower.take()
                picture.difference_update(changes.removed)
                picture.update(changes.added)

    The picture is what `Store.match` finds, but for one thing: chunks on a path that is out for a while,
    for its device fails or hangs, stay in it. Only a get can tell whether that works again.

    Changes are kept by key, from the first `take` on, and those that undo each other not at all: never
    more than there are keys in the store and in the picture. Thread-safe; a context manager.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._changes: Changes | None = None
        self._closed = False

    def take(self) -> KeyChanges:
        """What has changed since the last call; at the first one every key that is stored. No I/O.

        Raises StoreClosed once the follower or its store is closed, and in a forked child.
        """
        self._check_open()
        with self._lock:
            self._check_open()
            self._core.sweeper.finish()  # what is over was told as stored
            if self._changes is None:
                return self._take_all()
            with self._core.lock:
                taken = self._changes.take()
        added = [key for key, is_stored in taken.items() if is_stored]
        return KeyChanges(added, [key for key, is_stored in taken.items() if not is_stored])

    def _take_all(self) -> KeyChanges:
        """In pieces, since others wait for the store's lock; what changes meanwhile is noted."""
        core = self._core
        changes = Changes()
        with core.lock:
            core.check_open()
            core.followers.add(changes)
        try:
            stored = dict.fromkeys(self._list(), True)
        except BaseException:  # Ctrl-C: the next call begins anew
            _forget(core, changes)
            raise
        with core.lock:
            self._changes = changes
            stored.update(changes.take())
        return KeyChanges([key for key, is_stored in stored.items() if is_stored], [])

    def _list(self) -> Iterator[ChunkKey]:
        core = self._core
        for tier in core.tiers:
            start, rows = 0, 1
            while start < rows:
                with core.lock:
                    rows = tier.index.rows
                    keys = tier.index.keys(start, start + _ROWS)
                yield from keys.tolist()
                start += _ROWS

    def close(self) -> None:
        """Stop following. Idempotent."""
        if self._closed or self._owner != os.getpid():
            return
        self._closed = True
        with self._lock:
            if self._changes is not None:
                _forget(self._core, self._changes)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # The collector may run anywhere, even under the store's lock: leave it to another thread.
        if not self._closed and self._changes is not None and self._owner == os.getpid():
            self._core.copier.submit(partial(_forget, self._core, self._changes))

    def _check_open(self) -> None:
        with self._core.lock:
            self._core.check_open()
        if self._closed:
            raise StoreClosed("the follower is closed: call Store.follow for a new one")


def _forget(core: Core, changes: Changes) -> None:
    with core.lock:
        core.followers.remove(changes)
