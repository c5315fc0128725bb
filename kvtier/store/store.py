"""Store: the facade. It checks every call before anything happens, then hands it to reader or writer."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self, get_args

from kvtier.buffers import regions
from kvtier.errors import InvalidRequest
from kvtier.io.base import ALIGNMENT
from kvtier.store.core import Core
from kvtier.store.lease import Reservation, Until
from kvtier.store.put import Put
from kvtier.store.reads import Reader
from kvtier.store.transfer import Transfer
from kvtier.store.writes import Writer
from kvtier.tiers.base import NO_ROW
from kvtier.types import KEY_BYTES, BatchResult, ChunkKey, FlushResult, Reason, Status

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike
    from types import TracebackType

    from kvtier.buffers import Buffers
    from kvtier.config import StoreConfig
    from kvtier.store.lease import Lease


class Store:
    """Chunks of KV cache in DRAM and on disk. Thread-safe; a context manager.

    Everything is a batch: `keys` are the chunks of a prefix, head first, each 32 bytes. Outcomes come
    per key, in the caller's order, as a `BatchResult`. A miss, a failing disk or a full tier are
    outcomes; errors are for wrong calls. Every method raises StoreClosed after `close` and in a
    forked child.
    """

    def __init__(self, config: StoreConfig) -> None:
        """Open the tiers. See `kvtier.open`, which also reads settings, for what is raised."""
        self.config = config
        self._core = Core(config)
        self._reader = Reader(self._core)
        self._writer = Writer(self._core)
        self._core.reads_are_idle = self._reader.is_idle
        self._core.writes_are_idle = self._writer.writeback.is_idle
        self._core.pumps = [self._reader.pump, self._writer.writeback.pump]
        self._close = Closing(self._core, self._reader, self._writer)
        # The collector may run anywhere, even under the store's lock: leave it to another thread.
        self._finalizer = weakref.finalize(self, self._core.copier.submit, self._close.unless_begun)
        self._finalizer.atexit = False
        _remember(self)

    def match(self, keys: Sequence[ChunkKey]) -> int:
        """Length of the longest prefix of `keys` that is stored. Memory only, no I/O."""
        keys = _checked(keys)
        with self._core.lock:
            self._core.check_open()
            return self._match(keys)

    def get(
        self,
        keys: Sequence[ChunkKey],
        *,
        into: Buffers,
        timeout: float | None = None,
        lend: bool = False,
    ) -> Transfer[BatchResult]:
        """Read payloads into the caller's memory: `into[i]` receives exactly the chunk of `keys[i]`.

        `into` is borrowed until the transfer is `released`. Targets whose key is not a HIT are left
        as they are, or hold garbage. With `lend` the disk writes straight into them: then each must
        start at, and be a multiple of, 4096 bytes. After `timeout` seconds (default
        `get_timeout`) what is not there is FAILED with `deadline`.

        Raises InvalidRequest for a wrong number, size or kind of targets.
        """
        keys = _checked(keys)
        _check_count(keys, into, "into")
        addresses, lengths = regions(into, name="into", writable=True)
        _check_apart(addresses, lengths)
        if lend:
            for i, (address, nbytes) in enumerate(zip(addresses, lengths, strict=True)):
                if address % ALIGNMENT or nbytes % ALIGNMENT:
                    raise InvalidRequest(
                        f"into[{i}] is {nbytes} bytes at {address:#x}, needs an address and a length that "
                        f"are multiples of {ALIGNMENT} to be lent: align it, or call without lend"
                    )
        seconds = _check_timeout(timeout, self.config.get_timeout)
        return self._reader.get(keys, addresses, lengths, _kept(into), timeout=seconds, lend=lend)

    def read(self, keys: Sequence[ChunkKey], *, timeout: float | None = None) -> Transfer[Lease]:
        """Lease read-only views of the chunks' slots in DRAM, reading them from disk first if need be.

        The views belong to the store and are valid until `Lease.release`. If DRAM has no room for
        all of them, the head is leased and the tail is REFUSED with `no_space`.
        """
        keys = _checked(keys)
        return self._reader.lease(keys, timeout=_check_timeout(timeout, self.config.get_timeout))

    def prefetch(self, keys: Sequence[ChunkKey], *, timeout: float | None = None) -> Transfer[BatchResult]:
        """Bring chunks into DRAM ahead of a get; HIT per key that is there when the transfer is done.

        Nothing keeps them there: `pin` does. Of more than DRAM holds the head is brought, and the
        tail is REFUSED with `no_space`.
        """
        keys = _checked(keys)
        return self._reader.prefetch(keys, timeout=_check_timeout(timeout, self.config.get_timeout))

    def put(
        self,
        keys: Sequence[ChunkKey],
        source: Buffers,
        *,
        until: Until = "dram",
        timeout: float | None = None,
    ) -> Transfer[BatchResult]:
        """Store payloads: `source[i]` under `keys[i]`. Returns before anything is copied.

        `source` is borrowed until the transfer is `copied`. The outcome comes when the chunks are
        in DRAM, or with `until="disk"` when they survive the death of the process; on their way to
        disk they are either way. A key that is stored already is KNOWN, and nothing is moved.

        Raises InvalidRequest for a wrong number, size or kind of sources, or `until`.
        """
        keys = _checked(keys)
        _check_count(keys, source, "source")
        self._check_until(until)
        addresses, lengths = regions(source, name="source", writable=False)
        self._check_lengths(lengths, "source")
        seconds = _check_timeout(timeout, self.config.put_timeout)
        return self._writer.put(keys, addresses, lengths, _kept(source), until=until, timeout=seconds)

    def reserve(self, keys: Sequence[ChunkKey], nbytes: int) -> Reservation:
        """Writable views of slots, one of `nbytes` for each of `keys` that is not stored yet.

        Fill them, then `commit`; leaving the context without that gives them back. Takes what is
        free or can be evicted now, head first; the rest is REFUSED with `no_space`.
        """
        keys = _checked(keys)
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
            raise InvalidRequest(f"nbytes is {nbytes!r}, needs a whole number of at least 1")
        self._check_lengths([nbytes], "nbytes")
        transfer: Transfer[BatchResult] = Transfer()
        put = Put(keys, transfer, None, [], [nbytes] * len(keys), "dram", 0.0)
        self._writer.reserve(put)

        def commit(until: Until, timeout: float | None) -> Transfer[BatchResult]:
            self._check_until(until)
            put.until = until
            put.deadline = time.monotonic() + _check_timeout(timeout, self.config.put_timeout)
            self._writer.commit(put)
            return transfer

        views = [
            put.slots[i][0].view(put.slots[i][1], nbytes) if i in put.slots else None
            for i in range(len(keys))
        ]
        return Reservation(
            self._reservation_result(put),
            views,
            commit,
            partial(self._writer.abort, put),
            self._core.copier.submit,
        )

    def _reservation_result(self, put: Put) -> BatchResult:
        result = put.result()
        with self._core.lock:
            for i, key in enumerate(put.keys):
                if i in put.slots:
                    result.status[i] = Status.STORED
                elif self._match([key]) or self._writer.writeback.under_way(key):
                    result.status[i] = Status.KNOWN
                else:
                    result.status[i], result.reason[i] = Status.REFUSED, Reason.NO_SPACE
        return result

    @contextmanager
    def pin(self, keys: Sequence[ChunkKey]) -> Iterator[int]:
        """Keep the longest stored prefix of `keys` from eviction inside the block; yields its length."""
        keys = _checked(keys)
        pinned = []
        with self._core.lock:
            self._core.check_open()
            count = self._match(keys)
            for key in keys[:count]:
                for tier in self._core.tiers:
                    if (row := tier.find(key)) != NO_ROW:
                        tier.index.pin(row)
                        pinned.append((tier, row))
        try:
            yield count
        finally:
            with self._core.lock:
                for tier, row in reversed(pinned):
                    tier.index.unpin(row)
                self._core.changed.notify_all()
            self._core.pump()

    def delete(self, keys: Sequence[ChunkKey]) -> Transfer[int]:
        """Forget chunks in every tier, puts under way included; resolves to how many were stored.

        What was leased or is being read stays valid for those who have it.
        """
        keys = _checked(keys)
        count = 0
        with self._core.lock:
            self._core.check_open()
            for key in dict.fromkeys(keys):
                rows = [(tier, row) for tier in self._core.tiers if (row := tier.find(key)) != NO_ROW]
                if rows or self._writer.writeback.under_way(key):
                    count += 1
                for tier, row in rows:
                    tier.discard(row)
            self._writer.forget(set(keys))
            self._core.changed.notify_all()
        transfer: Transfer[int] = Transfer()
        transfer._set_released()
        self._writer.bury(transfer, count)
        self._core.pump()
        return transfer

    def flush(self) -> Transfer[FlushResult]:
        """Resolves when everything put before is on disk, and the device has confirmed it."""
        return self._writer.flush()

    def stats(self) -> dict[str, int | float | str]:
        """Counters and gauges by name: requests by outcome and reason, and per tier its content."""
        core = self._core
        with core.lock:
            core.check_open()
            numbers: dict[str, int | float | str] = dict(core.counters)
            for tier in core.tiers:
                numbers.update({f"{tier.name}.{name}": value for name, value in tier.stats().items()})
            numbers["landing.pinned_slots"] = core.landing.index.pinned()
        numbers["populated_bytes"] = core.populated
        numbers["engine"] = core.engine.name if core.engine else "none"
        return numbers

    def close(self) -> None:
        """Finish accepted puts and running I/O for at most `close_timeout` seconds, then let go.

        What could not be finished comes out as FAILED with `closed`. Idempotent.
        """
        self._finalizer.detach()
        self._close()

    def __enter__(self) -> Self:
        with self._core.lock:
            self._core.check_open()
        return self

    def __repr__(self) -> str:
        core = self._core
        where = core.disk.path if core.disk else "DRAM alone"
        state = (
            "closed" if core.closed else ", ".join(f"{len(t.index)} chunks in {t.name}" for t in core.tiers)
        )
        return f"<Store on {where}: {state}>"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _match(self, keys: Sequence[bytes]) -> int:
        """What the disk last failed to read does not count, so that the caller puts it again."""
        checks = [tier.index.is_sound for tier in self._core.tiers]
        for i, key in enumerate(keys):
            for is_sound in checks:
                if is_sound(key):
                    break
            else:
                return i
        return len(keys)

    def _check_until(self, until: str) -> None:
        if until not in get_args(Until):
            raise InvalidRequest(f"until is {until!r}, needs 'dram' or 'disk'")
        if until == "disk" and self._core.disk is None:
            raise InvalidRequest("until is 'disk', but this store has no disk tier: open it with a path")

    def _check_lengths(self, lengths: list[int], name: str) -> None:
        largest = self._core.largest_payload
        for i, nbytes in enumerate(lengths):
            if nbytes > largest:
                where = name if name == "nbytes" else f"{name}[{i}]"
                raise InvalidRequest(
                    f"{where} is {nbytes} bytes, but the slots of this store hold at most {largest}: "
                    "open it with chunk_bytes of that size"
                )


def open_store(source: str | PathLike[str] | None = None, **settings: Any) -> Store:
    """Open a store: `kvtier.open("/cache", capacity="64GiB")` or `kvtier.open("kvtier.toml")`.

    `source` is the disk tier's directory, a `.toml` file of settings, or None for DRAM alone.
    `settings` are the fields of `StoreConfig`, sizes also as "64GiB"; `KVTIER_*` variables come
    second, the file third.

    Raises InvalidRequest for a wrong setting, StoreInUse if another store holds the directory,
    IncompatibleStore if something else or another version is in it, and TierUnavailable if it
    cannot be used (permissions, free space, no io_uring).
    """
    from kvtier.settings import load

    return Store(load(source, settings))


def _checked(keys: Sequence[ChunkKey]) -> tuple[ChunkKey, ...]:
    """The keys, apart from the caller's container, which it may change while a transfer runs."""
    if not isinstance(keys, Sequence) or isinstance(keys, bytes | bytearray | memoryview | str):
        raise InvalidRequest(f"keys is {type(keys).__name__}, needs a sequence of {KEY_BYTES}-byte keys")
    keys = tuple(keys)
    for i, key in enumerate(keys):
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            got = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            raise InvalidRequest(f"keys[{i}] is {got}, needs {KEY_BYTES} bytes: see kvtier.chunk_keys")
    return keys


def _kept(buffers: Buffers) -> object:
    """What keeps the buffers alive, whatever becomes of a list that holds them."""
    return tuple(buffers) if isinstance(buffers, Sequence) else buffers


def _check_count(keys: Sequence[bytes], buffers: Buffers, name: str) -> None:
    scalar = getattr(buffers, "ndim", 1) == 0
    if scalar or isinstance(buffers, bytes | bytearray | memoryview) or not hasattr(buffers, "__len__"):
        raise InvalidRequest(f"{name} is {type(buffers).__name__}, needs a sequence with a buffer per key")
    if len(buffers) != len(keys):
        flat = getattr(buffers, "ndim", 2) == 1
        hint = "; a flat array is one buffer per element: give it a row per key" if flat else ""
        raise InvalidRequest(
            f"{name} has {len(buffers)} buffers, needs one for each of the {len(keys)} keys{hint}"
        )


def _check_apart(addresses: list[int], lengths: list[int]) -> None:
    end = previous = -1
    for address, nbytes, i in sorted(zip(addresses, lengths, range(len(addresses)), strict=True)):
        if address < end:
            raise InvalidRequest(f"into[{i}] overlaps into[{previous}], needs memory of its own for each key")
        end, previous = address + nbytes, i


def _check_timeout(timeout: float | None, default: float) -> float:
    if timeout is None:
        return default
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise InvalidRequest(f"timeout is {timeout!r}, needs seconds above 0, or None for the default")
    return float(timeout)


class Closing:
    """Closes a store once, for whoever comes first: its owner, the collector, or the interpreter's end."""

    def __init__(self, core: Core, reader: Reader, writer: Writer) -> None:
        self._core = core
        self._reader = reader
        self._writer = writer
        self._lock = threading.Lock()

    def __call__(self) -> None:
        """Close, or wait for whoever is doing it."""
        with self._lock:
            self._close()

    def forget_after_fork(self) -> None:
        """In a forked child: whoever was closing is not here."""
        self._lock = threading.Lock()

    def unless_begun(self) -> None:
        """Close if nobody has begun to: for the copier, whose end the others wait for."""
        if self._lock.acquire(blocking=False):
            try:
                self._close()
            finally:
                self._lock.release()

    def _close(self) -> None:
        core = self._core
        with core.lock:
            if core.closed:
                return
            core.closed = True
        timeout = min(core.config.close_timeout, threading.TIMEOUT_MAX)
        end = time.monotonic() + timeout
        self._reader.fail_waiting()
        self._writer.stop(timeout)
        core.stop(max(0.1, end - time.monotonic()))
        self._reader.give_up()
        self._writer.writeback.give_up()
        _unfinished.discard(self)


_open_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_unfinished: set[Closing] = set()  # of stores that are open, or were dropped and are not closed yet
_hooked = False


def _remember(store: Store) -> None:
    """Have forked children close their copy of the store, and the interpreter's end close this one."""
    global _hooked
    _open_stores.add(store)
    _unfinished.add(store._close)
    if not _hooked:
        os.register_at_fork(after_in_child=_close_in_child)
        atexit.register(_close_at_exit)
        _hooked = True


def _close_at_exit() -> None:
    for close in list(_unfinished):
        close()


def _close_in_child() -> None:
    _unfinished.clear()
    for store in list(_open_stores):
        store._finalizer.detach()
        store._close.forget_after_fork()
        store._core.forget_after_fork()
        store._reader.forget_after_fork()
