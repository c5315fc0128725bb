"""The steps at which a process can be made to die, each between two statements of the store.

The store knows nothing of this: `arm` wraps its own functions and the system calls under them, in a
process that is going to be killed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvtier.format import JOURNAL_MAGIC, OWNER, PUT, RECORD, RECORD_BYTES, TOMBSTONE

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

Phase = Literal["open", "load", "evict", "delete", "close"]


@dataclass(frozen=True)
class Step:
    """Die before or after a call, or when half of what it should write is written."""

    phase: Phase
    """When the step counts: while the store opens or closes, or under a load (of evictions, of deletes)."""
    function: str
    """`module:name` of what is wrapped."""
    moment: Literal["before", "after", "half", "some records"]
    only: Callable[..., bool] = lambda *args: True
    """Of the calls, by their arguments, those that count."""
    most: int = 30
    """The process dies at one of the first so many of them."""


def _of(name: str) -> Callable[..., bool]:
    """Calls on a descriptor of the file of that name."""
    return lambda fd, *args: os.readlink(f"/proc/self/fd/{fd}").endswith(f"/{name}")


def _records(kind: int, least: int = 1) -> Callable[..., bool]:
    """Appends of records of that kind to a journal."""

    def check(fd: int, data: Any, *args: Any) -> bool:
        if len(data) < least * RECORD_BYTES or not _of("journal")(fd):
            return False
        return bytes(data)[RECORD.fields["kind"][1]] == kind  # type: ignore[index]

    return check


def _is_write(path: Any, batch: Any) -> bool:
    return bool(batch.ops["write"].all())


def _evicts(path: Any, batch: Any) -> bool:
    return _is_write(path, batch) and path.tier.index.evicted > 0


_PATHS, _WRITES, _BACK = "kvtier.store.paths:", "kvtier.store.writes:", "kvtier.store.writeback:Writeback."
_TIER, _JOURNAL = "kvtier.tiers.slab.tier:SlabTier.", "kvtier.tiers.slab.journal:Journal."
_OPENING, _DIRECTORY = "kvtier.tiers.slab.opening:", "kvtier.tiers.slab.directory:"
_COMPACTOR = "kvtier.tiers.slab.compaction:Compactor."
_new = _of("journal.new")


def _is_tail(fd: int, data: Any, *args: Any) -> bool:
    """Writes of what was appended while a new journal was written: nothing else there ends a chunk."""
    if not _new(fd) or bytes(data[:8]) == JOURNAL_MAGIC:
        return False
    return bool((np.frombuffer(data, RECORD)["kind"] == TOMBSTONE).any())


STEPS = {
    "put: before the payload is copied": Step("load", _WRITES + "copy_many", "before"),
    "put: copied, nothing written": Step("load", _WRITES + "copy_many", "after"),
    "put: before it is encoded": Step("load", "kvtier.store.encoder:encode", "before"),
    "put: encoded, nothing written": Step("load", "kvtier.store.encoder:encode", "after"),
    "put: slot reserved, nothing written": Step("load", _PATHS + "DiskPath.submit", "before", _is_write),
    "put: half of the payloads written": Step("load", _PATHS + "DiskPath.submit", "half", _is_write),
    "put: payloads under way": Step("load", _PATHS + "DiskPath.submit", "after", _is_write),
    "put: payloads written, before the journal": Step("load", _BACK + "_on_done", "before"),
    "put: journalled, before the index": Step("load", _TIER + "journal_puts", "after"),
    "put: in the index": Step("load", _TIER + "insert", "after"),
    "put: before its outcome is told": Step("load", _BACK + "_after", "before"),
    "put: its outcome told": Step("load", _BACK + "_after", "after"),
    "journal: before an append": Step("load", _JOURNAL + "append", "before"),
    "journal: half a record": Step("load", "os:write", "half", _records(PUT)),
    "journal: some of several records": Step("load", "os:write", "some records", _records(PUT, 2), 10),
    "journal: half of an owner": Step("load", "os:write", "half", _records(OWNER), 10),
    "journal: an owner and not all its chunks": Step(
        "load", "os:write", "some records", _records(OWNER, 2), 10
    ),
    "journal: appended": Step("load", _JOURNAL + "append", "after"),
    "flush: before the sync": Step("load", _TIER + "sync", "before", most=6),
    "flush: the slab synced": Step("load", _JOURNAL + "sync", "before", most=6),
    "flush: all synced": Step("load", _TIER + "sync", "after", most=6),
    "compaction: before it begins": Step("load", _COMPACTOR + "compact", "before", most=2),
    "compaction: chunks collected": Step("load", "kvtier.tiers.slab.tier:scan", "after", most=2),
    "compaction: new file empty": Step("load", "os:write", "before", _new, most=1),
    "compaction: half a header or record": Step("load", "os:write", "half", _new, most=4),
    "compaction: chunks written": Step("load", "os:fsync", "before", _new, most=2),
    "compaction: chunks synced": Step("load", _COMPACTOR + "_catch_up", "before", most=2),
    "compaction: caught up": Step("load", _COMPACTOR + "_catch_up", "after", most=2),
    "compaction: half of what came meanwhile": Step("load", "os:write", "half", _is_tail, most=1),
    "compaction: new file complete": Step("load", _JOURNAL + "replace", "before", most=2),
    "compaction: renamed": Step("load", "os:rename", "after", most=2),
    "compaction: appends go to the new file": Step("load", _JOURNAL + "replace", "after", most=2),
    "compaction: before the old file is let go": Step("load", _JOURNAL + "unfollow", "after", most=2),
    "compaction: old file let go": Step("load", _COMPACTOR + "compact", "after", most=2),
    "compaction: before the directory is synced": Step(
        "load", "kvtier.tiers.slab.journal:sync_directory", "before", most=2
    ),
    "compaction: directory synced": Step("load", "kvtier.tiers.slab.journal:sync_directory", "after", most=2),
    "eviction: before the tombstone": Step(
        "evict", _TIER + "write_tombstones", "before", lambda tier: bool(tier._graves)
    ),
    "eviction: half a tombstone": Step("evict", "os:write", "half", _records(TOMBSTONE)),
    "eviction: some of several tombstones": Step(
        "evict", "os:write", "some records", _records(TOMBSTONE, 2), 10
    ),
    "eviction: tombstone written, slot as it was": Step(
        "evict", _PATHS + "DiskPath.submit", "before", _evicts
    ),
    "eviction: slot half rewritten": Step("evict", _PATHS + "DiskPath.submit", "half", _evicts),
    "eviction: slot being rewritten": Step("evict", _PATHS + "DiskPath.submit", "after", _evicts),
    "eviction: slot rewritten, before the journal": Step(
        "evict", _BACK + "_on_done", "before", lambda back, done: _evicts(done.context.path, done)
    ),
    "delete: before the tombstone": Step(
        "delete", _TIER + "write_tombstones", "before", lambda tier: bool(tier._graves)
    ),
    "delete: half a tombstone": Step("delete", "os:write", "half", _records(TOMBSTONE)),
    "delete: some of several tombstones": Step(
        "delete", "os:write", "some records", _records(TOMBSTONE, 2), 10
    ),
    "delete: tombstone written": Step(
        "delete", _TIER + "write_tombstones", "after", lambda tier: bool(tier._graves)
    ),
    "open: before the lock": Step("open", _DIRECTORY + "lock_directory", "before"),
    "open: lock file without a pid": Step("open", "os:pwrite", "before", _of("lock")),
    "open: locked": Step("open", _DIRECTORY + "lock_directory", "after"),
    "open: headers read": Step("open", _OPENING + "read_headers", "after"),
    "open: before the journal is replayed": Step("open", _OPENING + "replay", "before"),
    "open: journal replayed": Step("open", _OPENING + "replay", "after"),
    "open: rewrite, temporary file empty": Step("open", "os:write", "before", _new),
    "open: rewrite, half a header or record": Step("open", "os:write", "half", _new),
    "open: rewrite, temporary file complete": Step("open", "os:fsync", "before", _new),
    "open: rewrite, temporary file synced": Step("open", "os:rename", "before"),
    "open: rewrite, renamed": Step("open", "os:rename", "after"),
    "open: rewrite, directory synced": Step("open", _OPENING + "sync_directory", "after"),
    "open: slab without a header": Step("open", "os:pwrite", "before", _of("slab")),
    "open: half of the slab's header": Step("open", "os:pwrite", "half", _of("slab")),
    "open: slab's header not synced": Step("open", "os:fsync", "before", _of("slab")),
    "open: before the slab is reserved": Step("open", _OPENING + "open_slab", "before"),
    "open: slab sized, not reserved": Step("open", _DIRECTORY + "_reserve", "before"),
    "open: slab reserved": Step("open", _OPENING + "open_slab", "after"),
    "open: index loaded": Step("open", _TIER + "_load", "after"),
    "close: before the devices are closed": Step("close", _PATHS + "Paths.close", "before", most=1),
    "close: before the last tombstones": Step("close", _PATHS + "DiskPath.settle", "before"),
    "close: before the sync": Step("close", _TIER + "sync", "before"),
    "close: the slab synced": Step("close", _JOURNAL + "sync", "before"),
    "close: all synced": Step("close", _TIER + "sync", "after"),
    "close: journal closed": Step("close", _JOURNAL + "close", "after"),
    "close: lock let go": Step("close", _TIER + "close", "after"),
}


_FILES, _LEDGER, _DIR = (
    f"kvtier.tiers.files.{name}." for name in ("tier:FilesTier", "ledger:Ledger", "directory:Directory")
)
_ledger = _of("ledger")

FILE_STEPS = {
    "put: before room is taken": Step("load", _FILES + "prepare", "before"),
    "put: room taken, no temporary": Step("load", _DIR + "create", "before"),
    "put: temporary without its size": Step("load", "kvtier.tiers.files.directory:_reserve", "before"),
    "put: temporary created": Step("load", _DIR + "create", "after"),
    "put: room taken, nothing written": Step("load", _FILES + "prepare", "after"),
    "put: half of the files written": Step("load", _PATHS + "DiskPath.submit", "half", _is_write),
    "put: files under way": Step("load", _PATHS + "DiskPath.submit", "after", _is_write),
    "put: files written": Step("load", _FILES + "commit", "before"),
    "put: before a file has its name": Step("load", _DIR + "publish", "before"),
    "put: a file has its name, no event": Step("load", _DIR + "publish", "after"),
    "put: all have their names, told to others": Step("load", _FILES + "commit", "after"),
    "put: in the index": Step("load", _FILES + "insert", "after"),
    "ledger: locked": Step("load", _LEDGER + "_lock", "after"),
    "ledger: half an event or header": Step("load", "os:pwrite", "half", _ledger),
    "ledger: before an event or header": Step("load", "os:pwrite", "before", _ledger),
    "ledger: an event or header written": Step("load", "os:pwrite", "after", _ledger),
    "flush: before the sync": Step("load", _FILES + "sync", "before", most=6),
    "flush: all synced": Step("load", _FILES + "sync", "after", most=6),
    "eviction: before a file is removed": Step("evict", _DIR + "remove", "before"),
    "eviction: a file removed": Step("evict", _DIR + "remove", "after"),
    "eviction: removed, not told to others": Step("evict", _FILES + "_bury_one", "after"),
    "delete: before a file is removed": Step("delete", _DIR + "remove", "before"),
    "delete: a file removed": Step("delete", _DIR + "remove", "after"),
    "open: directories made": Step("open", _DIR + "__init__", "after"),
    "open: ledger made": Step("open", _DIR + "open_ledger", "after"),
    "open: ledger locked": Step("open", _LEDGER + "_lock", "after"),
    "open: before a header": Step("open", "os:pwrite", "before", _ledger),
    "open: half a header": Step("open", "os:pwrite", "half", _ledger),
    "open: a header": Step("open", "os:pwrite", "after", _ledger),
    "open: swept": Step("open", _DIR + "sweep", "after"),
    "open: index loaded": Step("open", _FILES + "_open", "after"),
    "close: before the devices are closed": Step("close", _PATHS + "Paths.close", "before", most=1),
    "close: before the sync": Step("close", _FILES + "sync", "before"),
    "close: all synced": Step("close", _FILES + "sync", "after"),
    "close: closed": Step("close", _FILES + "close", "after"),
}
FILE_STEPS = {f"files, {name}": step for name, step in FILE_STEPS.items()}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def arm(step: Step, nth: int, rng: random.Random) -> None:
    """From now on, have this process die at the `nth` time that it comes to `step`."""
    module, _, name = step.function.partition(":")
    *outer, name = name.split(".")
    owner = functools.reduce(getattr, outer, importlib.import_module(module))
    real = getattr(owner, name)
    left, lock = [nth], threading.Lock()

    def is_it(*args: Any) -> bool:
        if not step.only(*args):
            return False
        with lock:
            left[0] -= 1
            return left[0] == 0

    @functools.wraps(real)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        now = is_it(*args)
        if now and step.moment == "before":
            die()
        if now and step.moment in ("half", "some records"):
            _half(args, rng, whole_records=step.moment == "some records")
            die()
        result = real(*args, **kwargs)
        if now:
            die()
        return result

    setattr(owner, name, wrapper)


def _half(args: tuple[Any, ...], rng: random.Random, *, whole_records: bool) -> None:
    """Do a part of what a call should have written: `os.write`, `os.pwrite`, or a batch for the device."""
    if not isinstance(args[0], int):
        _half_batch(args[1], rng)
        return
    fd, data = args[0], bytes(args[1])
    if whole_records:
        cut = rng.randrange(1, len(data) // RECORD_BYTES) * RECORD_BYTES
    else:
        cut = rng.choice([i for i in range(1, len(data)) if i % RECORD_BYTES])
    os.lseek(fd, *((0, os.SEEK_END) if len(args) == 2 else (args[2], os.SEEK_SET)))
    os.writev(fd, [data[:cut]])


def _half_batch(batch: Any, rng: random.Random) -> None:
    """Some operations of a batch in full, one in part, the others not at all, as a device may leave them."""
    done = rng.randrange(len(batch.ops))
    for i, op in enumerate(batch.ops):
        nbytes = int(op["length"])
        if i > done:
            break
        data = ctypes.string_at(int(op["address"]), nbytes if i < done else rng.randrange(1, nbytes))
        fd = os.open(f"/proc/self/fd/{op['fd']}", os.O_WRONLY)  # without O_DIRECT
        os.pwritev(fd, [data], int(op["offset"]))
        os.fsync(fd)
        os.close(fd)
