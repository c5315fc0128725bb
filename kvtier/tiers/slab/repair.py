"""Repairing a slab's files: what is bad is dropped from the journal, damaged headers are written anew.

The journal is replaced in one step, as every rewrite of it: a crash leaves the old one or the new one.
"""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvtier.errors import IncompatibleStore, TierUnavailable
from kvtier.format import (
    JOURNAL_HEADER_BYTES,
    RECORD,
    RECORD_BYTES,
    SLAB_HEADER_BYTES,
    Header,
    owner_records,
)
from kvtier.tiers.slab.directory import JOURNAL, read_headers, sync_directory
from kvtier.tiers.slab.journal import create
from kvtier.tiers.slab.opening import write_slab_header
from kvtier.tiers.slab.recovery import records_in
from kvtier.tiers.slab.snapshot import live_records

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

    from kvtier.tiers.slab.inspection import BadChunk, Inspection

_BAD_MEDIUM = frozenset({errno.EIO, errno.EBADMSG, errno.EILSEQ, errno.ENODATA, errno.EREMOTEIO})
"""What a device answers for a place of it that cannot be read; anything else is about the device."""


def journal_is_lost(path: Path) -> bool:
    """Whether there is a slab in `path`, but no journal that can be read.

    Raises IncompatibleStore for what is no store, or of another version; OSError.
    """
    found = read_headers(path, salvage=True)
    return found.slab is not None and found.journal is None


def drop(inspection: Inspection, bad: Sequence[BadChunk]) -> list[str]:
    """Drop `bad`, which were read twice, and all that the inspection found wrong, and compact the
    journal. Returns what was done, in words; nothing where there was nothing to do.

    The directory is locked. Raises TierUnavailable, with everything as it was, if the device itself
    fails.
    """
    for chunk in bad:
        if chunk.error and chunk.error not in _BAD_MEDIUM:
            raise TierUnavailable(
                f"cannot read the slab in {inspection.path}: {os.strerror(chunk.error)}; nothing was "
                "changed: look after the device first"
            )
    path, recovered = inspection.path, inspection.recovered
    header = replace(inspection.header, journal_id=0, next_generation=1)
    places = [chunk.offset - SLAB_HEADER_BYTES for chunk in bad]
    positions = recovered.positions[~np.isin(recovered.chunks["offset"], places)]
    done = []
    try:
        owned = np.unique(recovered.chunks["owner"][~np.isin(recovered.chunks["offset"], places)])
        owners = owner_records(name for owner, name in recovered.owners.items() if owner in owned)
        kept = live_records(records_in(inspection.journal), positions)
        kept = np.concatenate([owners, kept])
        nbytes = JOURNAL_HEADER_BYTES + len(kept) * RECORD_BYTES
        if len(inspection.journal) != nbytes or not inspection.journal_head_whole:
            _replace_journal(path, header, recovered.next_generation, kept)
            done.append(f"compacted the journal from {recovered.records} records to {len(kept)}")
            if not inspection.journal_head_whole:
                done.append("wrote both headers of the journal anew")
        if inspection.slab_header != header:
            write_slab_header(path, header)
            done.append("wrote the slab's header anew")
    except OSError as error:
        raise TierUnavailable(f"cannot repair the store in {path}: {error.strerror}") from error
    return done


def start_over(path: Path) -> list[str]:
    """Give a slab whose journal is lost an empty one. Returns what that costs, in words.

    The directory is locked. Raises TierUnavailable, IncompatibleStore.
    """
    try:
        found = read_headers(path, salvage=True)
        if found.slab is None or found.journal is not None:
            raise IncompatibleStore(
                f"{path} has a journal, or no slab either: there is nothing to start over"
            )
        records = _records_in_damaged(path)
        _replace_journal(path, found.slab, 1, np.empty(0, RECORD))
    except OSError as error:
        raise TierUnavailable(f"cannot repair the store in {path}: {error.strerror}") from error
    return [
        f"the journal is missing, or both of its headers are damaged: its {records} records cannot be told "
        "from garbage, and all chunks are lost",
        "wrote an empty journal",
    ]


def _replace_journal(path: Path, header: Header, generation: int, records: npt.NDArray[np.void]) -> None:
    fd, _ = create(path / JOURNAL, header.for_journal(generation), records)
    os.close(fd)
    sync_directory(path)


def _records_in_damaged(path: Path) -> int:
    try:
        return max(0, (path / JOURNAL).stat().st_size - JOURNAL_HEADER_BYTES) // RECORD_BYTES
    except FileNotFoundError:
        return 0
