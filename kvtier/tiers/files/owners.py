"""OwnerFiles: the names of owners in a directory that processes share, for quotas, reports and deletion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.owner import NOBODY

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable

    from kvtier.index.cache import SlotCache
    from kvtier.tiers.files.directory import Directory

_MANY = 1024
"""New names after which those that no chunk needs any more are looked for."""


class OwnerFiles:
    """Keeps what a store knows of owners and what its directory does in agreement.

    Everything raises OSError. `lock` is the store's, and taken for memory only.
    """

    def __init__(self, directory: Directory, index: SlotCache, lock: threading.Lock) -> None:
        self._directory = directory
        self._index = index
        self._lock = lock
        self._cleaned_at = 0

    def learn(self, owners: Iterable[int]) -> None:
        """Take in the names of these ids, as far as they are new here and the directory has them."""
        with self._lock:
            new = set(owners) - self._index.holdings.owners.names.keys() - {NOBODY}
        if not new:
            return
        names = self._directory.list_owners()
        with self._lock:
            self._index.holdings.owners.recover({owner: names[owner] for owner in new & names.keys()})

    def note(self, owners: Iterable[int]) -> None:
        """Have the directory know these, before it has chunks of them. Called in a section of the ledger."""
        with self._lock:
            names = self._index.holdings.owners.names
            noted = [names[owner] for owner in set(owners) if owner in names]
        for name in noted:
            self._directory.note_owner(name)

    def clean(self, *, at_once: bool = False) -> None:
        """Have the directory forget who has no chunk in it, now and then, or at once. Called in a section."""
        if not at_once and not self.is_due:
            return
        self._cleaned_at = self._directory.owners_noted
        names = self._directory.list_owners()
        with self._lock:
            unused = names.keys() - self._index.holdings.by_owner.keys()
        self._directory.forget_owners(names[owner] for owner in unused)

    @property
    def is_due(self) -> bool:
        """Whether `clean` would do something."""
        return self._directory.owners_noted >= self._cleaned_at + _MANY
