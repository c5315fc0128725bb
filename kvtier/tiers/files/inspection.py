"""Looking at a directory of files without opening it as a store: what it holds, and whether all is sound."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier.buffers import Arena
from kvtier.errors import IncompatibleStore, TierUnavailable
from kvtier.io.base import CHECKSUM, SHORT
from kvtier.tiers.files.directory import CHUNKS, INCOMING, LEDGER, OWNERS
from kvtier.tiers.files.format import (
    HEADER_BYTES,
    ChunkFile,
    LedgerHeader,
    decode_ledger,
    parse_name,
    parse_owner,
)
from kvtier.tiers.files.plan import NOT_OPEN, FilePlan

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvtier.io.base import Batch, IOEngine
    from kvtier.owner import OwnerName

_BATCH_BYTES, _BATCH_FILES = 32 << 20, 128
_REASONS = {CHECKSUM: "checksum mismatch", SHORT: "the file ends before the payload"}


@dataclass(slots=True)
class Inspection:
    """What the names in a directory say. Sizes in bytes."""

    path: Path
    header: LedgerHeader | None
    """None if the ledger is missing or damaged: opening makes it anew."""
    chunks: list[ChunkFile] = field(default_factory=list)
    used_at: list[int] = field(default_factory=list)
    """When each was last used, to about a minute, in seconds since 1970."""
    owners: dict[int, OwnerName] = field(default_factory=dict)
    """The owners that the directory names, by id."""
    part_bytes: int = 0
    misfits: list[str] = field(default_factory=list)
    """Names that are no chunk's, or whose file has another size."""
    temporaries: int = 0
    bytes_on_disk: int = 0

    @property
    def faults(self) -> list[str]:
        """What is wrong with the directory itself, in words."""
        faults = [] if self.header else ["the ledger is missing or damaged"]
        return faults + [f"{name} is no chunk, or has lost a part of it" for name in self.misfits]


@dataclass(frozen=True, slots=True)
class BadFile:
    """A chunk that cannot be read back as it was written."""

    key: bytes
    name: str
    reason: str


def is_of_files(path: Path) -> bool:
    """Whether a directory is that of a store of kind `files`."""
    return (path / CHUNKS).is_dir()


def inspect(path: Path) -> Inspection:
    """Read the names in the store in `path`; nothing is locked or changed, and it may be in use.

    Raises IncompatibleStore if its ledger is of another version, TierUnavailable if it cannot be read.
    """
    if not is_of_files(path):
        raise IncompatibleStore(f"{path} holds no store of kind 'files'")
    try:
        header, nbytes = _header(path)
        found = Inspection(path, header, bytes_on_disk=nbytes)
        for folder in (CHUNKS, INCOMING):
            for entry in os.scandir(path / folder):
                if entry.is_file(follow_symlinks=False):
                    _take_in(found, entry, is_chunk=folder == CHUNKS)
        with contextlib.suppress(FileNotFoundError):
            names = map(parse_owner, os.listdir(path / OWNERS))
            found.owners = {owner.id: owner for owner in names if owner is not None}
    except OSError as error:
        raise TierUnavailable(f"cannot read the store in {path}: {error.strerror}") from error
    found.part_bytes = found.part_bytes or (found.header.part_bytes if found.header else 0)
    return found


def _header(path: Path) -> tuple[LedgerHeader | None, int]:
    try:
        with (path / LEDGER).open("rb") as file:
            data, nbytes = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return None, 0
    return decode_ledger(data, str(path / LEDGER)), nbytes


def _take_in(found: Inspection, entry: os.DirEntry[str], *, is_chunk: bool) -> None:
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return
    nbytes = status.st_size
    found.bytes_on_disk += nbytes
    if not is_chunk:
        found.temporaries += 1
        return
    parsed = parse_name(entry.name)
    if parsed is None or parsed[0].stored_bytes != nbytes or found.part_bytes not in (0, parsed[1]):
        found.misfits.append(entry.name)
        return
    found.chunks.append(parsed[0])
    found.used_at.append(int(status.st_mtime))
    found.part_bytes = parsed[1]


def verify(inspection: Inspection, engine: IOEngine) -> Iterator[tuple[int, list[BadFile]]]:
    """Read and check every chunk; yields, batch by batch, how many were looked at and which are bad.

    One that is gone meanwhile is not bad.
    """
    largest = max((file.stored_bytes for file in inspection.chunks), default=0)
    arena = Arena(max(_BATCH_BYTES, largest))
    batch: list[ChunkFile] = []
    nbytes = 0
    for file in inspection.chunks:
        if batch and (nbytes + file.stored_bytes > arena.nbytes or len(batch) == _BATCH_FILES):
            yield len(batch), _check(inspection, engine, arena, batch)
            batch, nbytes = [], 0
        batch.append(file)
        nbytes += file.stored_bytes
    if batch:
        yield len(batch), _check(inspection, engine, arena, batch)


def _check(inspection: Inspection, engine: IOEngine, arena: Arena, files: list[ChunkFile]) -> list[BadFile]:
    plan = FilePlan(inspection.part_bytes)
    names, gone, place = [], set(), 0
    try:
        for i, file in enumerate(files):
            names.append(file.name(inspection.part_bytes))
            plan.add_read(file, arena.address + place)
            place += file.stored_bytes
            try:
                plan.fds[i] = _open(inspection.path / CHUNKS / names[i])
            except FileNotFoundError:
                gone.add(i)
            except OSError as error:
                plan.errors[i] = error.errno or 0
        done = threading.Event()
        batch: Batch = plan.batch(lambda batch: done.set(), arena)
        engine.submit(batch)
        done.wait()
    finally:
        for fd in plan.fds:
            if fd != NOT_OPEN:
                os.close(fd)
    return [
        BadFile(files[i].key, names[i], _REASONS.get(outcome) or f"read error: {os.strerror(outcome)}")
        for i, outcome in enumerate(plan.outcomes(batch))
        if outcome and i not in gone
    ]


def _open(path: Path) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_DIRECT)
    except FileNotFoundError:
        raise
    except OSError:
        return os.open(path, flags)
