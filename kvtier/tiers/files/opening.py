"""Opening a directory: the ledger made to fit the settings, and what of the files is kept."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvtier.config import page_up
from kvtier.errors import InvalidRequest, TierUnavailable
from kvtier.tiers.files.directory import LEDGER, check_kind
from kvtier.tiers.files.format import EVICT, Event, LedgerHeader
from kvtier.tiers.files.ledger import Ledger, new_header

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvtier.config import StoreConfig
    from kvtier.tiers.files.directory import Directory, Listed
    from kvtier.tiers.files.ledger import Section

_log = logging.getLogger(__name__)


def check_new(path: Path, config: StoreConfig) -> None:
    """Raise what `open_ledger` would for a directory without a store, before anything is made there."""
    check_kind(path)
    if (path / LEDGER).exists():
        return
    _check_given(path, config.capacity)
    existing = path
    while not existing.exists():
        existing = existing.parent
    disk = os.statvfs(existing)
    free = disk.f_bavail * disk.f_frsize
    if config.capacity > free and existing != path:
        raise TierUnavailable(
            f"capacity is {config.capacity} bytes, but the file system of {path} has {free} left for it: "
            "lower capacity, free space, or choose another directory"
        )


@contextlib.contextmanager
def open_ledger(
    ledger: Ledger, directory: Directory, config: StoreConfig
) -> Iterator[tuple[Section, list[Listed]]]:
    """The first section of an opening, and the files to keep, those used last in the end.

    Raises IncompatibleStore, TierUnavailable, InvalidRequest, OSError; nothing is lost by then.
    """
    discard = config.on_incompatible == "discard"
    with ledger.open(partial(_settle, directory, config, ledger), discard=discard) as section:
        assert ledger.header is not None
        found = sorted(directory.list_chunks(), key=lambda listed: listed.mtime)
        section.used = ledger.nbytes + directory.sweep()[0] + sum(listed.nbytes for listed in found)
        directory.check_free_space(section.capacity, section.used)
        kept = []
        strangers = 0
        for listed in found:
            if listed.file is None:
                strangers += 1
            elif not listed.is_whole(ledger.header.part_bytes):
                directory.remove(listed.name)
                section.used -= listed.nbytes
            else:
                kept.append(listed)
        if strangers:
            _log.warning("%s has %d files that are no chunks: they take room", directory.path, strangers)
        spared = 0
        while spared < len(kept) and not section.has_room(0):
            _evict(section, directory, kept[spared])
            spared += 1
        yield section, kept[spared:]


def _evict(section: Section, directory: Directory, listed: Listed) -> None:
    assert listed.file is not None
    directory.remove(listed.name)
    section.used -= listed.nbytes
    section.events.append(Event(EVICT, listed.file))


def _settle(
    directory: Directory, config: StoreConfig, ledger: Ledger, found: LedgerHeader | None
) -> LedgerHeader:
    """The ledger's header under these settings."""
    if found is None:
        _check_given(directory.path, config.capacity)
        parts = {listed.part_bytes for listed in directory.list_chunks() if listed.file is not None}
        if parts:
            _log.warning("the ledger of %s was missing or damaged: it is made anew", directory.path)
        found = new_header(config.capacity, min(parts, default=config.part_bytes))
    header = replace(found, capacity=config.capacity or found.capacity)
    least = page_up(config.chunk_bytes) + ledger.size(header)
    if header.capacity < least:
        raise InvalidRequest(
            f"capacity is {header.capacity} bytes, below one chunk and the ledger of {directory.path}, which "
            f"take {least}: raise capacity, or lower chunk_bytes to the size of your chunks"
        )
    return header


def _check_given(path: Path, capacity: int) -> None:
    if not capacity:
        raise InvalidRequest(
            f"capacity is not given and {path} holds no store yet: give the bytes it may take"
        )
