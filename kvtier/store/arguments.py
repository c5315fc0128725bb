"""What callers hand to a store, checked at the door."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier.errors import InvalidRequest
from kvtier.owner import Owner
from kvtier.types import KEY_BYTES

if TYPE_CHECKING:
    from kvtier.buffers import Buffers
    from kvtier.types import ChunkKey


def checked_keys(keys: Sequence[ChunkKey]) -> tuple[ChunkKey, ...]:
    """The keys, apart from the caller's container, which it may change while a transfer runs."""
    if not isinstance(keys, Sequence) or isinstance(keys, bytes | bytearray | memoryview | str):
        raise InvalidRequest(f"keys is {type(keys).__name__}, needs a sequence of {KEY_BYTES}-byte keys")
    keys = tuple(keys)
    for i, key in enumerate(keys):
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            got = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            raise InvalidRequest(f"keys[{i}] is {got}, needs {KEY_BYTES} bytes: see kvtier.chunk_keys")
    return keys


def kept(buffers: Buffers) -> object:
    """What keeps the buffers alive, whatever becomes of a list that holds them."""
    return tuple(buffers) if isinstance(buffers, Sequence) else buffers


def check_count(keys: Sequence[bytes], buffers: Buffers, name: str) -> None:
    """Raises InvalidRequest unless there is a buffer for each key."""
    scalar = getattr(buffers, "ndim", 1) == 0
    if scalar or isinstance(buffers, bytes | bytearray | memoryview) or not hasattr(buffers, "__len__"):
        raise InvalidRequest(f"{name} is {type(buffers).__name__}, needs a sequence with a buffer per key")
    if len(buffers) != len(keys):
        flat = getattr(buffers, "ndim", 2) == 1
        hint = "; a flat array is one buffer per element: give it a row per key" if flat else ""
        raise InvalidRequest(
            f"{name} has {len(buffers)} buffers, needs one for each of the {len(keys)} keys{hint}"
        )


def check_apart(addresses: list[int], lengths: list[int]) -> None:
    """Raises InvalidRequest if targets of a get overlap."""
    end = previous = -1
    for address, nbytes, i in sorted(zip(addresses, lengths, range(len(addresses)), strict=True)):
        if address < end:
            raise InvalidRequest(f"into[{i}] overlaps into[{previous}], needs memory of its own for each key")
        end, previous = address + nbytes, i


def check_owner(owner: Owner | None) -> Owner:
    """The owner to note, that of nobody unless given. Raises InvalidRequest for anything else."""
    if owner is None:
        return Owner()
    if not isinstance(owner, Owner):
        raise InvalidRequest(f"owner is {type(owner).__name__}, needs a kvtier.Owner")
    return owner


def check_timeout(timeout: float | None, default: float) -> float:
    """Seconds, `default` unless given. Raises InvalidRequest for what is no time."""
    if timeout is None:
        return default
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise InvalidRequest(f"timeout is {timeout!r}, needs seconds above 0, or None for the default")
    return float(timeout)
