"""What no policy can beat, and how far apart uses are: computed from the whole trace."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvtier.replay.trace import Trace


def infinite(trace: Trace, warm: float = 0.0) -> float:
    """The hit rate of a tier that never evicts, of the requests after the warm ones."""
    seen = bytearray(trace.unique)
    first, hits, references = trace.first_counted(warm), 0, 0
    for number, request in enumerate(trace.requests):
        if number >= first:
            references += len(request)
            hits += next((i for i, chunk in enumerate(request) if not seen[chunk]), len(request))
        for chunk in request:
            seen[chunk] = 1
    return hits / max(1, references)


def belady(trace: Trace, chunks: int, warm: float = 0.0) -> float:
    """The hit rate of a tier of so many chunks that knows the future (Belady, 1966): it drops, or does not
    take in at all, what is used next the latest; in one request the tail before the head. As everywhere,
    a chunk counts while all before it in its request are there.
    """
    upcoming = _next_uses(trace)
    never = len(trace.requests) << _DEPTH_BITS
    resident: dict[int, int] = {}  # chunk -> its next use
    latest: list[tuple[int, int]] = []  # -next use, chunk; entries whose chunk has another one are void
    first, hits, references, at = trace.first_counted(warm), 0, 0, 0
    for number, request in enumerate(trace.requests):
        if number >= first:
            references += len(request)
            hits += next((i for i, chunk in enumerate(request) if chunk not in resident), len(request))
        for chunk in request:
            use = upcoming[at]
            at += 1
            if use == never:
                resident.pop(chunk, None)
                continue
            resident[chunk] = use
            heapq.heappush(latest, (-use, chunk))
            while len(resident) > chunks:
                use, victim = heapq.heappop(latest)
                if resident.get(victim) == -use:
                    del resident[victim]
    return hits / max(1, references)


_DEPTH_BITS = 24


def _next_uses(trace: Trace) -> list[int]:
    """For every reference the next one to its chunk: its request, and its place there in the low bits."""
    following = [len(trace.requests) << _DEPTH_BITS] * trace.unique
    uses: list[int] = []
    for number in range(len(trace.requests) - 1, -1, -1):
        request = trace.requests[number]
        uses += [following[chunk] for chunk in reversed(request)]
        for place, chunk in enumerate(request):
            following[chunk] = number << _DEPTH_BITS | place
    uses.reverse()
    return uses


def reuse_distances(trace: Trace) -> npt.NDArray[np.int64]:
    """For every reference to a chunk that was used before: how many distinct chunks were since, itself
    included, each request counted from tail to head as tiers use it. An LRU tier of at least so many
    chunks has it (Mattson et al., 1970).
    """
    lengths = np.array([len(request) for request in trace.requests])
    starts = np.cumsum(lengths) - lengths
    reverse = np.repeat(2 * starts + lengths - 1, lengths) - np.arange(lengths.sum())
    flat = trace.flat()[reverse]
    order = np.argsort(flat, kind="stable")
    same = flat[order[1:]] == flat[order[:-1]]
    at, before = order[1:][same], order[:-1][same]
    arrange = np.argsort(at)
    at, before = at[arrange], before[arrange]
    distances: npt.NDArray[np.int64] = at - before - _larger_before(before)
    return distances


def _larger_before(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each of some distinct values, how many larger ones stand before it: a merge sort by bits."""
    count = len(values)
    ranks = np.empty(count, np.int64)
    ranks[np.argsort(values)] = np.arange(count)
    larger = np.zeros(count, np.int64)
    places = np.arange(count)  # of those in `ranks`, which is in the order of the bits looked at so far
    for bit in range(max(1, count).bit_length() - 1, -1, -1):
        high = ranks >> bit & 1
        ones = np.cumsum(high) - high
        group = ranks >> (bit + 1)
        begins = np.searchsorted(group, group)  # groups stand in order
        low = high == 0
        larger[places[low]] += (ones - ones[begins])[low]
        order = np.argsort(ranks >> bit, kind="stable")
        ranks, places = ranks[order], places[order]
    return larger


def histogram(distances: npt.NDArray[np.int64], references: int) -> list[dict[str, float]]:
    """Shares of all references by distance up to each power of two, from 1 on."""
    if not len(distances):
        return []
    bounds = 1 << np.arange(int(distances.max() - 1).bit_length() + 1)
    counts = np.bincount(np.searchsorted(bounds, distances), minlength=len(bounds))
    return [
        {"up_to": int(bound), "share": float(count) / references}
        for bound, count in zip(bounds.tolist(), counts.tolist(), strict=True)
    ]
