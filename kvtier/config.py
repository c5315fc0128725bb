"""Settings as plain data. `kvtier.settings` parses files, environment and keywords into them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path  # noqa: TC003  the settings' types are read at run time
from typing import Literal, get_args

from kvtier.errors import InvalidRequest

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGE = 4096
MAX_EXTENT_BYTES = 256 * MIB
MIN_JOURNAL_BYTES = 64 * KIB
MAX_PAYLOAD_BYTES = 4 * GIB - 64 * KIB  # 65,535 of the smallest parts

EngineName = Literal["auto", "uring", "threads", "aio"]
OnIncompatible = Literal["error", "discard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Everything a store is built from. Sizes in bytes, times in seconds.

    Raises InvalidRequest at construction for a value outside its range.
    """

    path: Path | None = None
    """Directory of the disk tier; None: DRAM only."""
    capacity: int = 0
    """Most bytes the disk tier may ever occupy, journal included; 0: as it was created."""
    dram: int = GIB
    """Bytes of cached chunks in DRAM; 0: the disk tier alone, through the landing slots."""
    landing: int = 64 * MIB
    """Bytes of DRAM set apart for reads and writes that find no room among the cached chunks."""
    chunk_bytes: int = 4 * MIB
    """The payload size you mean to store. Slots are carved to fit it, and capacities are checked
    against it; smaller payloads work, the largest that fits is `largest_payload`."""
    part_bytes: int = MIB
    """Bytes per checksum, a power of two from 64 KiB to 1 MiB. Fixed when the disk tier is created."""
    engine: EngineName = "auto"
    """I/O engine: `uring`, `threads`, `aio` (aiofiles, buffered), or `auto` for the best of the first
    two that works here."""
    io_threads: int = 16
    """Threads of the `threads` engine, operations in flight of `aio`."""
    io_depth: int = 64
    """Operations in flight in the `uring` engine."""
    io_window: int = 64 * MIB
    """Bytes being read, and apart from them being written, at any time."""
    max_queued_chunks: int = 8192
    """Chunks of puts that may wait to be copied; further ones are REFUSED with `queue_full`."""
    get_timeout: float = 30.0
    """Default deadline of get and read."""
    put_timeout: float = 60.0
    """Default deadline of put and commit."""
    close_timeout: float = 30.0
    """Most time close() waits for accepted puts and for the device."""
    on_incompatible: OnIncompatible = "error"
    """A directory written by another format version: raise, or `discard` its content."""

    def __post_init__(self) -> None:
        self._at_least("capacity", 0)
        self._at_least("dram", 0)
        for name in ("chunk_bytes", "io_threads", "io_depth", "max_queued_chunks"):
            self._at_least(name, 1)
        if self.chunk_bytes > MAX_PAYLOAD_BYTES:
            raise InvalidRequest(
                f"chunk_bytes is {self.chunk_bytes}, but a payload holds at most {MAX_PAYLOAD_BYTES}"
            )
        part = self.part_bytes
        if part & (part - 1) or not 64 * KIB <= part <= MIB:
            raise InvalidRequest(f"part_bytes is {part}, needs a power of two from 64KiB to 1MiB")
        for name in ("get_timeout", "put_timeout", "close_timeout"):
            if not getattr(self, name) > 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)}, needs to be above 0 seconds")
        for name, choices in (("engine", EngineName), ("on_incompatible", OnIncompatible)):
            if getattr(self, name) not in get_args(choices):
                options = ", ".join(repr(choice) for choice in get_args(choices))
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}, needs one of {options}")
        slot = page_up(self.chunk_bytes)
        if self.path is None and self.capacity:
            raise InvalidRequest(
                "capacity is given but no path: give the directory of the disk tier, or leave capacity out "
                "for DRAM alone"
            )
        if self.path is None and self.dram == 0:
            raise InvalidRequest("a store needs a tier: give a path for the disk tier, or dram above 0")
        if 0 < self.dram < slot:
            raise InvalidRequest(
                f"dram is {self.dram} bytes, below one chunk of {slot}: raise dram, set it to 0, "
                "or lower chunk_bytes to the size of your chunks"
            )
        if self.path is not None and self.capacity and extent_area(self.capacity, slot) < slot:
            raise InvalidRequest(
                f"capacity is {self.capacity} bytes, below one chunk of {slot} and the journal: raise "
                "capacity, or lower chunk_bytes to the size of your chunks"
            )
        for name in ("landing", "io_window"):
            if getattr(self, name) < slot:
                raise InvalidRequest(
                    f"{name} is {getattr(self, name)} bytes, needs room for one chunk of {slot}"
                )

    def _at_least(self, name: str, least: int) -> None:
        if getattr(self, name) < least:
            raise InvalidRequest(f"{name} is {getattr(self, name)}, needs to be at least {least}")


FIELDS = tuple(field.name for field in fields(StoreConfig))


def page_up(nbytes: int) -> int:
    """`nbytes` rounded up to whole 4 KiB pages."""
    return -(-nbytes // PAGE) * PAGE


def journal_limit(capacity: int, chunk_bytes: int) -> int:
    """Bytes of a disk tier's capacity kept for its journal, a rewrite included.

    Three records of 128 bytes for every chunk of the expected size; and room for smaller ones: down
    to about 6 KiB each in a tier of up to 16 GiB, to 96 KiB in a large one.
    """
    expected = 3 * 128 * (capacity // page_up(chunk_bytes))
    return max(MIN_JOURNAL_BYTES, expected, min(capacity // 16, GIB), capacity // 256)


def extent_area(capacity: int, chunk_bytes: int) -> int:
    """Bytes of a disk tier's capacity left for extents: all but the slab's header and the journal."""
    return capacity - journal_limit(capacity, chunk_bytes) - PAGE


def extent_size(area: int, chunk_bytes: int) -> int:
    """Bytes per extent: about a sixteenth of `area`, whole chunks of the expected size.

    Extents are what slot sizes are dealt out in, so a few suffice; above 256 MiB nothing is gained.
    """
    slot = page_up(chunk_bytes)
    return max(1, min(area // 16, MAX_EXTENT_BYTES) // slot) * slot
