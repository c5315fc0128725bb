"""Opening a directory: what is there, what of it is kept, and the files made to fit the settings."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvtier.config import MAX_EXTENTS, extent_area, extent_size, journal_limit, page_up
from kvtier.errors import IncompatibleStore, InvalidRequest
from kvtier.format import RECORD_BYTES, SLAB_HEADER_BYTES, Header, journal_head, owner_records
from kvtier.tiers.access import open_file, refuse_links
from kvtier.tiers.slab.directory import (
    JOURNAL,
    SLAB,
    Found,
    check_free_space,
    open_slab,
    read_headers,
    read_journal,
    sync_directory,
)
from kvtier.tiers.slab.journal import create
from kvtier.tiers.slab.recovery import Recovered, records_in, replay
from kvtier.tiers.slab.snapshot import live_records

if TYPE_CHECKING:
    from pathlib import Path

    from kvtier.config import StoreConfig

_log = logging.getLogger(__name__)
_TEMPORARY = JOURNAL + ".new"


@dataclass(frozen=True, slots=True)
class Files:
    """The open slab. Whoever holds this closes `fd`."""

    fd: int
    direct: bool
    """Whether reads and writes bypass the page cache."""
    reserved: bool
    """Whether the file system holds the space for the whole slab."""
    journal_header: Header
    rewritten: bool
    """Whether there was a journal, and it was written anew."""


def check_new(path: Path, config: StoreConfig) -> None:
    """Raise what `open_files` would for a directory without a store, before anything is made there.

    Raises IncompatibleStore for a store of kind `files`.
    """
    if (path / "ledger").exists() and (path / "chunks").exists():
        raise IncompatibleStore(
            f"{path} holds a store of kind 'files': open it with kind='files', or choose another directory"
        )
    if path.is_file() or (path / JOURNAL).exists() or (path / SLAB).exists():
        return
    check_free_space(path, _settle(Found(), config).capacity, config.free_space)


def open_files(path: Path, config: StoreConfig) -> tuple[Header, Files, Recovered]:
    """Make the files in a locked directory fit `config`, keeping what can be kept.

    Raises IncompatibleStore, TierUnavailable, InvalidRequest, OSError; nothing is lost by then.
    """
    try:
        found = read_headers(path)
    except IncompatibleStore:
        if config.on_incompatible == "error":
            raise
        found = Found()
        _discard(path)
    header = _settle(found, config)
    extents = extent_area(header.capacity, header.chunk_bytes) // header.extent_bytes
    # A slab that is there has its space: what others have used since must not keep it from opening.
    grows = found.slab is None or header.capacity > found.slab.capacity
    check_free_space(path, header.capacity, config.free_space if grows else 0)
    refuse_links(path / _TEMPORARY)
    (path / _TEMPORARY).unlink(missing_ok=True)

    data = read_journal(path, found.journal) if found.journal else journal_head(header.for_journal(1))
    recovered = replay(data, found.journal or header, extents)
    recovered.journal_lost = found.slab is not None and found.journal is None
    _tell(path, found, header, recovered)
    journal_header = found.journal
    if found.journal is None or _is_stale(data, found, header, recovered):
        owners = owner_records(recovered.owners.values())
        kept = np.concatenate([owners, live_records(records_in(data), recovered.positions)])
        fd, journal_header = create(
            path / JOURNAL, header.for_journal(recovered.next_generation), kept, config.file_mode
        )
        os.close(fd)
        sync_directory(path)
        recovered.records = len(kept)
    assert journal_header is not None
    if found.slab != header:
        write_slab_header(path, header, config.file_mode)
    # Only now, with no record left beyond it, may the slab shrink.
    rewritten = found.journal not in (None, journal_header)
    nbytes = SLAB_HEADER_BYTES + extents * header.extent_bytes
    fd, direct, reserved = open_slab(path, nbytes, config.file_mode)
    return header, Files(fd, direct, reserved, journal_header, rewritten), recovered


def _tell(path: Path, found: Found, header: Header, recovered: Recovered) -> None:
    """Log what of a store could not be kept."""
    if not found.journal_head_whole:
        _log.warning("one of the two headers of the journal of %s is damaged: it is written anew", path)
    if recovered.journal_lost:
        _log.warning("the journal of %s is missing or damaged: the store starts empty", path)
    if recovered.damaged:
        _log.warning("%d records of the journal of %s are damaged", recovered.damaged, path)
    if recovered.dropped:
        smaller = found.journal is not None and header.capacity < found.journal.capacity
        why = "its capacity was lowered" if smaller else "their records are incomplete or overwritten"
        _log.warning("%d chunks of %s are dropped: %s", recovered.dropped, path, why)


def _settle(found: Found, config: StoreConfig) -> Header:
    """The slab's header under these settings: the identity and geometry that are there, if any."""
    there = found.journal or found.slab
    capacity = config.capacity or (there.capacity if there else 0)
    if not capacity:
        raise InvalidRequest(
            f"capacity is not given and {config.path} holds no store yet: give the bytes it may take"
        )
    if there is None:
        slot = page_up(config.chunk_bytes)
        return Header.new(
            part_bytes=config.part_bytes,
            capacity=capacity,
            extent_bytes=extent_size(extent_area(capacity, slot), slot),
            chunk_bytes=slot,
        )
    if page_up(config.chunk_bytes) > there.extent_bytes:
        raise InvalidRequest(
            f"chunk_bytes is {config.chunk_bytes}, but the store in {config.path} was created for chunks "
            f"of up to {there.extent_bytes} bytes: choose another directory, or a smaller chunk"
        )
    if extent_area(capacity, there.chunk_bytes) < there.extent_bytes:
        raise InvalidRequest(
            f"capacity is {capacity} bytes, below one extent of {there.extent_bytes} of the store in "
            f"{config.path} and its journal: raise capacity, or choose another directory"
        )
    if extent_area(capacity, there.chunk_bytes) // there.extent_bytes > MAX_EXTENTS:
        raise InvalidRequest(
            f"capacity is {capacity} bytes, but the store in {config.path} was created for less: it takes "
            f"{MAX_EXTENTS} extents of its {there.extent_bytes} bytes; lower capacity, or choose another "
            "directory"
        )
    return replace(there, capacity=capacity, journal_id=0, next_generation=1)


def _is_stale(data: bytes, found: Found, header: Header, recovered: Recovered) -> bool:
    """Whether the journal must be rewritten: damaged, of another capacity, torn, or mostly dead."""
    assert found.journal is not None
    limit = journal_limit(header.capacity, header.chunk_bytes)
    return (
        bool(recovered.damaged or recovered.dropped or len(data) % RECORD_BYTES)
        or not found.journal_head_whole
        or found.journal.capacity != header.capacity
        or recovered.records > 2 * recovered.live_records + 1024
        or len(data) > limit // 2
    )


def _discard(path: Path) -> None:
    for name in (JOURNAL, SLAB, _TEMPORARY):
        (path / name).unlink(missing_ok=True)
    sync_directory(path)


def write_slab_header(path: Path, header: Header, mode: int = 0o600) -> None:
    """Write the slab's header, durably, making the file if need be. Raises TierUnavailable, OSError."""
    fd = open_file(path / SLAB, os.O_WRONLY | os.O_CREAT, mode)
    try:
        os.pwrite(fd, header.encode().ljust(SLAB_HEADER_BYTES, b"\0"), 0)
        os.fsync(fd)
        sync_directory(path)
    finally:
        os.close(fd)
