"""The bytes that reads are measured on: the same ones as a file per chunk, and in slabs."""

from __future__ import annotations

import hashlib
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import kvtier
from kvtier.cli.bench.place import drop_cache
from kvtier.config import GIB, MIB
from kvtier.errors import InvalidRequest, TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy.typing as npt

_EDGE = 64  # bytes at either end of a chunk that tell it from all others
_PUT_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class Amount:
    """How much to move: `chunks` of `chunk_bytes` bytes."""

    chunks: int
    chunk_bytes: int

    @classmethod
    def of(cls, gib: float, chunk_mib: float) -> Amount:
        """As many whole chunks as fit `gib`. Raises InvalidRequest if that is none, or not whole pages."""
        chunk_bytes = int(chunk_mib * MIB)
        if chunk_bytes < 64 << 10 or chunk_bytes % 4096:
            raise InvalidRequest(f"--chunk-mib is {chunk_mib}, needs at least 0.0625 and whole 4 KiB pages")
        chunks = int(gib * GIB) // chunk_bytes
        if chunks < 1:
            raise InvalidRequest(f"--gib is {gib}, below one chunk of {chunk_mib} MiB: raise it")
        return cls(chunks, chunk_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return self.chunks * self.chunk_bytes

    def capacity(self, parts: int) -> int:
        """Bytes of a store on `parts` devices that takes it all, with room for the journals."""
        share = -(-self.chunks // parts) * self.chunk_bytes
        return parts * (share * 5 // 4 + 4 * self.chunk_bytes + 8 * MIB)

    def on_disk(self, parts: int) -> int:
        """Bytes that files and slab take on each of `parts` devices. Raises InvalidRequest for too little."""
        if self.chunks < parts:
            raise InvalidRequest(f"{self.chunks} chunks do not go round {parts} devices: raise --gib")
        return -(-self.chunks // parts) * self.chunk_bytes + self.capacity(parts) // parts

    def staging(self) -> int:
        """Bytes of DRAM for chunks on their way to disk."""
        return max(4 * self.chunk_bytes, min(256 * MIB, self.nbytes))

    def settings(self) -> dict[str, Any]:
        """A store's settings for such chunks; what is not said is the default."""
        least = 2 * self.chunk_bytes
        large = {"landing": least} if least > 64 * MIB else {}
        return {"chunk_bytes": self.chunk_bytes, **large}

    def memory(self) -> npt.NDArray[np.uint8]:
        """Touched memory for all of it, page-aligned, huge pages where they can be had: a row per chunk."""
        mapping = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(mapping, np.uint8).reshape(self.chunks, self.chunk_bytes)
        memory[:] = 1
        return memory


def keys(count: int, label: str = "") -> list[kvtier.ChunkKey]:
    """Distinct keys, others for every label."""
    return [kvtier.ChunkKey(hashlib.sha256(b"%s %d" % (label.encode(), i)).digest()) for i in range(count)]


def check(result: kvtier.BatchResult, what: str) -> None:
    """Raise TierUnavailable unless everything was done."""
    if not result.ok:
        reasons = {kvtier.Reason(int(reason)).name.lower() for reason in result.reason if reason}
        raise TierUnavailable(f"{what}: {', '.join(sorted(reasons))}")


def open_store(paths: Sequence[Path], **settings: Any) -> kvtier.Store:
    """A store over all of `paths`, one for each device."""
    return kvtier.open(list(paths), **settings)


class Data:
    """The chunks as files, chunk `i` in directory `i` modulo their number, and in one store over all."""

    def __init__(self, directories: Sequence[Path], amount: Amount, on_chunk: Callable[[], object]) -> None:
        """Write everything; `on_chunk` is called twice per chunk."""
        self.amount = amount
        self.directories = directories
        self.keys = keys(amount.chunks)
        self.shares = [range(part, amount.chunks, len(directories)) for part in range(len(directories))]
        self.files = [directories[i % len(directories)] / "files" / str(i) for i in range(amount.chunks)]
        self.slabs = [directory / "slab" for directory in directories]
        self._edges = np.empty((amount.chunks, 2 * _EDGE), np.uint8)
        for directory in directories:
            (directory / "files").mkdir()
        for i, file in enumerate(self.files):
            payload = self._payload(i)
            self._edges[i] = _edges_of(payload)
            file.write_bytes(payload.data)
            drop_cache(file)
            on_chunk()
        self._fill_store(on_chunk)

    def drop_caches(self) -> None:
        """Have the next read of every file and slab go to the device."""
        for file in self.files:
            drop_cache(file)
        for slab in self.slabs:
            drop_cache(slab / "slab")

    def smudge(self, memory: npt.NDArray[np.uint8]) -> None:
        """Make memory differ from what is stored."""
        memory[:, :_EDGE] = memory[:, -_EDGE:] = 0

    def check(self, memory: npt.NDArray[np.uint8]) -> None:
        """Raise AssertionError unless every row begins and ends as its chunk does."""
        for i, row in enumerate(memory):
            if not (_edges_of(row) == self._edges[i]).all():
                raise AssertionError(f"chunk {i} was not read, or not rightly")

    def _payload(self, i: int) -> npt.NDArray[np.uint8]:
        draw = np.random.default_rng(i)
        return draw.integers(0, 2**64, self.amount.chunk_bytes // 8, np.uint64).view(np.uint8)

    def _fill_store(self, on_chunk: Callable[[], object]) -> None:
        step = max(1, _PUT_BYTES // self.amount.chunk_bytes)
        capacity = self.amount.capacity(len(self.slabs))
        with open_store(self.slabs, capacity=capacity, dram=0, **self.amount.settings()) as store:
            for start in range(0, self.amount.chunks, step):
                some = range(start, min(start + step, self.amount.chunks))
                put = store.put([self.keys[i] for i in some], [self._payload(i) for i in some], until="disk")
                check(put.result(), "cannot store the chunks to read")
                for _ in some:
                    on_chunk()
            store.flush().result()


def _edges_of(chunk: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.concatenate([chunk[:_EDGE], chunk[-_EDGE:]])
