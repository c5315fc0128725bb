"""Owners: the names behind the ids in the indexes of one store, and which tenants have a quota."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.owner import NOBODY, OwnerName

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvtier.index.cache import SlotCache

_FEW = 1024  # names that are not worth clearing out


class Owners:
    """Shared by all indexes of a store, and guarded by its lock."""

    def __init__(self, limited: Iterable[str] = ()) -> None:
        """`limited` are the tenants that have a quota."""
        self.names: dict[int, OwnerName] = {}
        self.tenants: dict[int, str] = {}
        """The tenant of each id, of those that have a quota."""
        self._limited = frozenset(limited)
        self._indexes: list[SlotCache] = []
        self._most = _FEW

    def join(self, index: SlotCache) -> None:
        """Have an index follow what is learned here."""
        self._indexes.append(index)

    def learn(self, name: OwnerName) -> int:
        """Note the name behind an id, which is returned. It stays while any index has a chunk of it."""
        owner = name.id
        if owner != NOBODY and owner not in self.names:
            self._forget_unused()
            self._add(owner, name)
        return owner

    def recover(self, names: Mapping[int, OwnerName]) -> None:
        """Note the names by id of what an index is going to be loaded with."""
        for owner in names.keys() - self.names.keys():
            self._add(owner, names[owner])
        self._most = max(self._most, 2 * len(self.names))

    def _add(self, owner: int, name: OwnerName) -> None:
        self.names[owner] = name
        if name.tenant in self._limited:
            idle = [index.leave_lists(owner) for index in self._indexes]
            self.tenants[owner] = name.tenant
            for index, rows in zip(self._indexes, idle, strict=True):
                index.join_lists(owner, rows)

    def matching(self, namespace: bytes | None, tenant: str | None) -> set[int]:
        """Ids of the owners of that namespace, by its public name, and that tenant; None is any."""
        found = {
            owner
            for owner, name in self.names.items()
            if namespace in (None, name.namespace) and tenant in (None, name.tenant)
        }
        # Known without its name, too: a journal may have lost that.
        return found | {OwnerName(namespace or b"", tenant or "").id} - {NOBODY}

    def _forget_unused(self) -> None:
        """Drop names that no index needs, so that clients who change theirs all the time cost nothing."""
        if len(self.names) < self._most:
            return
        used = set().union(*(index.holdings.by_owner for index in self._indexes))
        self.names = {owner: name for owner, name in self.names.items() if owner in used}
        for owner in self.tenants.keys() - used:
            del self.tenants[owner]
        self._most = max(_FEW, 2 * len(self.names))


class Holdings:
    """What owners hold of the slots of one index, and how much their tenants may. Sizes in bytes."""

    def __init__(self, owners: Owners, limits: Mapping[str, int]) -> None:
        self.owners = owners
        self.limits = dict(limits)
        """Most bytes of slots by tenant."""
        self.by_owner: dict[int, int] = {}
        """Bytes of slots, reserved ones included; nobody's are not counted."""
        self.by_tenant = dict.fromkeys(limits, 0)
        """The same by tenant, of those that have a limit."""

    def charge(self, owner: int, nbytes: int) -> None:
        """Count slots that an owner takes, or gives back."""
        if owner == NOBODY:
            return
        held = self.by_owner.get(owner, 0) + nbytes
        if held:
            self.by_owner[owner] = held
        else:
            del self.by_owner[owner]
        if tenant := self.tenant_of(owner):
            self.by_tenant[tenant] += nbytes

    def tenant_of(self, owner: int) -> str:
        """The tenant whose limit counts for an owner here; empty if none does."""
        return self.owners.tenants.get(owner, "") if self.limits else ""

    def limit(self, owner: int) -> int | None:
        """Most bytes that the owner's tenant may have; None: all there are."""
        return self.limits.get(self.tenant_of(owner))

    def is_over(self, owner: int, nbytes: int) -> bool:
        """Whether `nbytes` more would take the owner's tenant above its limit."""
        tenant = self.tenant_of(owner)
        return tenant != "" and self.by_tenant[tenant] + nbytes > self.limits[tenant]

    def join(self, owner: int) -> None:
        """Count for a tenant what an owner holds, now that it is known to be the tenant's."""
        if tenant := self.tenant_of(owner):
            self.by_tenant[tenant] += self.by_owner.get(owner, 0)
