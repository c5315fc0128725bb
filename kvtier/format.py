"""The disk format, byte for byte: headers of slab and journal, and the journal's records.

docs/FORMAT.md describes it; the two change together, and with FORMAT_VERSION.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np
import xxhash

from kvtier.errors import IncompatibleStore
from kvtier.types import KEY_BYTES

if TYPE_CHECKING:
    import numpy.typing as npt

FORMAT_VERSION = 1
SLAB_MAGIC = b"KVTSLAB\0"
JOURNAL_MAGIC = b"KVTJRNL\0"
SLAB_HEADER_BYTES = 4096
RECORD_BYTES = 128
SUMS_PER_RECORD = 7

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
PUT, TOMBSTONE, MORE = 1, 2, 3
RECORD = np.dtype(
    [
        ("check", "<u8"),  # xxh3_64 of the 120 bytes behind, seeded with journal_id + record number
        ("kind", "u1"),  # PUT, TOMBSTONE or MORE
        ("codec", "u1"),  # 0: raw
        ("parts", "<u2"),  # checksummed parts of the payload; in MORE: the number of its first sum
        ("payload_bytes", "<u4"),
        ("stored_bytes", "<u4"),  # in the slot, whole pages
        ("slot_bytes", "<u4"),  # slot size of the extent
        ("generation", "<u8"),  # of this use of the slot; ties MORE and TOMBSTONE to their PUT
        ("offset", "<u8"),  # of the slot in the extents' area, which starts behind the slab's header
        ("key", f"V{KEY_BYTES}"),
        ("sums", "<u8", (SUMS_PER_RECORD,)),  # xxh3_64 per part; the rest of them in MORE records
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
    return Header(
        part_bytes=int(record["part_bytes"]),
        capacity=int(record["capacity"]),
        extent_bytes=int(record["extent_bytes"]),
        chunk_bytes=int(record["chunk_bytes"]),
        slab_id=record["slab_id"].tobytes(),
        journal_id=int(record["journal_id"]),
        next_generation=int(record["next_generation"]),
    )


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


def put_records(
    *,
    key: bytes,
    generation: int,
    offset: int,
    slot_bytes: int,
    payload_bytes: int,
    stored_bytes: int,
    sums: npt.NDArray[np.uint64],
) -> npt.NDArray[np.void]:
    """The PUT record of one chunk, with the MORE records that its further checksums need."""
    records = np.zeros(records_for(len(sums)), RECORD)
    records["kind"] = MORE
    records["generation"] = generation
    records["parts"] = np.arange(len(records)) * SUMS_PER_RECORD
    head = records[0]
    head["kind"] = PUT
    head["parts"] = len(sums)
    head["payload_bytes"] = payload_bytes
    head["stored_bytes"] = stored_bytes
    head["slot_bytes"] = slot_bytes
    head["offset"] = offset
    head["key"] = np.void(key)
    padded = np.zeros(len(records) * SUMS_PER_RECORD, np.uint64)
    padded[: len(sums)] = sums
    records["sums"] = padded.reshape(-1, SUMS_PER_RECORD)
    return records


def tombstone(generation: int) -> npt.NDArray[np.void]:
    """The record that ends the use of a slot that began with this generation."""
    records = np.zeros(1, RECORD)
    records["kind"] = TOMBSTONE
    records["generation"] = generation
    return records
