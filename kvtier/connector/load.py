"""Load: chunks are read into leased slots, and copied from there into the engine's blocks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvtier.connector.operation import Operation, log
from kvtier.connector.request import touch
from kvtier.device import NO_BLOCK
from kvtier.errors import InvalidRequest, StoreClosed
from kvtier.store.transfer import Transfer
from kvtier.types import Reason, Status, TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from kvtier.connector.operation import Copy, Means
    from kvtier.connector.request import Pin
    from kvtier.store.lease import Lease
    from kvtier.types import BatchResult, ChunkKey

READ_AHEAD = 64 << 20
"""Bytes of chunks that a load has leased or asked for at any time."""
_LEAST_AHEAD = 256
"""Chunks of which it asks for as many in any case: the store reads in the order in which it is asked, so that
loads which begin together end one after another, the median of them in half the time, and not all at the end.
"""
READ_BYTES = 8 << 20
"""Bytes of chunks per read, or one chunk: enough to make the cost of a call vanish."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a load came to."""

    tokens: int
    """Tokens from the load's `start` on whose KV is in the engine's blocks, exactly as it was saved."""
    invalid_blocks: npt.NDArray[np.int64]
    """Blocks of the load that do not hold what was asked for, in the table's order: compute them."""
    chunks: BatchResult
    """Per chunk of the range HIT, or why not."""
    by_tier: dict[TierName, int]
    """Of `tokens`, how many came from each tier; all of them are named, also those that brought none."""


class LoadTransfer(Transfer[LoadResult]):
    """A started load."""

    def __init__(self, wait: Callable[[int, float | None], int]) -> None:
        super().__init__()
        self._wait: Callable[[int, float | None], int] | None = wait

    def wait_layer(self, layer: int, timeout: float | None = None) -> int:
        """Wait until layer `layer`, counted from 0, is in the engine's blocks, and all before it are.

        Returns of how many tokens, from the load's `start` on, they hold exactly what was saved. **That can
        be less than it was for a layer before**: a chunk whose last layers cannot be had is lost, and all
        behind it, whatever of it was used already. What was computed on the strength of the larger number is
        void then; do it again with what `result` has, `tokens` and `invalid_blocks`. Never is it more. So
        results of a step are good once the number for its last layer is the one that the step began with.

        Comes no later than the load's deadline, and at once when the load is cancelled. It waits for the end
        of a load that is not `by_layer`, and where a block holds all layers.

        Raises TimeoutError after `timeout` seconds.
        """
        wait = self._wait
        return self.result(timeout).tokens if wait is None else wait(layer, timeout)

    def _finish(self, outcome: LoadResult) -> None:
        super()._finish(outcome)
        self._wait = None  # it refers to the load, and that to this


class Load(Operation):
    """Reads go to the store's slots, never to blocks: so no device can hold up a cancelled load."""

    name = "load"
    transfer: LoadTransfer

    def __init__(
        self,
        means: Means,
        keys: Sequence[ChunkKey],
        table: npt.NDArray[np.int64],
        copy: Copy,
        timeout: float,
        *,
        pin: Pin,
        head: Sequence[ChunkKey],
        span: tuple[int, int],
        chunk_tokens: int,
    ) -> None:
        """`pin` is released at the end. `head` are the keys of the chunks before these, `span` the tokens
        that are wanted.
        """
        super().__init__(means, keys, table, copy, timeout)
        self._pin = pin
        self._span = span
        self._head = head
        self.chunk_tokens = chunk_tokens
        self._batch = max(1, READ_BYTES // means.chunk_bytes)
        self._ahead = max(_LEAST_AHEAD, READ_AHEAD // means.chunk_bytes)
        self._reading: set[Transfer[Lease] | Transfer[BatchResult]] = set()
        self._in_flight = 0  # chunks asked for and not copied yet

    def run(self) -> None:
        """Ask for as many chunks as may be on their way."""
        while True:
            with self.lock:
                room = min(self._batch, self._ahead - self._in_flight, len(self.keys) - self.begun)
                if self.stopped or room < 1:
                    return
                items = range(self.begun, self.begun + room)
                self.begun = items.stop
                self._in_flight += room
            self._read(items)

    def make_transfer(self) -> LoadTransfer:
        """With waits for layers."""
        return LoadTransfer(self.wait_layer)

    def wait_layer(self, layer: int, timeout: float | None) -> int:
        """See LoadTransfer.wait_layer."""
        return int(self.transfer.result(timeout).tokens)

    def stop(self, reason: Reason) -> bool:
        """As any operation; and what waits for a device is not read any more."""
        stopped = super().stop(reason)
        with self.lock:
            reading = list(self._reading)
        for transfer in reading:
            transfer.cancel()
        return stopped

    def let_go(self) -> None:
        """Release the pin. What the engine had of the prefix was used as well."""
        self._pin.release()
        self.means.mover.submit(partial(touch, self.means.store, self._head))

    def is_measure(self) -> bool:
        """Whether its time says how long loads take: it brought all, or had to stop waiting."""
        late = bool((self.reason == Reason.DEADLINE).any())
        return late or (len(self.keys) > 0 and bool((self.status == Status.HIT).all()))

    def outcome(self) -> LoadResult:
        """Tokens, and blocks that are not to be used."""
        start, end = self._span
        chunks = self.result()
        missing = self.table[chunks.status != Status.HIT]
        edges = (len(self._head) + np.arange(chunks.prefix + 1)) * self.chunk_tokens
        counts = np.bincount(
            chunks.tier[: chunks.prefix], np.diff(edges.clip(start, end)), minlength=len(TierName)
        )
        by_tier = {tier: int(counts[tier]) for tier in TierName if tier}
        tokens = self._tokens(chunks.prefix)
        return LoadResult(tokens, missing[missing != NO_BLOCK], chunks, by_tier)

    def _tokens(self, chunks: int) -> int:
        """Of the tokens that are wanted, those that so many chunks bring."""
        start, end = self._span
        return min(max((len(self._head) + chunks) * self.chunk_tokens, start), end) - start

    def _read(self, items: range) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            self.stop(Reason.DEADLINE)
            return
        if self.means.store.config.check_dram:  # which leases are not
            self._fetch(items)
            return
        try:
            transfer = self.means.store.read([self.keys[i] for i in items], timeout=left)
        except StoreClosed:
            self.stop(Reason.CLOSED)
            return
        self._follow(transfer)
        transfer.add_done_callback(partial(self._arrived, items))

    def _follow(self, transfer: Transfer[Lease] | Transfer[BatchResult]) -> None:
        with self.lock:
            self._reading.add(transfer)
            stopped = self.stopped
        if stopped:
            transfer.cancel()

    def _arrived(self, items: range, transfer: Transfer[Lease]) -> None:
        """Have the mover copy; on whatever thread the store uses."""
        with self.lock:
            self._reading.discard(transfer)
            stopped = self.stopped
        if stopped:
            transfer.result().release()
        else:
            self.means.mover.submit(partial(self._land, items, transfer), urgent=True)

    def _land(self, items: range, transfer: Transfer[Lease]) -> None:
        with transfer.result() as lease:
            refused = self._take(items, lease.result, lease.views, is_last_try=False)
        self._fetch(refused)
        self.run()

    def _fetch(self, items: Sequence[int]) -> None:
        """Get copies of what cannot be leased: pins may hold all of DRAM, but a copy needs a slot only
        while it lands.
        """
        for start in range(0, len(items), self._batch):
            some = items[start : start + self._batch]
            copies = np.empty((len(some), self.means.chunk_bytes), np.uint8)
            left = max(self.deadline - time.monotonic(), 1e-3)
            try:
                transfer = self.means.store.get([self.keys[i] for i in some], into=copies, timeout=left)
            except InvalidRequest:  # of another size, so not what was asked for
                self._lose(some, Status.MISS, Reason.ABSENT)
            except StoreClosed:
                self.stop(Reason.CLOSED)
            else:
                self._follow(transfer)
                transfer.add_done_callback(partial(self._fetched, some, copies))

    def _fetched(
        self, items: Sequence[int], copies: npt.NDArray[np.uint8], done: Transfer[BatchResult]
    ) -> None:
        with self.lock:
            self._reading.discard(done)
        self.means.mover.submit(partial(self._land_copies, items, copies, done), urgent=True)

    def _land_copies(
        self, items: Sequence[int], copies: npt.NDArray[np.uint8], done: Transfer[BatchResult]
    ) -> None:
        self._take(items, done.result(), list(copies), is_last_try=True)
        self.run()

    def _take(
        self,
        items: Sequence[int],
        result: BatchResult,
        views: Sequence[npt.NDArray[np.uint8] | None],
        *,
        is_last_try: bool,
    ) -> list[int]:
        """Copy the hits into the engine's blocks; those that are worth another try."""
        refused, hits, lost = [], [], []
        for k, (i, view) in enumerate(zip(items, views, strict=True)):
            if result.status[k] == Status.REFUSED and not is_last_try:
                refused.append(i)
            elif result.status[k] != Status.HIT or view is None:
                lost.append((i, Status(result.status[k]), Reason(result.reason[k])))
            elif view.nbytes != self.means.chunk_bytes:
                lost.append((i, Status.MISS, Reason.ABSENT))
            else:
                hits.append((i, view))
        with self.lock:
            if self.stopped:
                return []
            self.copying = [i for i, _ in hits]
        status, reason, nbytes, tiers = Status.FAILED, Reason.IO_ERROR, 0, dict.fromkeys(items, 0)
        try:
            if hits:
                self.copy([view for _, view in hits], self.table[[i for i, _ in hits]])
            status, reason, nbytes = Status.HIT, Reason.NONE, self.means.chunk_bytes
            tiers = dict(zip(items, result.tier.tolist(), strict=True))
        except Exception:
            log.exception("a copy into the engine's blocks failed; it is told to compute them")
        finally:
            with self.lock:
                self.copying = ()
                self._in_flight -= len(hits)
                for i, _ in hits:
                    self.close(i, status, reason, nbytes, tiers[i])
        for i, why, detail in lost:
            self._lose([i], why, detail)
        self.settle()
        return refused

    def _lose(self, items: Sequence[int], status: Status, reason: Reason) -> None:
        """Close chunks that did not come. A prefix ends there, so what is not yet asked for never is."""
        with self.lock:
            self._in_flight -= len(items)
            for i in items:
                if self.status[i] < 0:
                    self.close(i, status, reason)
            self.close_open(range(self.begun, len(self.keys)), Status.FAILED, Reason.CANCELLED)
            self.begun = len(self.keys)
        self.settle()
