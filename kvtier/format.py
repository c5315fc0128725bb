"""The disk format, byte for byte: headers of slab and journal, and the journal's records.

docs/FORMAT.md describes it; the two change together, and with FORMAT_VERSION.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import xxhash

from kvtier.config import GIB, KIB, MIB, PAGE
from kvtier.errors import IncompatibleStore
from kvtier.owner import NOBODY, OwnerName
from kvtier.types import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

FORMAT_VERSION = 2
SLAB_MAGIC = b"KVTSLAB\0"
JOURNAL_MAGIC = b"KVTJRNL\0"
SLAB_HEADER_BYTES = 4096
JOURNAL_HEADER_BYTES = 2 * PAGE  # two copies of one header, in sectors of their own
RECORD_BYTES = 128
SUMS_PER_RECORD = 5
LIMIT = 1 << 62  # of generations and capacities: no store comes near it, in all its life

HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("part_bytes", "<u4"),
        ("slab_id", "V16"),  # random; the same in slab and journal
        ("journal_id", "<u8"),  # random per journal file, 0 in the slab
        ("capacity", "<u8"),  # bytes of the whole tier
        ("extent_bytes", "<u8"),
        ("chunk_bytes", "<u8"),  # what the extents were sized for
        ("next_generation", "<u8"),
        ("unused", "V48"),
        ("check", "<u8"),  # xxh3_64 of the 120 bytes before
    ]
)
PUT, TOMBSTONE, MORE, OWNER = 1, 2, 3, 4
RECORD = np.dtype(
    [
        ("check", "<u8"),  # xxh3_64 of the 120 bytes behind, seeded with journal_id + record number
        ("kind", "u1"),  # PUT, TOMBSTONE, MORE or OWNER
        ("codec", "u1"),  # 0: raw; see kvtier.codec
        ("parts", "<u2"),  # checksummed parts of the payload; in MORE: the number of its first sum
        ("payload_bytes", "<u4"),
        ("stored_bytes", "<u4"),  # in the slot, whole pages
        ("slot_bytes", "<u4"),  # slot size of the extent
        ("generation", "<u8"),  # of this use of the slot; ties MORE and TOMBSTONE to their PUT
        ("offset", "<u8"),  # of the slot in the extents' area, which starts behind the slab's header
        ("key", f"V{KEY_BYTES}"),  # in OWNER: the namespace's public name
        ("owner", "<u8"),  # names namespace and tenant; 0: nobody
        ("stored_at", "<u4"),  # seconds since 1970
        ("expires_at", "<u4"),  # the same; 0: never
        # xxh3_64 per part, the rest of them in MORE records; in OWNER: the tenant's name
        ("sums", "<u8", (SUMS_PER_RECORD,)),
    ]
)
assert HEADER.itemsize == RECORD.itemsize == RECORD_BYTES


@dataclass(frozen=True, slots=True)
class Header:
    """What slab and journal both say about the tier. Sizes in bytes."""

    part_bytes: int
    capacity: int
    extent_bytes: int
    chunk_bytes: int
    slab_id: bytes
    journal_id: int = 0
    next_generation: int = 1

    @classmethod
    def new(cls, *, part_bytes: int, capacity: int, extent_bytes: int, chunk_bytes: int) -> Self:
        """A header for a new tier, with an identity of its own."""
        return cls(part_bytes, capacity, extent_bytes, chunk_bytes, slab_id=os.urandom(16))

    def for_journal(self, next_generation: int) -> Header:
        """The header of a new journal file of the same tier."""
        return replace(
            self, journal_id=int.from_bytes(os.urandom(8), "little") | 1, next_generation=next_generation
        )

    def encode(self) -> bytes:
        """The 128 bytes on disk: a journal's when `journal_id` is set, else a slab's."""
        record = np.zeros((), HEADER)
        record["magic"] = JOURNAL_MAGIC if self.journal_id else SLAB_MAGIC
        record["version"] = FORMAT_VERSION
        record["slab_id"] = np.void(self.slab_id)
        for name in (
            "part_bytes", "capacity", "extent_bytes", "chunk_bytes", "journal_id", "next_generation"
        ):  # fmt: skip
            record[name] = getattr(self, name)
        body = record.tobytes()[: HEADER.itemsize - 8]
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


class DamagedHeader(IncompatibleStore):
    """A header that is not one of ours, or no longer."""


def decode_header(data: bytes, magic: bytes, name: str) -> Header:
    """The header in the first 128 bytes of the file called `name`.

    Raises IncompatibleStore for another format version, DamagedHeader for another magic or a failed
    check. Magic, version and check keep their places in every version.
    """
    if len(data) < HEADER.itemsize or data[:8] != magic:
        raise DamagedHeader(
            f"{name} is not a file of a kvtier store: choose another directory, or open with "
            "on_incompatible='discard' to replace it"
        )
    record = np.frombuffer(data, HEADER, count=1)[0]
    body = data[: HEADER.itemsize - 8]
    damaged = xxhash.xxh3_64_intdigest(body) != int(record["check"])
    version = int(record["version"])
    if version != FORMAT_VERSION:
        raise (DamagedHeader if damaged else IncompatibleStore)(
            f"{name} has disk format version {version}, this kvtier reads version {FORMAT_VERSION}: "
            "open it with the kvtier that wrote it, choose another directory, or open with "
            "on_incompatible='discard' to empty it"
        )
    if damaged:
        raise DamagedHeader(f"{name} has a damaged header: open with on_incompatible='discard' to empty it")
    part, extent, chunk = (int(record[field]) for field in ("part_bytes", "extent_bytes", "chunk_bytes"))
    if (
        part & (part - 1) or not 64 * KIB <= part <= MIB
        or extent % PAGE or chunk % PAGE or not 0 < chunk <= extent < 4 * GIB
        or max(int(record["capacity"]), int(record["next_generation"])) >= LIMIT
    ):  # fmt: skip
        raise DamagedHeader(
            f"{name} has parts of {part} bytes, extents of {extent}, chunks of {chunk}, a capacity or a "
            "generation that no store has: open with on_incompatible='discard' to empty it"
        )
    return Header(
        part_bytes=part,
        capacity=int(record["capacity"]),
        extent_bytes=extent,
        chunk_bytes=chunk,
        slab_id=record["slab_id"].tobytes(),
        journal_id=int(record["journal_id"]),
        next_generation=int(record["next_generation"]),
    )


def journal_head(header: Header) -> bytes:
    """The bytes that a journal begins with: its header twice."""
    return 2 * header.encode().ljust(PAGE, b"\0")


def decode_journal_head(data: bytes, name: str) -> tuple[Header, bool]:
    """The header of the journal called `name`, and whether both of its copies are whole.

    Raises what `decode_header` does of the first copy, if no copy can be read.
    """
    copies: list[Header] = []
    doubt: DamagedHeader | None = None
    for start in (0, PAGE):
        try:
            copies.append(decode_header(data[start : start + PAGE], JOURNAL_MAGIC, name))
        except DamagedHeader as error:
            doubt = doubt or error
    if not copies:
        assert doubt is not None
        raise doubt
    return copies[0], copies == [copies[0]] * 2


def records_for(parts: int) -> int:
    """Journal records that a chunk of `parts` checksums takes."""
    return max(1, -(-parts // SUMS_PER_RECORD))


def seal(records: npt.NDArray[np.void], journal_id: int, first: int) -> bytes:
    """`records` as bytes for the journal, each with its check; `first` is the first one's number."""
    data = memoryview(bytearray(records.tobytes()))
    digest = xxhash.xxh3_64_intdigest
    for i in range(len(records)):
        start = i * RECORD_BYTES
        check = digest(data[start + 8 : start + RECORD_BYTES], (journal_id + first + i) & (2**64 - 1))
        data[start : start + 8] = check.to_bytes(8, "little")
    return bytes(data)


def intact(data: memoryview, journal_id: int) -> npt.NDArray[np.bool_]:
    """Which of the joined records in `data`, numbered from 0, carry a valid check: shape (n,)."""
    digest = xxhash.xxh3_64_intdigest
    wanted = np.frombuffer(data, RECORD)["check"]
    seeds = (np.arange(len(wanted), dtype=np.uint64) + np.uint64(journal_id)).tolist()
    starts = range(8, len(data), RECORD_BYTES)
    found = np.fromiter(
        (digest(data[i : i + RECORD_BYTES - 8], seed) for i, seed in zip(starts, seeds, strict=True)),
        np.uint64,
        len(wanted),
    )
    same: npt.NDArray[np.bool_] = wanted == found
    return same


class StoredChunk(NamedTuple):
    """What a PUT record says. Sizes in bytes."""

    key: bytes
    generation: int
    offset: int
    slot_bytes: int
    payload_bytes: int
    stored_bytes: int
    sums: npt.NDArray[np.uint64]
    """Shape (parts,): the checksum of every part."""
    codec: int = 0
    owner: int = 0
    stored_at: int = 0
    """Seconds since 1970."""
    expires_at: int = 0
    """The same; 0: never."""


_PUT_FIELDS = (
    "codec", "payload_bytes", "stored_bytes", "slot_bytes", "generation", "offset", "owner", "stored_at",
    "expires_at",
)  # fmt: skip


def put_records(chunks: Sequence[StoredChunk]) -> npt.NDArray[np.void]:
    """The PUT record of each chunk, with the MORE records that its further checksums need."""
    puts = np.zeros(len(chunks), RECORD)
    puts["parts"] = [len(chunk.sums) for chunk in chunks]
    for name in _PUT_FIELDS:
        puts[name] = [getattr(chunk, name) for chunk in chunks]
    puts["key"] = np.frombuffer(b"".join(chunk.key for chunk in chunks), f"V{KEY_BYTES}")
    sums = np.concatenate([chunk.sums for chunk in chunks]) if chunks else np.empty(0, np.uint64)
    return with_sums(puts, sums)


def with_sums(puts: npt.NDArray[np.void], sums: npt.NDArray[np.uint64]) -> npt.NDArray[np.void]:
    """Whole records of chunks: `puts` in shape (n,), filled but for kind and sums, and the checksums of
    all their parts, joined.
    """
    parts = puts["parts"].astype(np.int64)
    counts = np.maximum(1, -(-parts // SUMS_PER_RECORD))
    heads = np.cumsum(counts) - counts
    total = int(counts.sum())
    records = np.zeros(total, RECORD)
    records["kind"] = MORE
    records["generation"] = np.repeat(puts["generation"], counts)
    records["parts"] = (np.arange(total) - np.repeat(heads, counts)) * SUMS_PER_RECORD
    records[heads] = puts
    records["kind"][heads] = PUT
    places = np.zeros(total * SUMS_PER_RECORD, np.uint64)
    places[ranges(heads * SUMS_PER_RECORD, parts)] = sums
    records["sums"] = places.reshape(-1, SUMS_PER_RECORD)
    return records


def ranges(starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`starts[i]`, `starts[i] + 1`, .. of `counts[i]` numbers, for every i, joined."""
    before = np.cumsum(counts) - counts
    joined: npt.NDArray[np.int64] = np.arange(int(counts.sum())) + np.repeat(starts - before, counts)
    return joined


def tombstone(generation: int) -> npt.NDArray[np.void]:
    """The record that ends the use of a slot that began with this generation."""
    records = np.zeros(1, RECORD)
    records["kind"] = TOMBSTONE
    records["generation"] = generation
    return records


def owner_records(names: Iterable[OwnerName]) -> npt.NDArray[np.void]:
    """The record of each owner."""
    names = list(names)
    records = np.zeros(len(names), RECORD)
    records["kind"] = OWNER
    for record, name in zip(records, names, strict=True):
        record["owner"] = name.id
        record["key"] = np.void(name.namespace.ljust(KEY_BYTES, b"\0"))
        record["sums"] = np.frombuffer(name.tenant.encode().ljust(8 * SUMS_PER_RECORD, b"\0"), "<u8")
    return records


def read_owners(records: npt.NDArray[np.void]) -> dict[int, OwnerName]:
    """The names that intact OWNER records give, by id; one that is not what its id says gives none."""
    names = {}
    for record in records:
        namespace = record["key"].tobytes()
        try:
            tenant = record["sums"].tobytes().rstrip(b"\0").decode()
        except UnicodeDecodeError:
            continue
        name = OwnerName(namespace if any(namespace) else b"", tenant)
        if name.id == int(record["owner"]) != NOBODY:
            names[name.id] = name
    return names
