"""The live chunks of a slab as journal records."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtier.config import page_up
from kvtier.format import PUT, RECORD, put_records, records_for

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvtier.format import Header
    from kvtier.index.cache import SlotCache


def snapshot(
    index: SlotCache, sums: dict[int, npt.NDArray[np.uint64]], header: Header
) -> npt.NDArray[np.void]:
    """Records of every chunk in the index, least recently used first."""
    pieces = []
    for row in index.by_age().tolist():
        offset, nbytes = index.offset[row], index.nbytes[row]
        extent, rest = divmod(offset, header.extent_bytes)
        size = int(index.slots.slot_bytes[extent])
        stored = page_up(nbytes)
        pieces.append(
            put_records(
                key=index.key(row),
                generation=index.generation[row],
                offset=offset,
                slot_bytes=size,
                payload_bytes=nbytes,
                stored_bytes=stored,
                sums=sums[extent][rest // size, : -(-stored // header.part_bytes)],
            )
        )
    return np.concatenate(pieces) if pieces else np.empty(0, RECORD)


def live_records(records: npt.NDArray[np.void], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    """The PUT records at `positions` with the MORE records behind each."""
    assert (records["kind"][positions] == PUT).all()
    counts = np.array([records_for(parts) for parts in records["parts"][positions].tolist()], np.int64)
    starts = np.cumsum(counts) - counts
    within = np.arange(counts.sum()) - np.repeat(starts, counts)
    live: npt.NDArray[np.void] = records[np.repeat(positions, counts) + within]
    return live
