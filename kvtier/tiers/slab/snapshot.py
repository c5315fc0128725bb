"""The live chunks of a slab as journal records."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.format import PUT, RECORD, SUMS_PER_RECORD, ranges, with_sums

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from kvtier.format import Header
    from kvtier.index.cache import SlotCache

_BLOCK_ROWS = 1 << 14


def scan(
    index: SlotCache,
    sums: dict[int, npt.NDArray[np.uint64]],
    header: Header,
    lock: threading.Lock,
    check: Callable[[], None],
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
    """Records of the chunks in the index, and the positions of their PUTs, least recently used first.

    The index may change meanwhile: `lock` is held for a block of rows at a time. A chunk that was there
    all the time is found; of one that came or went, whoever journals that knows better. Raises what
    `check` raises, which is called between blocks.
    """
    blocks = [np.empty(0, RECORD)]
    touched = [np.empty(0, np.uint64)]
    pinned = [np.empty(0, bool)]
    start = 0
    while True:
        check()
        with lock:
            if start >= index.rows:
                break
            columns = index.columns(start, start + _BLOCK_ROWS)
            tables, slot_bytes = dict(sums), index.slots.slot_bytes.copy()
        start += _BLOCK_ROWS
        blocks.append(_records(columns, tables, slot_bytes, header))
        touched.append(columns["touched"])
        pinned.append(columns["pinned"])
    records = np.concatenate(blocks)
    age = np.lexsort((np.concatenate(touched), np.concatenate(pinned)))
    return records, np.flatnonzero(records["kind"] == PUT)[age]


def _records(
    columns: Mapping[str, npt.NDArray[Any]],
    tables: Mapping[int, npt.NDArray[np.uint64]],
    slot_bytes: npt.NDArray[np.int64],
    header: Header,
) -> npt.NDArray[np.void]:
    """Of the chunks in `columns`, in their order. A table may get the checksums of a slot's next use
    meanwhile: then this use is over, and its tombstone is in the journal.
    """
    extents, rest = np.divmod(columns["offset"], header.extent_bytes)
    puts = np.zeros(len(extents), RECORD)
    for name in ("key", "generation", "offset", "stored_bytes", "codec", "owner", "stored_at", "expires_at"):
        puts[name] = columns[name]
    puts["payload_bytes"] = columns["nbytes"]
    puts["slot_bytes"] = slot_bytes[extents]
    parts = -(-columns["stored_bytes"].astype(np.int64) // header.part_bytes)
    puts["parts"] = parts
    slots = rest // np.maximum(slot_bytes[extents], 1)
    starts = np.cumsum(parts) - parts
    joined = np.zeros(int(parts.sum()), np.uint64)
    order = np.argsort(extents, kind="stable")
    bounds = np.flatnonzero(np.diff(extents[order], prepend=-1, append=-1)).tolist()
    for first, last in itertools.pairwise(bounds):
        group = order[first:last]
        table = tables[int(extents[group[0]])]
        mask = np.arange(table.shape[1]) < parts[group, None]
        joined[ranges(starts[group], parts[group])] = table[slots[group]][mask]
    return with_sums(puts, joined)


def live_records(records: npt.NDArray[np.void], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    """The PUT records at `positions` with the MORE records behind each."""
    assert (records["kind"][positions] == PUT).all()
    live: npt.NDArray[np.void] = records[ranges(positions, record_counts(records, positions))]
    return live


def record_counts(records: npt.NDArray[np.void], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many records each of these chunks takes: shape (n,)."""
    parts = records["parts"][positions].astype(np.int64)
    counts: npt.NDArray[np.int64] = np.maximum(1, -(-parts // SUMS_PER_RECORD))
    return counts
