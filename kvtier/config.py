"""Settings as plain data. `kvtier.settings` parses files, environment and keywords into them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping  # noqa: TC003  the settings' types are read at run time
from dataclasses import dataclass, field, fields, replace
from pathlib import Path  # noqa: TC003
from typing import Literal, get_args

from kvtier.errors import InvalidRequest
from kvtier.owner import check_tenant

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGE = 4096
MAX_EXTENT_BYTES = 256 * MIB
MAX_EXTENTS = 1 << 20
MIN_JOURNAL_BYTES = 64 * KIB
MAX_PAYLOAD_BYTES = 4 * GIB - 64 * KIB  # 65,535 of the smallest parts

EngineName = Literal["auto", "uring", "threads", "aio"]
OnIncompatible = Literal["error", "discard"]
AdmissionName = Literal["always", "second-touch", "ghost"]
PolicyName = Literal["lru", "s3fifo", "sieve", "fifo", "reuse"]
Access = Literal["owner", "group"]
Kind = Literal["slab", "files"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Everything a store is built from. Sizes in bytes, times in seconds.

    Raises InvalidRequest at construction for a value outside its range.
    """

    paths: tuple[Path, ...] = ()
    """Directories of the disk tier, one for each device; none: DRAM only. Chunks are spread over them
    by their bandwidth."""
    capacity: int = 0
    """Most bytes the disk tier may ever occupy, journals included, in equal shares over its paths; 0:
    as it was created."""
    kind: Kind = "slab"
    """Kind of the disk tier, on all paths: `slab`, one file that is this process's alone, or `files`, a file
    per chunk in a directory that the processes of one host share."""
    dram: int = GIB
    """Bytes of cached chunks in DRAM; 0: the disk tier alone, through the landing slots."""
    check_dram: bool = False
    """Check chunks in DRAM at every get, as those on disk always are; leases are not checked."""
    scrub: int = 0
    """Bytes per second at which chunks in DRAM and on disk are read again in the background, and bad ones
    dropped, while nothing else is to be done. 0: not at all, as nothing depends on it: whatever comes from
    a disk is checked, and a device may have others who want its bandwidth."""
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
    io_window: int = 0
    """Bytes in flight on each path, of reads and apart from them of writes; 0: tuned by measuring."""
    max_queued_chunks: int = 8192
    """Chunks of puts that may wait to be copied; further ones are REFUSED with `queue_full`."""
    open_timeout: float = 120.0
    """Most time that opening one path may take: for a device that hangs. A slow one may be at it for long,
    reading a journal of up to a GiB and reserving space."""
    get_timeout: float = 30.0
    """Default deadline of get and read."""
    put_timeout: float = 60.0
    """Default deadline of put and commit."""
    close_timeout: float = 30.0
    """Most time close() waits for accepted puts and for the device."""
    ttl: float = 0.0
    """Seconds after which a chunk is gone, unless its put says otherwise; 0: never."""
    quotas: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Most bytes of the disk tier that a tenant's chunks may take up, over all its namespaces, in equal
    shares over the paths; in DRAM the same part of it, or one chunk. Of a store in DRAM alone: bytes of
    DRAM. Above it the tenant's own oldest chunks make room."""
    on_incompatible: OnIncompatible = "error"
    """A directory written by another format version: raise, or `discard` its content."""
    free_space: int = 0
    """Bytes that the disk tier leaves free on each path's file system: asked for at open and, where space
    cannot be reserved, before writes; below it puts are REFUSED with `no_space`. 0, since what is
    reserved takes no more later, and where the directory has a file system of its own all of it is meant."""
    endurance: int = 0
    """Bytes that may be written to each path per day, journal included; 0: no limit. Held within 1/24 over
    any day and over restarts; what is not written for it is REFUSED with `admission`, tails before heads."""
    admission: AdmissionName = "always"
    """What is written to disk: all, or with `second-touch` what is put a second time while its key is
    remembered. Off since it loses 15 of 37 points of hit rate on conversations, whose chunks come once.
    `ghost` asks for the second time only where something would have to be evicted for the first."""
    policy: PolicyName = "lru"
    """Who leaves the disk tier when it is full: `lru`, `s3fifo`, `sieve`, `fifo`, or `reuse`, which learns
    after which pause chunks come again. docs/OPERATING.md says which of them is for what."""
    dram_policy: PolicyName = "lru"
    """The same in DRAM."""
    access: Access = "owner"
    """Who may open what this store makes on disk: the user alone (files 0600, directories 0700), or the
    users of the directory's `group` too (0660, 2770), whatever the umask. What is there keeps its mode."""

    def __post_init__(self) -> None:
        self._at_least("capacity", 0)
        self._at_least("dram", 0)
        self._at_least("free_space", 0)
        self._at_least("endurance", 0)
        self._at_least("scrub", 0)
        self._at_least("io_window", 0)
        for name in ("chunk_bytes", "io_threads", "io_depth", "max_queued_chunks"):
            self._at_least(name, 1)
        if self.chunk_bytes > MAX_PAYLOAD_BYTES:
            raise InvalidRequest(
                f"chunk_bytes is {self.chunk_bytes}, but a payload holds at most {MAX_PAYLOAD_BYTES}"
            )
        part = self.part_bytes
        if part & (part - 1) or not 64 * KIB <= part <= MIB:
            raise InvalidRequest(f"part_bytes is {part}, needs a power of two from 64KiB to 1MiB")
        for name in ("open_timeout", "get_timeout", "put_timeout", "close_timeout"):
            if not getattr(self, name) > 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)}, needs to be above 0 seconds")
        if not 0 <= self.ttl < math.inf:
            raise InvalidRequest(f"ttl is {self.ttl}, needs seconds of at least 0; 0 is never")
        for name, choices in (
            ("engine", EngineName), ("on_incompatible", OnIncompatible), ("admission", AdmissionName),
            ("access", Access), ("kind", Kind), ("policy", PolicyName), ("dram_policy", PolicyName),
        ):  # fmt: skip
            if (value := getattr(self, name)) not in get_args(choices):
                options = ", ".join(repr(choice) for choice in get_args(choices))
                near = difflib.get_close_matches(str(value), get_args(choices), n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise InvalidRequest(f"{name} is {value!r}, needs one of {options}{hint}")
        for name in ("endurance", "free_space", "scrub"):
            if self.kind == "files" and getattr(self, name):
                raise InvalidRequest(f"{name} is for the disk tier of kind 'slab': leave it out with 'files'")
        slot = page_up(self.chunk_bytes)
        for i, path in enumerate(self.paths):
            if path in self.paths[:i]:
                raise InvalidRequest(f"paths names {path} twice: give each device's directory once")
        if not self.paths and self.capacity:
            raise InvalidRequest(
                "capacity is given but no path: give the directory of the disk tier, or leave capacity out "
                "for DRAM alone"
            )
        if not self.paths and self.dram == 0:
            raise InvalidRequest("a store needs a tier: give a path for the disk tier, or dram above 0")
        if 0 < self.dram < slot:
            raise InvalidRequest(
                f"dram is {self.dram} bytes, below one chunk of {slot}: raise dram, set it to 0, "
                "or lower chunk_bytes to the size of your chunks"
            )
        each = self.capacity // max(1, len(self.paths))
        room = extent_area(each, slot) if self.kind == "slab" else each - ledger_bytes(each)
        if self.paths and self.capacity and room < slot:
            share = f" {each} for each path," if len(self.paths) > 1 else ""
            log = "journal" if self.kind == "slab" else "ledger"
            raise InvalidRequest(
                f"capacity is {self.capacity} bytes,{share} below one chunk of {slot} and the {log}: raise "
                "capacity, or lower chunk_bytes to the size of your chunks"
            )
        if self.landing < slot:
            raise InvalidRequest(f"landing is {self.landing} bytes, needs room for one chunk of {slot}")
        if 0 < self.io_window < slot:
            raise InvalidRequest(
                f"io_window is {self.io_window} bytes, needs room for one chunk of {slot}, or 0 to be tuned"
            )

        for tenant, quota in self.quotas.items():
            check_tenant(tenant)
            if not tenant:
                raise InvalidRequest("quotas names a tenant '', needs a name")
            if quota // max(1, len(self.paths)) < slot:
                raise InvalidRequest(
                    f"the quota of {tenant!r} is {quota} bytes, needs room for one chunk of {slot}"
                    + (" on each path" if len(self.paths) > 1 else "")
                )

    @property
    def path(self) -> Path | None:
        """The first path; None for DRAM alone."""
        return self.paths[0] if self.paths else None

    @property
    def file_mode(self) -> int:
        """Permissions of the files that the disk tier makes."""
        return 0o600 if self.access == "owner" else 0o660

    @property
    def directory_mode(self) -> int:
        """Permissions of the directories that the disk tier makes; files in them get the group's id."""
        return 0o700 if self.access == "owner" else 0o2770

    @property
    def signs_dram(self) -> bool:
        """Whether the checksum of a chunk is taken when it enters DRAM."""
        return self.check_dram or self.scrub > 0

    def of_path(self, path: Path) -> StoreConfig:
        """The settings of one of several paths: its share of capacity and quotas."""
        count = len(self.paths)
        quotas = {tenant: quota // count for tenant, quota in self.quotas.items()}
        return replace(self, paths=(path,), capacity=self.capacity // count, quotas=quotas)

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


def ledger_events(capacity: int) -> int:
    """Events that the ledger of a tier of kind `files` remembers: more than come in a quarter of a second."""
    return min(4096, max(256, capacity // (64 * KIB)))


def ledger_bytes(capacity: int) -> int:
    """Bytes of such a tier's capacity that its ledger takes: a page, and 80 bytes for each event."""
    return page_up(PAGE + 80 * ledger_events(capacity))


def extent_area(capacity: int, chunk_bytes: int) -> int:
    """Bytes of a disk tier's capacity left for extents: all but the slab's header and the journal."""
    return capacity - journal_limit(capacity, chunk_bytes) - PAGE


def extent_size(area: int, chunk_bytes: int) -> int:
    """Bytes per extent: about a sixteenth of `area`, whole chunks of the expected size.

    Extents are what slot sizes are dealt out in, so a few suffice; above 256 MiB nothing is gained.
    """
    slot = page_up(chunk_bytes)
    return max(1, min(area // 16, MAX_EXTENT_BYTES) // slot) * slot
