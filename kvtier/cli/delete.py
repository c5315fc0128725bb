"""`kvtier delete PATH`: forget all that a tenant or a namespace has in a store."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  the command line reads the types
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console

from kvtier.config import PAGE, StoreConfig, page_up
from kvtier.errors import InvalidRequest
from kvtier.store.store import Store
from kvtier.tiers.files import inspection as files
from kvtier.tiers.slab import inspection

if TYPE_CHECKING:
    from kvtier.owner import OwnerName


def delete(
    path: Path,
    *,
    tenant: Annotated[str | None, Parameter(help="Name of the tenant.")] = None,
    namespace: Annotated[
        str | None, Parameter(help="Public name of the namespace as inspect shows it, or its head.")
    ] = None,
) -> None:
    """Delete every chunk of a tenant, of a namespace, or of a tenant within a namespace.

    A store of kind "slab" must not be in use. One of several paths is a store of its own here: name each
    in turn.

    Parameters
    ----------
    path
        The store's directory.
    """
    if tenant is None and namespace is None:
        raise InvalidRequest("delete got neither --tenant nor --namespace, needs one of them, or both")
    owners, config = _look(path)
    if namespace:
        namespace = _whole(namespace, {owner.namespace.hex() for owner in owners.values()})
    with Store(config) as store:
        count = store.delete_all(tenant=tenant, namespace=namespace).result()
        synced = store.flush().result().synced
    Console().print(f"{count} chunks deleted" + ("" if synced else ", not yet confirmed by the device"))


def _look(path: Path) -> tuple[dict[int, OwnerName], StoreConfig]:
    """The owners that a store names, by id, and the settings that open it as it is."""
    if files.is_of_files(path):
        there = files.inspect(path)
        largest = page_up(max((file.payload_bytes for file in there.chunks), default=PAGE))
        return there.owners, StoreConfig(
            paths=(path,), kind="files", dram=0, landing=largest, chunk_bytes=largest,
            part_bytes=there.part_bytes,
        )  # fmt: skip
    found = inspection.inspect(path)
    slot = found.header.chunk_bytes
    return found.recovered.owners, StoreConfig(paths=(path,), dram=0, landing=slot, chunk_bytes=slot)


def _whole(head: str, names: set[str]) -> str:
    """The one public name that begins with `head`; raises InvalidRequest if it is not one."""
    matching = sorted(name for name in names if name and name.startswith(head.lower()))
    if len(matching) != 1:
        raise InvalidRequest(
            f"namespace is {head!r}, with which {len(matching) or 'no'} names in this store begin: give the "
            "64 hex digits that `kvtier inspect --json` shows"
        )
    return matching[0]
