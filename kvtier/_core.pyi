"""The native extension. Import it through `kvtier._native` only."""

from array import array
from typing import Literal

import numpy as np
import numpy.typing as npt

has_uring: bool
"""Compiled with io_uring."""

class Engine:
    """Runs batches of checked reads and writes. Thread-safe; harmless in a forked child."""

    def __init__(self, kind: Literal["uring", "threads"], depth: int, max_bytes: int) -> None:
        """`depth` operations in flight, or threads; OSError if the system refuses."""

    def submit(
        self,
        id: int,
        ops: npt.NDArray[np.uint8],
        sums: npt.NDArray[np.uint64],
        results: npt.NDArray[np.int32],
    ) -> None:
        """Start a batch: `ops` is the byte view of an OP array, and is copied.

        The caller keeps `sums`, `results` and all memory alive until `wait` has returned `id`.
        Raises ValueError for a malformed operation, RuntimeError once closed: then nothing runs.
        """

    def wait(self, timeout_s: float) -> list[int]:
        """Ids of finished batches; [] after the timeout, and at once when no more will come."""

    def fileno(self) -> int:
        """An eventfd, readable while `wait` would not block."""

    def register(self, address: int, nbytes: int) -> bool:
        """Offer mapped memory for registered I/O; True if it was taken."""

    def close(self, timeout_s: float) -> bool:
        """Refuse new batches and wait; True if the kernel holds no memory any more."""

    def abandon(self) -> None:
        """End every wait and never touch callers' memory again; the kernel still may."""

    def in_flight(self) -> int:
        """Batches that have not finished."""

def find_all(keys: list[bytes], rows: array[int], stored: bytearray) -> list[int]:
    """Rows of keys of 32 bytes in the columns of a KeyTable, -1 where there is none."""

def replace_all(bound: list[int], keys: list[bytes], rows: array[int], stored: bytearray) -> None:
    """Bind bound rows of a KeyTable to keys that are not in it, instead of their own."""

def copy_many(
    src: npt.NDArray[np.uint64], dst: npt.NDArray[np.uint64], nbytes: npt.NDArray[np.uint64]
) -> None:
    """Copy nbytes[i] bytes from address src[i] to dst[i]; ranges must not overlap."""

def copy_hashed(
    src: npt.NDArray[np.uint64],
    dst: npt.NDArray[np.uint64],
    nbytes: npt.NDArray[np.uint64],
    sums: npt.NDArray[np.uint64],
) -> None:
    """copy_many that puts the xxh3_64 of each piece, with seed 0, into sums, in the same pass.

    Raises ValueError, before anything is copied, for pieces of at most 240 bytes.
    """

def xxh3_64(address: int, length: int, seed: int) -> int:
    """xxh3_64 of more than 240 bytes."""

def xxh3_parts(address: int, length: int, part_bytes: int, seed: int, out: npt.NDArray[np.uint64]) -> None:
    """xxh3_64 of every part, part j with seed + j (mod 2**64)."""

def split_planes16(src: int, nbytes: int, high: int, low: int) -> None:
    """Split 16-bit elements, rotated left by one bit, into upper bytes and lower ones.

    `high` has room for nbytes // 2 bytes, `low` for the rest, an odd last byte included; nothing overlaps.
    """

def join_planes16(high: int, low: int, nbytes: int, dst: int) -> None:
    """The inverse of `split_planes16`: `nbytes` bytes at `dst`."""

def checksum_path() -> Literal["portable", "avx2", "avx512"]:
    """The vector path in use."""

def set_checksum_path(name: Literal["auto", "portable", "avx2", "avx512"]) -> None:
    """Force a vector path for the whole process, for tests; ValueError where unsupported."""

def probe_uring() -> str:
    """Why io_uring does not work here; empty if it does."""

def features() -> dict[str, str]:
    """What this build can do on this machine, for people to read."""
