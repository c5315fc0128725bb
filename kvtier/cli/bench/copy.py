"""`kvtier bench copy`: hits in DRAM and paged copies, against the best copy loop there is."""

from __future__ import annotations

import ctypes
import dataclasses
import statistics
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from cyclopts import Parameter

import kvtier
from kvtier import _native
from kvtier.cli.bench import options, report
from kvtier.cli.bench.data import Amount, check, keys
from kvtier.cli.bench.measure import Contender, Meter, Sample, interleave, rows
from kvtier.cli.bench.stores import wait_until_populated
from kvtier.config import KIB, MIB, PAGE
from kvtier.device import HostCopier, PagedKV
from kvtier.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

_COLUMNS = {"gb_s": "GB/s", "fraction_of_best": "of best loop", "cpu_s_per_gb": "CPU s/GB"}
_LOOPS = ("memmove", "copy_many")
_BLOCKS = 16  # per chunk: 256 tokens in the usual blocks of 16


def copy(
    *,
    gib: options.Gib = 0.25,
    chunk_mib: options.ChunkMib = 2.0,
    block_kib: Annotated[
        tuple[int, ...],
        Parameter(negative="", help="KiB of a block in one layer and plane; repeat it for several."),
    ] = (32, 4),
    rounds: options.Rounds = 9,
    seed: options.Seed = 0,
    json: options.Json = None,
) -> None:
    """Get chunks that are in DRAM, gather and scatter them, against ctypes.memmove and the native copy.

    All on one thread, over the same two buffers; a paged cache has its blocks in random order there. The
    first round is discarded; figures are medians, and fractions medians of each round's ratio to the faster
    loop. GB are 10**9 bytes, counted once. Memory holds what is copied four times.
    """
    amount = Amount.of(gib, chunk_mib)
    options.check(rounds, json)
    for kib in block_kib:
        if kib < 4 or amount.chunk_bytes % (_BLOCKS * kib * KIB):
            raise InvalidRequest(
                f"--block-kib is {kib}, needs whole pages of 4 KiB, and {_BLOCKS} of that in each "
                f"layer and plane of a chunk of {chunk_mib:g} MiB"
            )
    with ExitStack() as stack:
        bench = _Copies(amount, seed)
        dram = amount.nbytes * 5 // 4 + 4 * amount.chunk_bytes + 32 * MIB
        gets = []
        for name, check_dram in (("kvtier-get", False), ("kvtier-get-checked", True)):
            store = kvtier.open(dram=dram, check_dram=check_dram, **amount.settings())
            gets.append(bench.get(stack.enter_context(store), name))
        contenders = [*bench.loops(), *gets, *bench.paged(block_kib)]
        step = stack.enter_context(report.progress((rounds + 1) * len(contenders)))
        samples = interleave(contenders, rounds, seed, step)
    found = [dataclasses.asdict(row) for row in rows(contenders, samples)]
    loops = [samples[name] for name in _LOOPS if name in samples]
    best = [max(sample.gb_s for sample in passes) for passes in zip(*loops, strict=True)]
    for row in found:
        ratios = [gb_s / limit for gb_s, limit in zip(row["gb_s_of_rounds"], best, strict=True)]
        row["fraction_of_best"] = statistics.median(ratios)
    absent = {} if _native.core is not None else dict.fromkeys(("copy_many", "copy_hashed"), _native.why_not)
    report.show(f"copies, {gib:g} GiB in chunks of {chunk_mib:g} MiB", found, _COLUMNS, absent)
    figures = {"gib": gib, "chunk_mib": chunk_mib, "rounds": rounds, "seed": seed, "rows": found}
    report.write_json(json, "memory", {**figures, "absent": absent})


class _Copies:
    """Passes from one buffer to the other; every page is numbered, to see where it went."""

    def __init__(self, amount: Amount, seed: int) -> None:
        self._amount = amount
        self._draw = np.random.default_rng(seed)
        self._source, self._memory = amount.memory(), amount.memory()
        self._source[:] = self._draw.integers(0, 256, amount.chunk_bytes, np.uint8)
        numbers = _page_numbers(self._source)
        numbers[:] = np.arange(len(numbers))
        self._numbers = numbers.copy()

    def loops(self) -> list[Contender]:
        """Plain copies, chunk by chunk."""
        width = self._amount.chunk_bytes
        sources, targets = [_addresses(array) for array in (self._source, self._memory)]
        lengths = np.full(len(sources), width, np.uint64)

        def memmove() -> None:
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                ctypes.memmove(target, source, width)

        found = [self._contender("memmove", memmove, self._numbers)]
        if (core := _native.core) is None:
            return found

        def copy_many() -> None:
            core.copy_many(sources, targets, lengths)

        sums, expected = np.empty(len(sources), np.uint64), self._sums(core)

        def copy_hashed() -> None:
            core.copy_hashed(sources, targets, lengths, sums)
            if (sums != expected).any():
                raise AssertionError("copy_hashed found other checksums")

        return [
            *found,
            self._contender("copy_many", copy_many, self._numbers),
            self._contender("copy_hashed", copy_hashed, self._numbers, "with the xxh3_64 of every chunk"),
        ]

    def _sums(self, core: Any) -> npt.NDArray[np.uint64]:
        """The checksum of every chunk."""
        width = self._amount.chunk_bytes
        return np.array([core.xxh3_64(row.ctypes.data, width, 0) for row in self._source], np.uint64)

    def get(self, store: kvtier.Store, name: str) -> Contender:
        """Hits in a store's DRAM."""
        names = keys(self._amount.chunks)
        wait_until_populated(store)
        check(store.put(names, self._source).result(), "cannot store the chunks to copy")

        def get() -> None:
            check(store.get(names, into=self._memory).result(), "a chunk in DRAM was not found")

        return self._contender(name, get, self._numbers)

    def paged(self, block_kib: Sequence[int]) -> list[Contender]:
        """Gathers and scatters; their names tell the block size if it is not the first."""
        found = []
        for kib in block_kib:
            suffix = "" if kib == block_kib[0] else f"-{kib}k"
            found += self._gather_and_scatter(kib * KIB, suffix)
        return found

    def _gather_and_scatter(self, block_bytes: int, suffix: str) -> list[Contender]:
        chunks, width = self._source.shape
        regions = width // (_BLOCKS * block_bytes)
        table = self._draw.permutation(chunks * _BLOCKS).reshape(chunks, _BLOCKS)
        paged = (regions, chunks * _BLOCKS, block_bytes)
        gatherer, scatterer = [
            HostCopier(PagedKV.of(list(array.reshape(paged)))) for array in (self._source, self._memory)
        ]
        pages = block_bytes // PAGE
        numbers = self._numbers.reshape(regions, -1, pages)
        gathered = numbers[:, table].swapaxes(0, 1).reshape(-1)
        scattered = np.empty_like(numbers)
        scattered[:, table] = self._numbers.reshape(chunks, regions, _BLOCKS, pages).swapaxes(0, 1)
        detail = f"{_BLOCKS} blocks of {block_bytes // KIB} KiB in each of {regions} layers and planes"
        return [
            self._contender(
                f"gather{suffix}", lambda: gatherer.gather(table, self._memory), gathered, detail
            ),
            self._contender(
                f"scatter{suffix}",
                lambda: scatterer.scatter(self._source, table),
                scattered.reshape(-1),
                detail,
            ),
        ]

    def _contender(
        self, name: str, call: Callable[[], None], expected: npt.NDArray[Any], detail: str = ""
    ) -> Contender:
        """A row that must leave the pages of the target numbered as `expected`."""

        def run() -> Sample:
            found = _page_numbers(self._memory)
            found[:] = -1
            with Meter(None, self._amount.nbytes) as meter:
                call()
            if not (found == expected).all():
                raise AssertionError(f"{name} did not copy everything to its place")
            return meter.sample()

        return Contender(name, run, detail)


def _page_numbers(array: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """The first eight bytes of every page, as a view."""
    return array.reshape(-1).view(np.int64)[:: PAGE // 8]


def _addresses(array: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    return np.array([row.ctypes.data for row in array], np.uint64)
