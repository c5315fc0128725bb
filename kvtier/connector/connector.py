"""Connector: the facade. It checks every call, then hands it to the mover as an operation."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from kvtier.codec import parse_codec
from kvtier.connector.blocks import BlockMap
from kvtier.connector.layers import LayerLoad
from kvtier.connector.load import Load, LoadTransfer
from kvtier.connector.mover import Mover
from kvtier.connector.operation import Means, Operation
from kvtier.connector.request import HashKeys, Pin, Request, TokenKeys
from kvtier.connector.save import Save, Staging
from kvtier.device import EngineKV, copier_for
from kvtier.errors import InvalidRequest, StoreClosed, TierUnavailable
from kvtier.layout import KVLayout, Namespace
from kvtier.owner import Owner
from kvtier.types import Reason, Status, TierName

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    import numpy.typing as npt

    from kvtier.connector.blocks import BlockTable
    from kvtier.connector.economy import Economy
    from kvtier.connector.request import Tokens
    from kvtier.hashing import Algorithm
    from kvtier.store.lease import Until
    from kvtier.store.store import Store
    from kvtier.store.transfer import Transfer
    from kvtier.types import BatchResult

_COUNTERS = (
    *("match.calls", "match.tokens", "load.requested", "load.hit", "load.bytes", "hits.dram", "hits.disk"),
    *("save.requested", "save.stored", "save.known", "save.bytes"),
    *(f"{kind}.{reason.name.lower()}" for kind in ("load", "save") for reason in Reason if reason),
)


class Connector:
    """Moves KV between an engine's blocks and a store. Thread-safe; one per engine, or rank of it.

        axes = "block token head dim"
        with Connector(store, kv_caches, axes=axes, model=name, weights=digest) as connector:
            with connector.request(tokens) as request:
                found = connector.match(request, limit=len(tokens) - 1)
                load = connector.load(request, block_table, 0, found).result()
                ...  # compute what is behind load.tokens
                connector.save(request, block_table).wait_copied()

    `block_table[i]` is the engine's block of tokens `i * block_tokens` on, always from the first token of
    the request. `start`, `end` and `computed` are tokens, whole blocks. Chunks are what is stored: several
    blocks each. Every method raises StoreClosed once the connector or its store is closed, and in a
    forked child; what a disk does comes out as a status.
    """

    def __init__(
        self,
        store: Store,
        kv_caches: Any,
        *,
        axes: str,
        model: str,
        weights: bytes,
        block_tokens: int | None = None,
        chunk_tokens: int = 256,
        kv_format: str = "",
        tp_rank: int = 0,
        tp_size: int = 1,
        pp_rank: int = 0,
        pp_size: int = 1,
        algorithm: Algorithm = "sha256",
        codec: str = "raw",
        economy: Economy | None = None,
    ) -> None:
        """Describe the engine's tensors, once: see `EngineKV.of` for `kv_caches`, `axes`, `block_tokens`.

        `weights` is a 32-byte digest of the model's weights; `chunk_tokens` a multiple of the block size;
        `kv_format` says whatever else the meaning of the bytes depends on: an attention backend that
        orders them its own way, say, or scales that lie elsewhere. `codec` is as of `Store.put`.

        With an `economy`, `match` offers only what is there sooner by a load. It learns from the loads; tell
        it what prefill costs (`observe_prefill`). Connectors of one engine may share it.

        Raises InvalidRequest for tensors that are not described so, and for chunks that are larger than
        the slots of the store.
        """
        self.kv = EngineKV.of(kv_caches, axes=axes, block_tokens=block_tokens)
        """The engine's tensors."""
        self.block_tokens = self.kv.block_tokens
        """Tokens per block."""
        self._map = BlockMap(self.block_tokens, chunk_tokens, self.kv.blocks)
        self.layout = KVLayout(
            layers=self.kv.layers,
            planes=self.kv.planes,
            kv_heads=self.kv.kv_heads,
            head_dim=self.kv.head_dim,
            dtype=self.kv.dtype,
            chunk_tokens=chunk_tokens,
        )
        """Shape of one chunk; `kv.order` says how its bytes are ordered."""
        parse_codec(codec)
        self._codec = codec
        self._identity = Namespace(
            model=model,
            weights=weights,
            layout=self.layout,
            order=self.kv.order + (f";{kv_format}" if kv_format else ""),
            tp_rank=tp_rank,
            tp_size=tp_size,
            pp_rank=pp_rank,
            pp_size=pp_size,
            algorithm=algorithm,
        )
        store.reserve([], self.layout.chunk_bytes).abort()  # refuses chunks that are larger than its slots
        self.economy = economy
        """What decides whether to load, if anything does."""
        self._store = store
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._active: set[Operation] = set()
        self._queued = 0  # chunks of theirs
        self._counters: Counter[str] = Counter()
        self._seconds = {"load": 0.0, "save": 0.0}
        self._closed = False
        self._copier = copier_for(self.kv)
        try:
            self._mover = Mover("kvtier-connector")
        except RuntimeError as error:
            raise TierUnavailable(
                f"cannot open the connector, for it {error}: raise the limits of processes (ulimit -u)"
            ) from error
        self._staging = Staging(self.layout.chunk_bytes)
        self._means = Means(store, self._mover, self.layout.chunk_bytes, self._over)
        self._finalizer = weakref.finalize(self, self._mover.stop)
        self._finalizer.atexit = False

    def namespace(self, *, lora: str = "", salt: str = "") -> Namespace:
        """What keys are made under, for an adapter and a tenant."""
        return replace(self._identity, lora=lora, salt=salt)

    def request(
        self,
        tokens: Tokens | None = None,
        *,
        hashes: Sequence[bytes] | None = None,
        chunk_hashes: Sequence[bytes] | None = None,
        lora: str = "",
        salt: str = "",
        extra: bytes = b"",
        tenant: str = "",
    ) -> Request:
        """A sequence of token ids; or of the engine's own chained `hashes`, one per full block; or of those
        of them that end a chunk.

        `lora` names the adapter it runs with and `salt` its tenant. `extra` is whatever else its KV
        depends on, a digest of its images, say. Nothing stored with others is found. Hashes that cover
        these already need none of them. `tenant` is whom its chunks count for, see `kvtier.Owner`.

        Raises InvalidRequest for more than one of them or none, and as `chunk_keys`, `derived_keys` and
        `Owner` do.
        """
        given = [values for values in (tokens, hashes, chunk_hashes) if values is not None]
        if len(given) != 1:
            raise InvalidRequest("request needs tokens, hashes or chunk_hashes, one of them")
        digest = self.namespace(lora=lora, salt=salt).digest()
        chunk_tokens = self.layout.chunk_tokens
        maker: TokenKeys | HashKeys
        if tokens is not None:
            maker = TokenKeys(digest, chunk_tokens, self._identity.algorithm, extra)
        elif hashes is not None:
            maker = HashKeys(digest, self._map.per_chunk, self.block_tokens, extra)
        else:
            maker = HashKeys(digest, 1, chunk_tokens, extra)
        request = Request(maker, Owner(digest, tenant), self._mover)
        request.extend(given[0])
        return request

    def match(
        self, request: Request, *, computed: int = 0, limit: int | None = None, pin: bool = True
    ) -> int:
        """Tokens behind the first `computed` that a load can bring, whole blocks. Memory only, no I/O.

        Of the first `limit` tokens, computed ones included: an engine that needs logits leaves one to
        compute. With `pin` they are kept from eviction until the load that they are for is over, or the
        request is matched again or closed; without, a load may find less. With an economy it is 0 where
        computing them is faster.

        Raises InvalidRequest for a `computed` that is not whole blocks.
        """
        self._check_open()
        self._map.check_tokens("computed", computed)
        chunk_tokens = self.layout.chunk_tokens
        first = computed // chunk_tokens
        if pin:
            held = Pin(self._store, request.keys[first:])
            request.hold(held)
            count = held.count
        else:
            count = self._store.match(request.keys[first:])
        end = (first + count) * chunk_tokens
        if limit is not None:
            end = min(end, max(0, limit) // self.block_tokens * self.block_tokens)
        found = max(0, end - computed)
        if found and self.economy is not None:
            found = self.economy.worth(found)
            if not found:
                request.close()
        with self._lock:
            self._counters["match.calls"] += 1
            self._counters["match.tokens"] += found
        return found

    def load(
        self,
        request: Request,
        block_table: BlockTable,
        start: int,
        end: int,
        *,
        timeout: float | None = None,
        by_layer: bool = False,
    ) -> LoadTransfer:
        """Fill the blocks of the tokens from `start` to `end` from the store. Returns at once.

        Nothing else may write to those blocks until the transfer is `released`, which comes no later
        than its result. `cancel` gives up what is not there yet: it waits for no device, at most for a
        copy under way, after which the transfer is `released`. A chunk that cannot be had ends the
        load: those behind it that were not asked for yet are FAILED with `cancelled`. After `timeout`
        seconds (default the store's `get_timeout`) what is not there is FAILED with `deadline`.

        `by_layer` is for engines that compute while it loads: the first layers of all chunks are read and
        copied first, then the next, and `wait_layer` waits for one. Read what that promises. It gives up
        what the order chunk by chunk is good for: at a deadline, or in a cancel, no chunk may be whole. And
        it holds slots for all chunks; of more than half of what there are, it goes chunk by chunk.

        Raises InvalidRequest for a range that is not whole blocks with known keys, and a table that does
        not cover it, or names a block twice or one that there is not.
        """
        self._check_open()
        chunks, table = self._map.to_fill(block_table, start, end, len(request.keys))
        seconds = _seconds(timeout, self._store.config.get_timeout)
        keys = tuple(request.keys[chunks.start : chunks.stop])
        mark = self._copier.mark()

        steps = self.kv.layer_steps
        each = len(self.kv.regions) // steps

        def copy(
            slots: Sequence[npt.NDArray[np.uint8]],
            blocks: npt.NDArray[np.int64],
            layers: range = range(steps),
        ) -> None:
            self._copier.scatter(slots, blocks, mark, range(layers.start * each, layers.stop * each))

        make = partial(LayerLoad, layers=steps) if by_layer else Load
        pin = request.take_pin() or Pin(self._store, keys)
        try:
            load = make(
                self._means,
                keys,
                table,
                copy,
                seconds,
                pin=pin,
                head=tuple(request.keys[: chunks.start]),
                span=(start, end),
                chunk_tokens=self.layout.chunk_tokens,
            )
        except BaseException:
            pin.release()
            raise
        self._begin(load, urgent=True)
        return load.transfer

    def save(
        self,
        request: Request,
        block_table: BlockTable,
        start: int = 0,
        end: int | None = None,
        *,
        until: Until = "dram",
        ttl: float | None = None,
        timeout: float | None = None,
    ) -> Transfer[BatchResult]:
        """Store the full chunks that end behind token `start` and not behind `end`. Returns at once.

        The blocks of all tokens up to `end` must hold their KV, also those before `start` of a chunk
        that spans it; they are borrowed until the transfer is `copied`, for no longer than the copies
        take. The result has an entry per chunk, as of a put, also for `until`, `ttl` and `timeout`
        (default `put_timeout`). Of more than the store has slots for, and there is memory to wait with,
        the head is taken; the rest is REFUSED with `no_space`.

        Raises InvalidRequest as `load` does.
        """
        self._check_open()
        known = len(request.keys)
        end = max(start, known * self.layout.chunk_tokens) if end is None else end
        chunks, table = self._map.to_save(block_table, start, end, known)
        if until not in ("dram", "disk") or (until == "disk" and not self._store.config.paths):
            raise InvalidRequest(f"until is {until!r}, needs 'dram', or 'disk' of a store that has one")
        if ttl is not None and (not isinstance(ttl, int | float) or not 0 <= ttl < math.inf):
            raise InvalidRequest(f"ttl is {ttl!r}, needs seconds of at least 0; 0 is never")
        seconds = _seconds(timeout, self._store.config.put_timeout)
        prefix = tuple(request.keys[: chunks.stop])
        keys = prefix[chunks.start :]
        mark = self._copier.mark()

        def copy(slots: Sequence[npt.NDArray[np.uint8]], blocks: npt.NDArray[np.int64]) -> None:
            self._copier.gather(blocks, slots, mark)

        save = Save(
            self._means,
            keys,
            table,
            copy,
            seconds,
            staging=self._staging,
            prefix=prefix,
            owner=request.owner,
            ttl=ttl,
            until=until,
            codec=self._codec,
        )
        self._begin(save, urgent=False)
        return save.transfer

    def fence(self, blocks: Iterable[int]) -> None:
        """Return when no transfer reads or writes these blocks: they are about to be reused.

        Loads into them are cancelled. Saves from them are copied first, on this thread if need be.
        """
        self._check_process()
        ids = np.fromiter(blocks, np.int64)
        with self._lock:
            touching = [operation for operation in self._active if operation.touches(ids)]
        for operation in touching:
            if isinstance(operation, Save):
                operation.finish_copying()
            else:
                operation.stop(Reason.CANCELLED)
                operation.transfer.wait_released()

    def stats(self) -> dict[str, int | float]:
        """Counters by name: chunks of loads and saves by outcome and reason, bytes, seconds from call to
        outcome, tokens matched; and how many transfers and chunks of them are under way.

        `load.requested` = `load.hit` + the sum of `load.<reason>`, once all are over; the same for `save`
        with `stored` and `known`. `load.hit` = `hits.dram` + `hits.disk`.
        """
        self._check_process()
        with self._lock:
            numbers: dict[str, int | float] = {name: self._counters[name] for name in _COUNTERS}
            numbers.update({f"{name}.seconds": seconds for name, seconds in self._seconds.items()})
            numbers["active"] = len(self._active)
            numbers["queued_chunks"] = self._queued
        return numbers

    def close(self) -> None:
        """Cancel loads, finish the copies of saves, and end the thread. The store stays open. Idempotent."""
        self._finalizer.detach()
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            active = list(self._active)
        for operation in active:
            if isinstance(operation, Save):
                operation.finish_copying()
            else:
                operation.stop(Reason.CLOSED)
        self._mover.stop()
        self._mover.join(self._store.config.close_timeout)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, operation: Operation, *, urgent: bool) -> None:
        count = len(operation.keys)
        with self._lock:
            is_full = self._queued and self._queued + count > self._store.config.max_queued_chunks
            self._active.add(operation)
            self._queued += count
            self._counters[f"{operation.name}.requested"] += count
            closed = self._closed
        if closed:
            operation.stop(Reason.CLOSED)
        elif is_full:
            operation.refuse()
        elif count:
            self._mover.submit(operation.run, urgent=urgent)
        else:
            operation.settle()

    def _over(self, operation: Operation) -> None:
        seconds = time.monotonic() - operation.begun_at
        if self.economy is not None and isinstance(operation, Load) and operation.is_measure():
            hits = int((operation.status == Status.HIT).sum())
            self.economy.observe_load(hits * self.layout.chunk_tokens, seconds)
        with self._lock:
            self._active.discard(operation)
            self._queued -= len(operation.keys)
            for status, reason in zip(operation.status.tolist(), operation.reason.tolist(), strict=True):
                name = Reason(reason).name if reason else Status(status).name
                self._counters[f"{operation.name}.{name.lower()}"] += 1
            for tier in (TierName.DRAM, TierName.DISK):
                self._counters[f"hits.{tier.name.lower()}"] += int((operation.tier == tier).sum())
            self._counters[f"{operation.name}.bytes"] += int(operation.nbytes.sum())
            self._seconds[operation.name] += seconds

    def _check_process(self) -> None:
        if os.getpid() != self._owner:
            raise StoreClosed("the connector belongs to the parent of this forked process: make a new one")

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise StoreClosed("the connector is closed: make a new one")
        self._store.match(())


def _seconds(timeout: float | None, default: float) -> float:
    if timeout is None:
        return default
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise InvalidRequest(f"timeout is {timeout!r}, needs seconds above 0")
    return float(timeout)
