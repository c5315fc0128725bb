"""Owners: the namespace and the tenant that a chunk belongs to."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from kvtier.errors import InvalidRequest
from kvtier.types import KEY_BYTES

MAX_TENANT_BYTES = 40
NOBODY = 0
"""The id of no owner at all."""


@dataclass(frozen=True, slots=True)
class OwnerName:
    """What may be told of an owner: on disk, to operators, in logs."""

    namespace: bytes = b""
    """Digest of the namespace, 32 bytes, or empty. Unlike the namespace itself it makes no keys."""
    tenant: str = ""

    @property
    def id(self) -> int:
        """64 bits that name the owner in every index and record: the same everywhere, 0 for nobody."""
        if not self.namespace and not self.tenant:
            return NOBODY
        digest = hashlib.sha256(self.namespace.rjust(KEY_BYTES, b"\0") + self.tenant.encode()).digest()
        return int.from_bytes(digest[:8], "little") or 1


@dataclass(frozen=True, slots=True)
class Owner:
    """Whom chunks belong to: quotas, deletion and reports go by it, keys do not.

    Raises InvalidRequest at construction for a namespace that is not 32 bytes, or a tenant's name of
    more than 40 bytes of UTF-8.
    """

    namespace: bytes = field(default=b"", repr=False)
    """`Namespace.digest()`, or empty. It makes keys, so it is never stored or shown."""
    tenant: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.namespace, bytes) or len(self.namespace) not in (0, KEY_BYTES):
            got = (
                f"{len(self.namespace)} bytes"
                if isinstance(self.namespace, bytes)
                else type(self.namespace).__name__
            )
            raise InvalidRequest(f"namespace is {got}, needs the 32 bytes of Namespace.digest(), or none")
        check_tenant(self.tenant)

    @property
    def name(self) -> OwnerName:
        """The owner as others may see it."""
        return OwnerName(namespace_name(self.namespace), self.tenant)

    @property
    def id(self) -> int:
        """The id of `name`."""
        return self.name.id


def namespace_name(namespace: bytes) -> bytes:
    """The 32 bytes that a namespace is known by: whoever has them cannot make its keys."""
    return hashlib.sha256(b"kvtier namespace" + namespace).digest() if namespace else b""


def public_name(namespace: object) -> bytes:
    """The name of a namespace that is given by its digest, as bytes, or by that name, in hex digits.

    Raises InvalidRequest for what is neither.
    """
    if isinstance(namespace, str) and len(namespace) in (0, 2 * KEY_BYTES):
        try:
            return bytes.fromhex(namespace)
        except ValueError:
            pass
    if isinstance(namespace, bytes) and len(namespace) in (0, KEY_BYTES):
        return namespace_name(namespace)
    raise InvalidRequest(
        f"namespace is {namespace!r}, needs the 32 bytes of Namespace.digest(), or the 64 hex digits of its "
        "public name"
    )


def check_tenant(name: object) -> None:
    """Raise InvalidRequest for what cannot be a tenant's name."""
    if not isinstance(name, str):
        raise InvalidRequest(f"tenant is {type(name).__name__}, needs a string")
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"tenant is {name!r}, needs a name that UTF-8 can spell") from None
    if nbytes > MAX_TENANT_BYTES or "\0" in name:
        raise InvalidRequest(
            f"tenant is {name!r} of {nbytes} bytes, needs at most {MAX_TENANT_BYTES} of UTF-8, and no NUL"
        )
