"""From a journal's bytes to what the slab holds, over whole columns and without reading payloads."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvtier.codec import Codec
from kvtier.config import PAGE
from kvtier.format import (
    JOURNAL_HEADER_BYTES,
    LIMIT,
    MORE,
    OWNER,
    PUT,
    RECORD,
    RECORD_BYTES,
    SUMS_PER_RECORD,
    TOMBSTONE,
    intact,
    read_owners,
)
from kvtier.index.slots import UNASSIGNED
from kvtier.types import KEY_BYTES

_LAST_CODEC = max(Codec)

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvtier.format import Header
    from kvtier.owner import OwnerName


@dataclass(slots=True)
class Recovered:
    """The live chunks of a journal, oldest first, and what was found on the way."""

    chunks: npt.NDArray[np.void]
    """Shape (n,): the PUT record of every live chunk."""
    positions: npt.NDArray[np.int64]
    """Shape (n,): the number of each chunk's PUT record."""
    slot_bytes: npt.NDArray[np.int64]
    """Shape (extents,): slot size, or UNASSIGNED."""
    sums: dict[int, npt.NDArray[np.uint64]]
    """Per extent in use, shape (slots, parts per slot): the expected checksums."""
    next_generation: int
    records: int
    """Whole records in the file, dead and damaged ones included."""
    damaged: int
    """Records whose check failed."""
    dropped: int
    """Chunks that cannot be served: incomplete, overwritten, or outside the slab."""
    owners: dict[int, OwnerName] = field(default_factory=dict)
    """The names of those who own any of the chunks, as far as they are known."""
    journal_lost: bool = False
    """Whether there was a store, but no journal that could be read."""

    @property
    def live_records(self) -> int:
        """Records that the live chunks and their owners take."""
        parts = self.chunks["parts"].astype(np.int64)
        return int(np.maximum(1, -(-parts // SUMS_PER_RECORD)).sum()) + len(self.owners)

    @property
    def keys(self) -> bytes:
        """The n keys, joined."""
        return self.chunks["key"].tobytes()


def replay(data: bytes | memoryview, header: Header, extents: int) -> Recovered:
    """Read the records behind a journal's headers; a torn or garbled one costs its own chunk only."""
    records = records_in(data)
    valid = intact(records.data.cast("B"), header.journal_id) if len(records) else np.empty(0, bool)
    generations = records["generation"]
    valid &= generations < LIMIT  # or the next one would not fit its field
    next_generation = max(header.next_generation, int(generations[valid].max(initial=0)) + 1)

    put = np.flatnonzero(valid & (records["kind"] == PUT))
    slot_bytes = _slot_sizes(records, put, header, extents)
    tombstones = generations[valid & (records["kind"] == TOMBSTONE)]
    live = put[~np.isin(generations[put], tombstones)] if tombstones.size else put
    claimed = len(live)
    live = live[_consistent(records[live], header, slot_bytes)]
    live = _complete(records, valid, live)
    live = _last_of(generations[live], live)  # or the tombstone of one would end the other
    live = _last_of(records["offset"][live], live)
    live = _last_of_key(records, live)

    chunks = records[live]  # a copy, as fancy indexing makes
    in_use = np.zeros(extents, bool)
    in_use[(chunks["offset"] // header.extent_bytes).astype(np.int64)] = True
    slot_bytes[~in_use] = UNASSIGNED
    return Recovered(
        chunks=chunks,
        positions=live,
        slot_bytes=slot_bytes,
        sums=_sums(records, live, header, slot_bytes),
        next_generation=next_generation,
        records=len(records),
        damaged=int(len(records) - valid.sum()),
        dropped=claimed - len(live),
        owners=_owners(records[valid & (records["kind"] == OWNER)], chunks),
    )


def records_in(data: bytes | memoryview) -> npt.NDArray[np.void]:
    """The whole records behind a journal's headers, as they are: a view of `data`."""
    view = memoryview(data)[JOURNAL_HEADER_BYTES:]
    return np.frombuffer(view[: len(view) // RECORD_BYTES * RECORD_BYTES], RECORD)


def _owners(named: npt.NDArray[np.void], chunks: npt.NDArray[np.void]) -> dict[int, OwnerName]:
    return read_owners(named[np.isin(named["owner"], chunks["owner"])]) if named.size else {}


def sums_shape(slot_bytes: int, extent_bytes: int, part_bytes: int) -> tuple[int, int]:
    """Shape of the table of one extent's checksums: (slots, parts per slot)."""
    return extent_bytes // slot_bytes, -(-slot_bytes // part_bytes)


def _slot_sizes(
    records: npt.NDArray[np.void], put: npt.NDArray[np.int64], header: Header, extents: int
) -> npt.NDArray[np.int64]:
    """Slot size per extent: what the last PUT into it says."""
    slot_bytes = np.zeros(extents, np.int64)
    put = put[records["offset"][put] < extents * header.extent_bytes]
    where = (records["offset"][put] // header.extent_bytes).astype(np.int64)
    slot_bytes[where] = records["slot_bytes"][put]  # NumPy keeps the last of equals
    return slot_bytes


def _consistent(
    chunks: npt.NDArray[np.void], header: Header, slot_bytes: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Which chunks lie inside the slab, in slots of the size that their extent has now.

    A record whose check holds may still be anyone's: nothing in it is taken on trust.
    """
    inside = chunks["offset"] < len(slot_bytes) * header.extent_bytes
    extent, rest = np.divmod(np.where(inside, chunks["offset"], 0).astype(np.int64), header.extent_bytes)
    own, payload, stored = (
        chunks[name].astype(np.int64) for name in ("slot_bytes", "payload_bytes", "stored_bytes")
    )
    fits: npt.NDArray[np.bool_] = inside & (own == slot_bytes[extent])
    fits &= (own > 0) & (own % PAGE == 0) & (rest % np.maximum(own, 1) == 0)
    fits &= rest + own <= header.extent_bytes
    fits &= (stored > 0) & (stored % PAGE == 0) & (stored <= own)
    raw = chunks["codec"] == Codec.RAW
    fits &= (payload > 0) & (payload <= np.where(raw, stored, header.extent_bytes))
    fits &= chunks["codec"] <= _LAST_CODEC
    fits &= chunks["parts"] == -(-stored // header.part_bytes)
    return fits


def _complete(
    records: npt.NDArray[np.void], valid: npt.NDArray[np.bool_], put: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Those of `put` that all their MORE records follow."""
    more = (records["parts"][put].astype(np.int64) - 1) // SUMS_PER_RECORD
    whole = put + more < len(records)
    for i in range(1, int(more[whole].max(initial=0)) + 1):
        having = np.flatnonzero(whole & (more >= i))
        at = put[having] + i
        whole[having] = (
            valid[at]
            & (records["kind"][at] == MORE)
            & (records["generation"][at] == records["generation"][put[having]])
            & (records["parts"][at] == i * SUMS_PER_RECORD)
        )
    return put[whole]


def _last_of(values: npt.NDArray[np.uint64], put: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Those of `put` that are the last with their value, in order."""
    _, first_from_end = np.unique(values[::-1], return_index=True)
    return np.sort(put[len(put) - 1 - first_from_end])


def _last_of_key(records: npt.NDArray[np.void], put: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Those of `put` that are the last with their key. Only keys whose first 8 bytes agree are compared."""
    keys = np.ascontiguousarray(records["key"][put]).view(np.uint8).reshape(len(put), KEY_BYTES)
    heads = np.ascontiguousarray(keys[:, :8]).view("<u8")[:, 0]
    _, inverse, counts = np.unique(heads, return_inverse=True, return_counts=True)
    shared = np.flatnonzero(counts[inverse] > 1)
    last = {keys[i].tobytes(): i for i in shared.tolist()}
    keep = np.ones(len(put), bool)
    keep[shared] = False
    keep[list(last.values())] = True
    return put[keep]


def _sums(
    records: npt.NDArray[np.void],
    live: npt.NDArray[np.int64],
    header: Header,
    slot_bytes: npt.NDArray[np.int64],
) -> dict[int, npt.NDArray[np.uint64]]:
    extents, rest = np.divmod(records["offset"][live].astype(np.int64), header.extent_bytes)
    order = np.argsort(extents, kind="stable")
    bounds = np.flatnonzero(np.diff(extents[order], prepend=-1, append=-1)).tolist()
    tables = {}
    for start, end in itertools.pairwise(bounds):
        group = order[start:end]
        extent = int(extents[group[0]])
        size = int(slot_bytes[extent])
        table = np.zeros(sums_shape(size, header.extent_bytes, header.part_bytes), np.uint64)
        slots = rest[group] // size
        parts = table.shape[1]
        for first in range(0, parts, SUMS_PER_RECORD):
            having = records["parts"][live[group]] > first
            width = min(SUMS_PER_RECORD, parts - first)
            at = live[group[having]] + first // SUMS_PER_RECORD
            table[slots[having], first : first + width] = records["sums"][at][:, :width]
        tables[extent] = table
    return tables
