"""Store: the facade. It checks every call before anything happens, then hands it to reader or writer."""

from __future__ import annotations

import math
import time
import weakref
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self, get_args

from kvtier.buffers import regions
from kvtier.codec import parse_codec
from kvtier.errors import InvalidRequest, TierUnavailable
from kvtier.io.base import ALIGNMENT
from kvtier.metrics import Histogram
from kvtier.owner import Owner, check_tenant, public_name
from kvtier.store import tenants
from kvtier.store.arguments import (
    check_apart,
    check_count,
    check_owner,
    check_timeout,
    checked_keys,
    kept,
)
from kvtier.store.closing import Closing, remember
from kvtier.store.core import Core
from kvtier.store.follow import Follower
from kvtier.store.lease import Reservation, Until
from kvtier.store.put import Put
from kvtier.store.reads import Reader
from kvtier.store.recording import record
from kvtier.store.transfer import Transfer
from kvtier.store.writes import Writer
from kvtier.tiers.base import NO_ROW
from kvtier.types import BatchResult, ChunkKey, FlushResult, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from os import PathLike
    from types import TracebackType

    from kvtier.buffers import Buffers
    from kvtier.config import StoreConfig
    from kvtier.settings import Source
    from kvtier.store.lease import Lease
    from kvtier.store.recording import Operation, Recording
    from kvtier.store.request import Progress
    from kvtier.types import OwnerUsage


_NO_THREAD = "can't start new thread"  # all that Python says


class Store:
    """Chunks of KV cache in DRAM and on disk. Thread-safe; a context manager.

    Everything is a batch: `keys` are the chunks of a prefix, head first, each 32 bytes. Outcomes come
    per key, in the caller's order, as a `BatchResult`. A miss, a failing disk or a full tier are
    outcomes; errors are for wrong calls. Every method raises StoreClosed after `close` and in a
    forked child.
    """

    def __init__(self, config: StoreConfig, *, wall: Callable[[], float] = time.time) -> None:
        """Open the tiers. See `kvtier.open`, which also reads settings, for what is raised.

        `wall` tells the seconds since 1970 that chunks expire by.
        """
        self.config = config
        self._recording: Recording | None = None
        try:
            self._core = Core(config, wall)
            self._reader = Reader(self._core)
            self._writer = Writer.start(self._core)
        except RuntimeError as error:
            if _NO_THREAD not in str(error):
                raise
            raise TierUnavailable(
                f"cannot open the store, for it {error}: raise the limits of processes (ulimit -u) and memory"
            ) from error
        self._core.reads_are_idle = self._reader.is_idle
        self._core.writes_are_idle = self._writer.writeback.is_idle
        self._core.pumps = [self._reader.pump, self._writer.writeback.pump]
        self._close = Closing(self._core, self._reader, self._writer)
        # The collector may run anywhere, even under the store's lock: leave it to another thread.
        self._finalizer = weakref.finalize(self, self._core.copier.submit, self._close.unless_begun)
        self._finalizer.atexit = False
        remember(self)

    def match(self, keys: Sequence[ChunkKey]) -> int:
        """Length of the longest prefix of `keys` that is stored. Memory only, no I/O."""
        keys = checked_keys(keys)
        with self._core.lock:
            self._core.check_open()
            matched = self._match(keys)
        self._note("match", keys)
        return matched

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
        keys = checked_keys(keys)
        check_count(keys, into, "into")
        addresses, lengths = regions(into, name="into", writable=True)
        check_apart(addresses, lengths)
        if lend:
            for i, (address, nbytes) in enumerate(zip(addresses, lengths, strict=True)):
                if address % ALIGNMENT or nbytes % ALIGNMENT:
                    raise InvalidRequest(
                        f"into[{i}] is {nbytes} bytes at {address:#x}, needs an address and a length that "
                        f"are multiples of {ALIGNMENT} to be lent: align it, or call without lend"
                    )
        seconds = check_timeout(timeout, self.config.get_timeout)
        self._note("get", keys, lengths)
        return self._reader.get(keys, addresses, lengths, kept(into), timeout=seconds, lend=lend)

    def read(
        self,
        keys: Sequence[ChunkKey],
        *,
        timeout: float | None = None,
        on_progress: Progress | None = None,
    ) -> Transfer[Lease]:
        """Lease read-only views of the chunks' slots in DRAM, reading them from disk first if need be.

        The views belong to the store and are valid until `Lease.release`. If DRAM has no room for
        all of them, the head is leased and the tail is REFUSED with `no_space`.

        With `on_progress` the disk reads all chunks side by side, from front to back, rather than one after
        the other; in operations of 1 to 4 MiB, of whole parts. Until the transfer is done,
        `on_progress(i, view, nbytes)` is called on threads of the store, so be brief: the first `nbytes`
        bytes of `keys[i]` are in `view`, checked. More of them with each call, all of them at a HIT; None
        and -1 once it is MISS or FAILED. What was shown stays until the lease that the transfer brings is
        released, whatever the outcome. Encoded chunks, and those of kind "files", come as a whole.
        """
        keys = checked_keys(keys)
        seconds = check_timeout(timeout, self.config.get_timeout)
        self._note("get", keys)
        return self._reader.lease(keys, timeout=seconds, on_progress=on_progress)

    def prefetch(self, keys: Sequence[ChunkKey], *, timeout: float | None = None) -> Transfer[BatchResult]:
        """Bring chunks into DRAM ahead of a get; HIT per key that is there when the transfer is done.

        Nothing keeps them there: `pin` does. Of more than DRAM holds the head is brought, and the
        tail is REFUSED with `no_space`.
        """
        keys, seconds = checked_keys(keys), check_timeout(timeout, self.config.get_timeout)
        self._note("prefetch", keys)
        return self._reader.prefetch(keys, timeout=seconds)

    def put(
        self,
        keys: Sequence[ChunkKey],
        source: Buffers,
        *,
        until: Until = "dram",
        codec: str = "raw",
        owner: Owner | None = None,
        ttl: float | None = None,
        timeout: float | None = None,
    ) -> Transfer[BatchResult]:
        """Store payloads: `source[i]` under `keys[i]`. Returns before anything is copied.

        `source` is borrowed until the transfer is `copied`. The outcome comes when the chunks are
        in DRAM, or with `until="disk"` when they survive the death of the process; on their way to
        disk they are either way, unless the settings `endurance` or `admission` speak against it: with
        `until="disk"` that is REFUSED with `admission`. A key that is stored already is KNOWN, and nothing
        is moved.

        `codec` is how the disk tier stores them: "raw", "lz4", or "lz4-16bit" for elements of 16 bits;
        raw whatever does not get smaller. `stats` tells what it saves; bfloat16 KV comes to 0.84 of its
        size with "lz4-16bit", at half a GB/s, and to 1.0 with "lz4".

        `owner` is whom the chunks count for, in quotas, `owners` and `delete_all`. After `ttl` seconds,
        whole ones, rounded up, by the machine's clock, a chunk is gone: everything takes it as absent
        (0: never; default `StoreConfig.ttl`). A KNOWN chunk keeps the owner and the time it has.

        Raises InvalidRequest for a wrong number, size or kind of sources, `until`, `codec`, `owner` or
        `ttl`.
        """
        keys = checked_keys(keys)
        chosen = parse_codec(codec)
        check_count(keys, source, "source")
        self._check_until(until)
        addresses, lengths = regions(source, name="source", writable=False)
        self._check_lengths(lengths, "source")
        seconds = check_timeout(timeout, self.config.put_timeout)
        name, expires_at = check_owner(owner).name, self._expires_at(ttl)
        self._note("put", keys, lengths)
        return self._writer.put(
            keys, addresses, lengths, kept(source), until=until, timeout=seconds, codec=chosen,
            owner=name, expires_at=expires_at,
        )  # fmt: skip

    def reserve(self, keys: Sequence[ChunkKey], nbytes: int, *, owner: Owner | None = None) -> Reservation:
        """Writable views of slots, one of `nbytes` for each of `keys` that is not stored yet.

        Fill them, then `commit`; leaving the context without that gives them back. Takes what is
        free or can be evicted now, head first; the rest is REFUSED with `no_space`, or with `quota` if
        all that the owner's tenant may have is in use.
        """
        keys = checked_keys(keys)
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
            raise InvalidRequest(f"nbytes is {nbytes!r}, needs a whole number of at least 1")
        self._check_lengths([nbytes], "nbytes")
        transfer: Transfer[BatchResult] = Transfer()
        name = check_owner(owner).name
        put = Put(keys, transfer, None, [], [nbytes] * len(keys), "dram", 0.0, owner=name)
        self._writer.reserve(put)

        def commit(
            until: Until, codec: str, ttl: float | None, timeout: float | None
        ) -> Transfer[BatchResult]:
            self._check_until(until)
            put.codec = parse_codec(codec)
            put.until = until
            put.expires_at = self._expires_at(ttl)
            put.deadline = time.monotonic() + check_timeout(timeout, self.config.put_timeout)
            self._note("put", keys, put.lengths)
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
                    result.status[i], result.reason[i] = Status.REFUSED, self._writer.why_no_room(put, i)
        return result

    @contextmanager
    def pin(self, keys: Sequence[ChunkKey]) -> Iterator[int]:
        """Keep the longest stored prefix of `keys` from eviction inside the block; yields its length.

        It does not keep chunks from being deleted, nor beyond their time.
        """
        keys = checked_keys(keys)
        pinned = []
        self._note("pin", keys)
        with self._core.lock:
            self._core.check_open()
            count = self._match(keys)
            for key in keys[:count]:
                for tier in self._core.tiers:
                    if (row := tier.index.find(key)) != NO_ROW:
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
        keys = checked_keys(keys)
        count = 0
        with self._core.lock:
            self._core.check_open()
            for key in dict.fromkeys(keys):
                rows = [(tier, row) for tier in self._core.tiers if (row := tier.find(key)) != NO_ROW]
                if rows or self._writer.writeback.under_way(key):
                    count += 1
                for tier, row in rows:
                    tier.delete(row)
            self._writer.forget(set(keys))
            self._core.changed.notify_all()
        transfer: Transfer[int] = Transfer()
        transfer._set_released()
        self._writer.bury(transfer, count)
        self._core.pump()
        return transfer

    def delete_all(self, *, namespace: bytes | str | None = None, tenant: str | None = None) -> Transfer[int]:
        """Forget every chunk of a tenant, of a namespace, or of a tenant within a namespace, as `delete`
        does; resolves to how many were stored.

        `namespace` is `Namespace.digest()`, or its public name as `owners` shows it.

        Raises InvalidRequest if neither is given, or for what can be no namespace or tenant.
        """
        if namespace is None and tenant is None:
            raise InvalidRequest("delete_all got neither namespace nor tenant, needs one of them")
        if tenant is not None:
            check_tenant(tenant)
        count = tenants.delete(
            self._core, self._writer, None if namespace is None else public_name(namespace), tenant
        )
        transfer: Transfer[int] = Transfer()
        transfer._set_released()
        self._writer.bury(transfer, count)
        self._core.pump()
        return transfer

    def owners(self) -> list[OwnerUsage]:
        """What each owner holds in each tier, for operators: neither salts nor keys come out of it."""
        return tenants.holdings(self._core)

    def follow(self) -> Follower:
        """What becomes stored from now on and what goes, for whoever keeps a picture of it elsewhere."""
        with self._core.lock:
            self._core.check_open()
        return Follower(self._core)

    def record(self, path: str | PathLike[str]) -> Recording:
        """Write what this store is asked for to a new file, until the recording or the store is closed:
        a trace for `kvtier replay`. It has no tokens and no text, and keys only as hashes that nobody can
        compare with other recordings; gzipped if the name ends in `.gz`.

        It slows no call: what comes faster than it is written is left out and counted in `dropped`.

        Raises InvalidRequest if the file exists, has no directory, or the store is being recorded already,
        and TierUnavailable if it cannot be created.
        """
        with self._core.lock:
            self._core.check_open()
        if self._recording is not None and not self._recording.is_closed:
            raise InvalidRequest(f"the store is recorded to {self._recording.path} already: close that first")
        self._recording = record(path, self.config.file_mode)
        return self._recording

    def _note(self, operation: Operation, keys: Sequence[ChunkKey], lengths: Sequence[int] = ()) -> None:
        if self._recording is not None:
            self._recording.note(operation, keys, sum(lengths))

    def flush(self) -> Transfer[FlushResult]:
        """Resolves when everything put before is on disk, and the devices have confirmed it.

        After `put_timeout` seconds `synced` is False, whatever the devices are at.
        """
        return self._writer.flush()

    def stats(self) -> dict[str, int | float | str]:
        """Counters and gauges by name: requests by outcome and reason, per tier its content, and the
        bytes of every tenant that has a quota.
        """
        core = self._core
        with core.lock:
            core.check_open()
            numbers: dict[str, int | float | str] = dict(core.counters)
            numbers.update({f"dram.{name}": value for name, value in core.dram.stats().items()})
            numbers.update({f"disk.{name}": value for name, value in core.paths.stats().items()})
            for tenant in self.config.quotas:
                dram, *disk = [tier.index.holdings.by_tenant[tenant] for tier in core.tiers]
                numbers[f"tenant.{tenant}.dram_bytes"] = dram
                numbers[f"tenant.{tenant}.disk_bytes"] = sum(disk)
            numbers["landing.pinned_slots"] = core.landing.index.pinned()
            numbers["codec.pinned_slots"] = self._writer.writeback.encoder.pinned()
        numbers["populated_bytes"] = core.populated
        numbers["engine"] = core.paths[0].engine.name if core.paths else "none"
        return numbers

    def histograms(self) -> dict[str, Histogram]:
        """Of each tier, `dram` and `disk`: `TIER.residence`, how long chunks were there when they were
        evicted to make room, and `TIER.reuse_gap`, how long ago a chunk that a get asks for there came
        there, or was last asked for. The caller's; since the store was opened.
        """
        core = self._core
        found: dict[str, Histogram] = {}
        with core.lock:
            core.check_open()
            for name, tiers in (("dram", core.tiers[:1]), ("disk", core.tiers[1:])):
                for of in ("residence", "reuse_gap"):
                    merged = found[f"{name}.{of}"] = Histogram()
                    for tier in tiers:
                        merged.merge(getattr(tier.index.lifetimes, of))
        return found

    def close(self) -> None:
        """Finish accepted puts and running I/O for at most `close_timeout` seconds, then let go.

        What could not be finished comes out as FAILED with `closed`. Idempotent.
        """
        self._finalizer.detach()
        self._close()
        if self._recording is not None:
            self._recording.close()

    def __enter__(self) -> Self:
        with self._core.lock:
            self._core.check_open()
        return self

    def __repr__(self) -> str:
        core = self._core
        where = ", ".join(str(path) for path in self.config.paths) or "DRAM alone"
        content = [f"{len(core.dram.index)} chunks in dram"]
        if core.paths:
            content.append(f"{sum(len(path.tier.index) for path in core.paths)} chunks in disk")
        state = "closed" if core.closed else ", ".join(content)
        return f"<Store on {where}: {state}>"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _match(self, keys: Sequence[bytes]) -> int:
        """What a disk last failed to read, or one that is out, does not count: the caller puts it again."""
        core = self._core
        there = [core.dram, *(path.tier for path in core.paths if not path.health.is_down)]
        checks = [tier.index.is_sound for tier in there]
        for i, key in enumerate(keys):
            for is_sound in checks:
                if is_sound(key):
                    break
            else:
                return i
        return len(keys)

    def _expires_at(self, ttl: float | None) -> int:
        """When chunks put now expire, in seconds since 1970; 0 for never."""
        seconds = self.config.ttl if ttl is None else ttl
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise InvalidRequest(f"ttl is {seconds!r}, needs seconds of at least 0; 0 is never")
        return self._core.dram.index.expiry.end(seconds)

    def _check_until(self, until: str) -> None:
        if until not in get_args(Until):
            raise InvalidRequest(f"until is {until!r}, needs 'dram' or 'disk'")
        if until == "disk" and not self._core.paths:
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


def open_store(source: Source = None, **settings: Any) -> Store:
    """Open a store: `kvtier.open("/cache", capacity="64GiB")` or `kvtier.open("kvtier.toml")`.

    `source` is the disk tier's directory, or a list of them for several devices, a `.toml` file of
    settings, or None for DRAM alone.
    `settings` are the fields of `StoreConfig`, sizes also as "64GiB"; `KVTIER_*` variables come
    second, the file third.

    Raises InvalidRequest for a wrong setting, StoreInUse if another store holds the directory,
    IncompatibleStore if something else or another version is in it, and TierUnavailable if it
    cannot be used (permissions, free space, no io_uring).
    """
    from kvtier.settings import load

    return Store(load(source, settings))
