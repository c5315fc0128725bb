"""The format of a directory of kind `files`: names of chunks, the ledger's header, and its events. Pure.

docs/FORMAT.md describes it; the two change together, and with FILES_VERSION and SUFFIX.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from kvtier.config import MIB, PAGE, page_up
from kvtier.errors import IncompatibleStore
from kvtier.hashing import part_seed
from kvtier.owner import NOBODY, OwnerName
from kvtier.types import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

FILES_VERSION = 1
LEDGER_MAGIC = b"KVTLEDG\0"
SUFFIX = ".kv1"
PUT, EVICT, DELETE = 1, 2, 3

LEDGER_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("part_bytes", "<u4"),
        ("directory_id", "V16"),  # random, of this ledger
        ("capacity", "<u8"),  # bytes that all files together may take
        ("used", "<u8"),  # bytes that they take, the ledger included
        ("events", "<u8"),  # how many events there ever were
        ("ring", "<u4"),  # how many of the last ones are kept
        ("dirty", "<u4"),  # 1 while files are changed: if nobody holds the lock, `used` may be wrong
        ("unused", "V56"),
        ("check", "<u8"),  # xxh3_64 of the 120 bytes before
    ]
)
EVENT = np.dtype(
    [
        ("check", "<u8"),  # xxh3_64 of the 72 bytes behind, seeded with directory_id and event number
        ("mtime", "<u8"),  # of a file that was put, in nanoseconds
        ("digest", "<u8"),
        ("payload_bytes", "<u4"),
        ("stored_bytes", "<u4"),
        ("owner", "<u8"),  # names namespace and tenant; 0: nobody
        ("expires_at", "<u4"),  # seconds since 1970; 0: never
        ("kind", "u1"),
        ("codec", "u1"),
        ("unused", "V2"),
        ("key", f"V{KEY_BYTES}"),
    ]
)
HEADER_BYTES, EVENT_BYTES = LEDGER_HEADER.itemsize, EVENT.itemsize
assert (HEADER_BYTES, EVENT_BYTES) == (128, 80)


class ChunkFile(NamedTuple):
    """What the name of a file says of the chunk in it. Sizes in bytes."""

    key: bytes
    payload_bytes: int
    stored_bytes: int
    """The size of the file: whole pages."""
    codec: int
    owner: int
    """Names namespace and tenant; 0: nobody."""
    expires_at: int
    """Seconds since 1970; 0: never."""
    digest: int
    """Of the checksums of its parts, its key and the numbers above."""

    def name(self, part_bytes: int) -> str:
        """The file's name."""
        shift = part_bytes.bit_length() - 1
        return (
            f"{self.key.hex()}.{self.payload_bytes:08x}.{self.stored_bytes:08x}.{self.codec:02x}."
            f"{self.owner:016x}.{self.expires_at:08x}.{shift:02x}.{self.digest:016x}{SUFFIX}"
        )


_NAME = re.compile(
    r"([0-9a-f]{64})\.([0-9a-f]{8})\.([0-9a-f]{8})\.([0-9a-f]{2})\."
    r"([0-9a-f]{16})\.([0-9a-f]{8})\.([0-9a-f]{2})\.([0-9a-f]{16})" + re.escape(SUFFIX)
)


def parse_name(name: str) -> tuple[ChunkFile, int] | None:
    """What a name says, and the bytes per checksum; None if it is not a chunk's."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    payload, stored, codec, owner, expires_at, shift, digest = (int(text, 16) for text in match.groups()[1:])
    file = ChunkFile(bytes.fromhex(match[1]), payload, stored, codec, owner, expires_at, digest)
    return (file, 1 << shift) if is_possible(file) and PAGE <= 1 << shift <= MIB else None


def owner_file(owner: OwnerName) -> str:
    """Name of the empty file that tells whose an owner's id is."""
    return f"{owner.id:016x}.{owner.namespace.hex()}.{owner.tenant.encode().hex()}{SUFFIX}"


_OWNER = re.compile(r"([0-9a-f]{16})\.((?:[0-9a-f]{64})?)\.((?:[0-9a-f]{2}){0,40})" + re.escape(SUFFIX))


def parse_owner(name: str) -> OwnerName | None:
    """The owner that such a file tells of; None if its name is not one."""
    match = _OWNER.fullmatch(name)
    if match is None:
        return None
    try:
        owner = OwnerName(bytes.fromhex(match[2]), bytes.fromhex(match[3]).decode())
    except UnicodeDecodeError:
        return None
    return owner if owner.id == int(match[1], 16) != NOBODY else None


def is_possible(file: ChunkFile) -> bool:
    """Whether sizes and codec go together."""
    raw = page_up(file.payload_bytes)
    stored = file.stored_bytes
    fits = stored == raw if file.codec == 0 else stored < raw
    return file.payload_bytes > 0 and stored > 0 and stored % PAGE == 0 and fits


def seed_of(key: bytes) -> int:
    """Checksum seed of a chunk's part 0: a file of this kind is the same in every directory."""
    return part_seed(key, 0, bytes(16))


def digest_of(
    key: bytes,
    payload_bytes: int,
    stored_bytes: int,
    codec: int,
    owner: int,
    expires_at: int,
    sums: npt.NDArray[np.uint64],
) -> int:
    """What binds the name of a file to what is in it."""
    numbers = np.array([payload_bytes, stored_bytes, codec, owner, expires_at], "<u8").tobytes()
    return xxhash.xxh3_64_intdigest(numbers + sums.astype("<u8").tobytes(), seed_of(key))


@dataclass(frozen=True, slots=True)
class LedgerHeader:
    """What the ledger says of the whole directory. Sizes in bytes."""

    part_bytes: int
    directory_id: bytes
    capacity: int
    used: int
    events: int
    ring: int
    dirty: bool = False

    def encode(self) -> bytes:
        """The 128 bytes on disk."""
        record = np.zeros((), LEDGER_HEADER)
        record["magic"], record["version"] = LEDGER_MAGIC, FILES_VERSION
        record["directory_id"] = np.void(self.directory_id)
        for name in ("part_bytes", "capacity", "used", "events", "ring", "dirty"):
            record[name] = getattr(self, name)
        body = record.tobytes()[: HEADER_BYTES - 8]
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")

    def updated(self, *, used: int, events: int, dirty: bool) -> LedgerHeader:
        """The header after a change."""
        return replace(self, used=used, events=events, dirty=dirty)


def decode_ledger(data: bytes, name: str) -> LedgerHeader | None:
    """The header in the first 128 bytes of the ledger called `name`; None if it is damaged.

    Raises IncompatibleStore for another format version. Magic, version and check keep their places.
    """
    if len(data) < HEADER_BYTES or data[:8] != LEDGER_MAGIC:
        return None
    record = np.frombuffer(data, LEDGER_HEADER, count=1)[0]
    if xxhash.xxh3_64_intdigest(data[: HEADER_BYTES - 8]) != int(record["check"]):
        return None
    if int(record["version"]) != FILES_VERSION:
        raise IncompatibleStore(
            f"{name} has format version {int(record['version'])}, this kvtier reads version "
            f"{FILES_VERSION}: open it with the kvtier that wrote it, choose another directory, or open "
            "with on_incompatible='discard' to empty it"
        )
    part, ring = int(record["part_bytes"]), int(record["ring"])
    if part & (part - 1) or not PAGE <= part <= MIB or not 0 < ring <= 1 << 20:
        return None
    return LedgerHeader(
        part_bytes=part,
        directory_id=record["directory_id"].tobytes(),
        capacity=int(record["capacity"]),
        used=int(record["used"]),
        events=int(record["events"]),
        ring=ring,
        dirty=bool(record["dirty"]),
    )


class Event(NamedTuple):
    """Something that a process did to a chunk's file."""

    kind: int
    file: ChunkFile
    mtime: int = 0


def encode_events(events: Sequence[Event], directory_id: bytes, first: int) -> list[bytes]:
    """Each event as its 80 bytes; `first` is the first one's number."""
    encoded = []
    for number, event in enumerate(events, first):
        record = np.zeros((), EVENT)
        record["kind"], record["mtime"] = event.kind, event.mtime
        record["key"] = np.void(event.file.key)
        for name in ("digest", "payload_bytes", "stored_bytes", "codec", "owner", "expires_at"):
            record[name] = getattr(event.file, name)
        body = record.tobytes()[8:]
        check = xxhash.xxh3_64_intdigest(body, _event_seed(directory_id, number))
        encoded.append(check.to_bytes(8, "little") + body)
    return encoded


def decode_events(data: bytes, directory_id: bytes, first: int) -> list[Event] | None:
    """The events joined in `data`, the first of them number `first`; None if one is not what it should be."""
    events = []
    for i, record in enumerate(np.frombuffer(data, EVENT)):
        body = data[i * EVENT_BYTES + 8 : (i + 1) * EVENT_BYTES]
        if xxhash.xxh3_64_intdigest(body, _event_seed(directory_id, first + i)) != int(record["check"]):
            return None
        file = ChunkFile(
            record["key"].tobytes(),
            int(record["payload_bytes"]),
            int(record["stored_bytes"]),
            int(record["codec"]),
            int(record["owner"]),
            int(record["expires_at"]),
            int(record["digest"]),
        )
        if record["kind"] not in (PUT, EVICT, DELETE) or not is_possible(file):
            return None
        events.append(Event(int(record["kind"]), file, int(record["mtime"])))
    return events


def _event_seed(directory_id: bytes, number: int) -> int:
    return (int.from_bytes(directory_id[:8], "little") + number) & (2**64 - 1)
