"""Looking at a slab without opening it as a store: what it holds, and whether all of it is sound."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtier.buffers import Arena
from kvtier.config import extent_area
from kvtier.errors import IncompatibleStore, TierUnavailable
from kvtier.format import SLAB_HEADER_BYTES, Header
from kvtier.hashing import part_seed
from kvtier.io.base import CHECKSUM, SHORT, Batch, IOEngine
from kvtier.io.plan import Plan
from kvtier.tiers.slab.directory import JOURNAL, SLAB, read_headers
from kvtier.tiers.slab.recovery import Recovered, replay

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_BATCH_BYTES = 32 << 20
_REASONS = {CHECKSUM: "checksum mismatch", SHORT: "slab ends before the payload"}


@dataclass(frozen=True, slots=True)
class Inspection:
    """What the files of a store say. Sizes in bytes."""

    path: Path
    header: Header
    recovered: Recovered
    slab_is_ours: bool
    """Whether the slab's header carries the journal's identity."""
    bytes_on_disk: int

    @property
    def faults(self) -> list[str]:
        """What is wrong with the files themselves, in words."""
        faults = []
        if not self.slab_is_ours:
            faults.append("the slab is missing, damaged, or of another store")
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


def inspect(path: Path) -> Inspection:
    """Read headers and journal of the store in `path`; nothing is locked or changed.

    Raises IncompatibleStore if there is no store of this format version.
    """
    if not path.is_dir():
        raise IncompatibleStore(f"{path} is not a directory, so it holds no store")
    try:
        found = read_headers(path)
        if found.journal is None:
            raise IncompatibleStore(
                f"{path} holds no store: it has no journal, or a damaged one"
                if found.slab is None
                else f"the journal in {path} is missing or damaged: opening the store starts it empty"
            )
        data = (path / JOURNAL).read_bytes()
    except OSError as error:
        raise TierUnavailable(f"cannot read the store in {path}: {error.strerror}") from error
    header = found.journal
    extents = extent_area(header.capacity, header.chunk_bytes) // header.extent_bytes
    return Inspection(
        path=path,
        header=header,
        recovered=replay(data, header, extents),
        slab_is_ours=found.slab is not None and found.slab.slab_id == header.slab_id,
        bytes_on_disk=sum(entry.stat().st_blocks * 512 for entry in path.iterdir() if entry.is_file()),
    )


def verify(inspection: Inspection, engine: IOEngine) -> Iterator[tuple[int, list[BadChunk]]]:
    """Read and check every chunk; yields, batch by batch, how many were read and which are bad.

    Raises TierUnavailable if the slab cannot be opened.
    """
    name = inspection.path / SLAB
    try:
        fd = _open_for_reading(name)
    except FileNotFoundError:
        yield _all_missing(inspection)
        return
    except OSError as error:
        raise TierUnavailable(f"cannot read {name}: {error.strerror}") from error
    try:
        largest = int(inspection.recovered.chunks["stored_bytes"].max(initial=0))
        arena = Arena(max(_BATCH_BYTES, largest))
        for chunks in _groups(inspection.recovered.chunks, arena.nbytes):
            yield len(chunks), _check(inspection, engine, fd, arena, chunks)
    finally:
        os.close(fd)


def _open_for_reading(name: Path) -> int:
    with contextlib.suppress(OSError):
        return os.open(name, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    return os.open(name, os.O_RDONLY | os.O_CLOEXEC)


def _all_missing(inspection: Inspection) -> tuple[int, list[BadChunk]]:
    chunks = inspection.recovered.chunks
    bad = [BadChunk(c["key"].tobytes(), SLAB_HEADER_BYTES + int(c["offset"]), "no slab") for c in chunks]
    return len(chunks), bad


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
        )
        for chunk, outcome in zip(chunks, plan.outcomes(batch), strict=True)
        if outcome
    ]
