"""What `kvtier inspect` reports: one function a section, from a store's files to plain numbers.

A section is a dict of numbers, or a list of dicts with the same names. Names that end in `bytes` are
bytes, in `share` parts of 1, in `at` seconds since 1970.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.cli.owners import owners, owners_of_files
from kvtier.config import journal_limit, page_up
from kvtier.format import FORMAT_VERSION
from kvtier.index.slots import UNASSIGNED
from kvtier.tiers.files.format import FILES_VERSION
from kvtier.tiers.slab.endurance import kept
from kvtier.tiers.slab.journal import compaction_due

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.tiers.files import inspection as files
    from kvtier.tiers.slab.inspection import Inspection


def store(found: Inspection) -> dict[str, Any]:
    """Identity, sizes and totals."""
    header, chunks = found.header, found.recovered.chunks
    return {
        "kind": "slab",
        "format_version": FORMAT_VERSION,
        "slab_id": header.slab_id.hex(),
        "capacity_bytes": header.capacity,
        "bytes_on_disk": found.bytes_on_disk,
        "extent_bytes": header.extent_bytes,
        "chunk_bytes": header.chunk_bytes,
        "part_bytes": header.part_bytes,
        "chunks": len(chunks),
        "payload_bytes": int(chunks["payload_bytes"].sum()),
        "stored_bytes": int(chunks["stored_bytes"].sum()),
        "chunks_dropped": found.recovered.dropped,
        "next_generation": found.recovered.next_generation,
    }


def slots(found: Inspection) -> list[dict[str, Any]]:
    """Fragmentation, by slot size. `rounding_bytes` lie behind what is stored in used slots and behind
    the last slot of each extent; `unused_bytes` in slots that only chunks of such a size can take.
    """
    extent_bytes, chunks = found.header.extent_bytes, found.recovered.chunks
    rows = []
    for size in np.unique(chunks["slot_bytes"]).tolist():
        own = chunks[chunks["slot_bytes"] == size]
        extents = int((found.recovered.slot_bytes == size).sum())
        count = extents * (extent_bytes // size)
        data = int(np.minimum(own["payload_bytes"], own["stored_bytes"]).sum())
        rows.append(
            {
                "slot_bytes": size,
                "extents": extents,
                "slots": count,
                "chunks": len(own),
                "free": count - len(own),
                "payload_bytes": int(own["payload_bytes"].sum()),
                "rounding_bytes": size * len(own) - data + extents * (extent_bytes % size),
                "unused_bytes": size * (count - len(own)),
            }
        )
    return rows


def room(found: Inspection) -> dict[str, Any]:
    """What chunks of the expected size find without evicting anything, and what nothing but they need."""
    header = found.header
    size = page_up(header.chunk_bytes)
    near = [row for row in slots(found) if size <= row["slot_bytes"] <= size + size // 8]
    unassigned = int((found.recovered.slot_bytes == UNASSIGNED).sum())
    chunks = unassigned * (header.extent_bytes // size) + sum(row["free"] for row in near)
    return {
        "chunk_bytes": size,
        "free_extents": unassigned,
        "free_chunks": chunks,
        "free_bytes": chunks * size,
        "free_share": chunks * size / header.capacity,
    }


def ages(found: Inspection) -> dict[str, Any]:
    """When the chunks were stored; None without any."""
    stored_at = np.sort(found.recovered.chunks["stored_at"])
    at = {"oldest": 0, "median": len(stored_at) // 2, "newest": len(stored_at) - 1}
    return {f"{name}_at": int(stored_at[i]) if len(stored_at) else None for name, i in at.items()}


def journal(found: Inspection) -> dict[str, Any]:
    """What the journal holds, and how many records more make a running store compact it."""
    header, recovered = found.header, found.recovered
    limit = journal_limit(header.capacity, header.chunk_bytes)
    live = recovered.live_records
    return {
        "records": recovered.records,
        "live": live,
        "dead": recovered.records - recovered.damaged - live,
        "damaged": recovered.damaged,
        "journal_bytes": len(found.journal),
        "limit_bytes": limit,
        "compaction_in_records": max(0, compaction_due(limit, live) - recovered.records),
    }


def endurance(found: Inspection) -> dict[str, Any] | None:
    """What was written under the setting `endurance`, as of when a store last said so."""
    state = kept(found.path)
    return state and {"spent_bytes": state.spent, "left_bytes": state.left, "told_at": state.at / 1e9}


SECTIONS: dict[str, Callable[[Inspection], Any]] = {
    "store": store,
    "slots": slots,
    "room": room,
    "ages": ages,
    "owners": owners,
    "journal": journal,
    "endurance": endurance,
}
"""In the order in which they are shown. One that returns None has nothing to tell."""


def report(found: Inspection) -> dict[str, Any]:
    """All sections that have something to tell, and what is wrong with the files."""
    made = {name: section(found) for name, section in SECTIONS.items()}
    return {**{k: v for k, v in made.items() if v is not None}, "faults": found.faults}


def report_files(found: files.Inspection) -> dict[str, Any]:
    """The same of a directory of kind `files`."""
    return {
        "store": {
            "kind": "files",
            "format_version": FILES_VERSION,
            "capacity_bytes": found.header.capacity if found.header else 0,
            "bytes_on_disk": found.bytes_on_disk,
            "part_bytes": found.part_bytes,
            "chunks": len(found.chunks),
            "payload_bytes": sum(file.payload_bytes for file in found.chunks),
            "stored_bytes": sum(file.stored_bytes for file in found.chunks),
            "temporaries": found.temporaries,
            "events": found.header.events if found.header else 0,
        },
        "owners": owners_of_files(found),
        "faults": found.faults,
    }
