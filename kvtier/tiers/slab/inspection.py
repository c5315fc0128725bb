"""Looking at a slab without opening it as a store: what it holds, and whether all of it is sound."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtier.buffers import Arena
from kvtier.config import MAX_EXTENTS, extent_area
from kvtier.errors import IncompatibleStore, TierUnavailable
from kvtier.format import SLAB_HEADER_BYTES, Header, decode_journal_head
from kvtier.hashing import part_seed
from kvtier.io.base import CHECKSUM, SHORT, Batch, IOEngine
from kvtier.io.plan import Plan
from kvtier.tiers.access import open_file
from kvtier.tiers.slab.directory import JOURNAL, SLAB, longest_journal, read_headers, read_journal, read_pages
from kvtier.tiers.slab.recovery import Recovered, replay

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_BATCH_BYTES = 32 << 20
_REASONS = {CHECKSUM: "checksum mismatch", SHORT: "slab ends before the payload"}


@dataclass(frozen=True, slots=True)
class Inspection:
    """What the files of a store say. Sizes in bytes."""

    path: Path
    header: Header
    recovered: Recovered
    slab_header: Header | None
    """None where the slab is missing, or its header damaged."""
    journal_head_whole: bool
    """Whether both copies of the journal's header are as they were written."""
    journal: bytes
    """The whole file."""
    unreadable_pages: int
    """Pages of the journal that the device twice failed to read: zeros stand for them."""
    bytes_on_disk: int

    @property
    def slab_is_ours(self) -> bool:
        """Whether the slab's header carries the journal's identity."""
        return self.slab_header is not None and self.slab_header.slab_id == self.header.slab_id

    @property
    def faults(self) -> list[str]:
        """What is wrong with the files themselves, in words."""
        faults = []
        if not self.slab_is_ours:
            faults.append("the slab is missing, damaged, or of another store")
        if self.unreadable_pages:
            faults.append(f"{self.unreadable_pages} pages of the journal cannot be read")
        if not self.journal_head_whole:
            faults.append("one of the journal's two headers is damaged")
        if self.recovered.damaged:
            faults.append(f"{self.recovered.damaged} journal records fail their check")
        if self.recovered.dropped:
            faults.append(f"{self.recovered.dropped} chunks have incomplete or overwritten records")
        return faults


@dataclass(frozen=True, slots=True)
class BadChunk:
    """A chunk that cannot be read back as it was written."""

    key: bytes
    offset: int
    """Byte offset in the slab's file."""
    reason: str
    error: int = 0
    """The errno that the device gave, 0 where it gave bytes that are wrong or missing."""


def inspect(path: Path, *, salvage: bool = False) -> Inspection:
    """Read headers and journal of the store in `path`; nothing is locked or changed.

    Raises IncompatibleStore if there is no store of this format version, TierUnavailable if the files
    cannot be read, or with `salvage` more of them than some pages.
    """
    if not path.is_dir():
        raise IncompatibleStore(f"{path} is not a directory, so it holds no store")
    try:
        found = read_headers(path, salvage=salvage)
        if found.journal is None:
            raise IncompatibleStore(
                f"{path} holds no store: it has no journal, or a damaged one"
                if found.slab is None
                else f"the journal in {path} is missing or damaged, and its chunks are lost: opening the "
                "store, or `kvtier verify --repair`, starts it empty"
            )
        data, unreadable = _read_journal(path, found.journal, salvage=salvage)
        # Of this very file: a store in use may have put another one in place meanwhile.
        header, whole = decode_journal_head(data, str(path / JOURNAL))
        bytes_on_disk = _bytes_on_disk(path)
    except OSError as error:
        raise TierUnavailable(f"cannot read the store in {path}: {error.strerror}") from error
    extents = extent_area(header.capacity, header.chunk_bytes) // header.extent_bytes
    if not 0 < extents <= MAX_EXTENTS:
        raise IncompatibleStore(f"the journal in {path} says a capacity that no store of its kind has")
    return Inspection(
        path=path,
        header=header,
        recovered=replay(data, header, extents),
        slab_header=found.slab,
        journal_head_whole=whole,
        journal=data,
        unreadable_pages=unreadable,
        bytes_on_disk=bytes_on_disk,
    )


def verify(
    inspection: Inspection, engine: IOEngine, only: Sequence[BadChunk] | None = None
) -> Iterator[tuple[int, list[BadChunk]]]:
    """Read and check every chunk, or `only` these again; yields, batch by batch, how many were read and
    which are bad.

    Raises TierUnavailable if the slab cannot be opened.
    """
    chosen = inspection.recovered.chunks
    if only is not None:
        chosen = chosen[np.isin(chosen["offset"], [bad.offset - SLAB_HEADER_BYTES for bad in only])]
    name = inspection.path / SLAB
    try:
        fd = _open_for_reading(name)
    except FileNotFoundError:
        yield (
            len(chosen),
            [BadChunk(c["key"].tobytes(), SLAB_HEADER_BYTES + int(c["offset"]), "no slab") for c in chosen],
        )
        return
    except OSError as error:
        raise TierUnavailable(f"cannot read {name}: {error.strerror}") from error
    try:
        largest = int(chosen["stored_bytes"].max(initial=0))
        arena = Arena(max(_BATCH_BYTES, largest))
        for chunks in _groups(chosen, arena.nbytes):
            yield len(chunks), _check(inspection, engine, fd, arena, chunks)
    finally:
        os.close(fd)


def _read_journal(path: Path, header: Header, *, salvage: bool) -> tuple[bytes, int]:
    """The journal's bytes, and how many pages of it cannot be read."""
    try:
        return read_journal(path, header), 0
    except OSError as error:
        if not salvage or error.errno != errno.EIO:
            raise
    fd = open_file(path / JOURNAL, os.O_RDONLY)
    try:
        return read_pages(fd, longest_journal(header))
    finally:
        os.close(fd)


def _bytes_on_disk(path: Path) -> int:
    total = 0
    for entry in path.iterdir():
        with contextlib.suppress(FileNotFoundError):  # a journal that has got its name meanwhile
            total += entry.lstat().st_blocks * 512 if entry.is_file() else 0
    return total


def _open_for_reading(name: Path) -> int:
    with contextlib.suppress(OSError):
        return open_file(name, os.O_RDONLY | os.O_DIRECT)
    return open_file(name, os.O_RDONLY)


def _groups(chunks: np.ndarray, limit: int) -> Iterator[np.ndarray]:
    """Chunks in slab order, as many at a time as fit `limit` bytes."""
    chunks = chunks[np.argsort(chunks["offset"])]
    start = nbytes = 0
    for i, stored in enumerate(chunks["stored_bytes"].tolist()):
        if nbytes + stored > limit:
            yield chunks[start:i]
            start, nbytes = i, 0
        nbytes += stored
    if len(chunks):
        yield chunks[start:]


def _check(
    inspection: Inspection, engine: IOEngine, fd: int, arena: Arena, chunks: np.ndarray
) -> list[BadChunk]:
    header, recovered = inspection.header, inspection.recovered
    plan = Plan(fd=fd, part_bytes=header.part_bytes)
    place = 0
    for chunk in chunks:
        extent, rest = divmod(int(chunk["offset"]), header.extent_bytes)
        plan.add(
            offset=SLAB_HEADER_BYTES + int(chunk["offset"]),
            address=arena.address + place,
            nbytes=int(chunk["stored_bytes"]),
            seed=part_seed(chunk["key"].tobytes(), int(chunk["generation"]), header.slab_id),
            sums=recovered.sums[extent][rest // int(recovered.slot_bytes[extent])],
        )
        place += int(chunk["stored_bytes"])
    done = threading.Event()
    batch: Batch = plan.batch(lambda batch: done.set(), arena)
    engine.submit(batch)
    done.wait()
    return [
        BadChunk(
            chunk["key"].tobytes(),
            SLAB_HEADER_BYTES + int(chunk["offset"]),
            _REASONS.get(outcome) or f"read error: {os.strerror(outcome)}",
            max(0, outcome),
        )
        for chunk, outcome in zip(chunks, plan.outcomes(batch), strict=True)
        if outcome
    ]
