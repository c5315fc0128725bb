"""LayerLoad: a load whose first layers can be used while the others are still being read."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from kvtier.connector.load import Load
from kvtier.connector.operation import log
from kvtier.errors import StoreClosed
from kvtier.types import Reason, Status, TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from kvtier.store.lease import Lease
    from kvtier.store.transfer import Transfer

CopyLayers: TypeAlias = "Callable[[Sequence[npt.NDArray[np.uint8]], npt.NDArray[np.int64], range], None]"
"""As Copy, of some layers."""

_STEP_BYTES = 16 << 20
"""Bytes copied at a time, or one layer: whoever waits for a layer waits for no more than that."""
_DRAM_SHARE = 0.5
"""The part of the slots that a load may hold for as long as it takes; a larger one goes chunk by chunk."""


class LayerLoad(Load):
    """Chunks are read side by side, and copied layer by layer as they come, all in one lease."""

    def __init__(self, *args: Any, layers: int, **kwargs: Any) -> None:
        """As of Load. A chunk is `layers` ranges of bytes, all of the same length; `copy` takes which of them
        to copy as a third argument.
        """
        super().__init__(*args, **kwargs)
        self._layers = layers
        self._copy_layers = cast("CopyLayers", self.copy)
        count = len(self.keys)
        self._moved = threading.Condition(self.lock)
        self._layer_bytes = self.means.chunk_bytes // self._layers
        self._views: list[npt.NDArray[np.uint8] | None] = [None] * count
        self._there = np.zeros(count, np.int64)  # layers of each chunk that its slot has
        self._copied = np.zeros(count, np.int64)  # and its blocks
        self._lost = count  # the first chunk that is known not to come
        self._lease: Lease | None = None
        self._is_queued = False  # the next copy
        config = self.means.store.config
        slots = config.dram or config.landing
        fits = count * self.means.chunk_bytes <= _DRAM_SHARE * slots
        self._is_stream = fits and not config.check_dram  # which only copies of whole chunks are

    def run(self) -> None:
        """Ask for all chunks at once."""
        if not self._is_stream:
            super().run()
            return
        with self.lock:
            if self.stopped or self.begun:
                return
            self.begun = self._in_flight = len(self.keys)
        left = self.deadline - time.monotonic()
        if left <= 0:
            self.stop(Reason.DEADLINE)
            return
        try:
            transfer = self.means.store.read(self.keys, timeout=left, on_progress=self._heard)
        except StoreClosed:
            self.stop(Reason.CLOSED)
            return
        self._follow(transfer)
        transfer.add_done_callback(self._leased)

    def wait_layer(self, layer: int, timeout: float | None) -> int:
        """See LoadTransfer.wait_layer."""
        with self._moved:
            if not self._moved.wait_for(lambda: self._has(layer), timeout):
                raise TimeoutError(f"layer {layer} is not there after {timeout} s")
            return self._tokens(self._lost)

    @property
    def reach(self) -> int:
        """Chunks before the first that is known not to come."""
        return self._lost

    def has(self, layer: int) -> bool:
        """Whether a wait for that layer would be over at once."""
        with self.lock:
            return self._has(layer)

    def _has(self, layer: int) -> bool:
        """Whether all chunks that may still come have this layer and those before it. With the lock held."""
        return bool((self._copied[: self._lost] > min(layer, self._layers - 1)).all())

    def close(
        self, i: int, status: Status, reason: Reason, nbytes: int = 0, tier: int = TierName.NONE
    ) -> None:
        """As of an operation; and whoever waits for a layer looks again."""
        super().close(i, status, reason, nbytes, tier)
        if status == Status.HIT:
            self._copied[i] = self._layers
        else:
            self._lost = min(self._lost, i)
        self._moved.notify_all()

    def let_go(self) -> None:
        """As of a load; and of the slots."""
        super().let_go()
        with self.lock:
            lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def _heard(self, i: int, view: npt.NDArray[np.uint8] | None, nbytes: int) -> None:
        """More of a chunk is in its slot, or it will not come; on whatever thread the store uses."""
        with self.lock:
            if view is None:
                self._lost = min(self._lost, i)
                self._moved.notify_all()
                return
            self._views[i], self._there[i] = view, nbytes // self._layer_bytes
        self._queue()

    def _leased(self, transfer: Transfer[Lease]) -> None:
        """All is there that comes; on whatever thread the store uses."""
        lease = transfer.result()
        with self.lock:
            self._reading.discard(transfer)
            is_over = self._finished
            self._lease = None if is_over else lease
        if is_over:
            lease.release()
        else:
            self.means.mover.submit(partial(self._land_all, lease), urgent=True)

    def _land_all(self, lease: Lease) -> None:
        """Sort out what did not come; copies go on."""
        result, refused = lease.result, []
        with self.lock:
            if self.stopped:
                return
            for i, view in enumerate(lease.views):
                if result.status[i] == Status.REFUSED:
                    refused.append(i)
                elif view is None or view.nbytes != self.means.chunk_bytes:
                    is_hit = result.status[i] == Status.HIT  # of another size, so not what was asked for
                    status = Status.MISS if is_hit else Status(result.status[i])
                    self.close(i, status, Reason.ABSENT if is_hit else Reason(result.reason[i]))
                else:
                    self._views[i], self._there[i] = view, self._layers
        self._fetch([i for i in refused if i < self._lost])
        self._queue()

    def _queue(self) -> None:
        with self.lock:
            if self._is_queued or self.stopped:
                return
            self._is_queued = True
        self.means.mover.submit(self._copy_next, urgent=True)

    def _copy_next(self) -> None:
        """Copy the lowest layers that are there and not copied; then again, as long as there are some."""
        with self.lock:
            self._is_queued = False
            items, layers = self._next()
            if self.stopped or not items:
                self._close_copied()
                items = []
            self.copying = items
            views = [view for i in items if (view := self._views[i]) is not None]
        if not items:
            self.settle()
            return
        is_copied = False
        try:
            self._copy_layers(views, self.table[items], layers)
            is_copied = True
        except Exception:
            log.exception("a copy into the engine's blocks failed; it is told to compute them")
        with self.lock:
            self.copying = ()
            if is_copied:
                self._copied[items] = layers.stop
                self._moved.notify_all()
            else:
                for i in items:
                    self.close(i, Status.FAILED, Reason.IO_ERROR)
            if self.stopped:  # meanwhile
                self.close_open(items, Status.FAILED, Reason.CANCELLED)
        self.settle()
        self._queue()

    def _next(self) -> tuple[list[int], range]:
        """Chunks that have as many layers copied as the one that has the fewest, and which are next."""
        behind = np.flatnonzero(self._copied[: self._lost] < self._there[: self._lost])
        if not len(behind):
            return [], range(0)
        first = int(self._copied[behind].min())
        items = behind[self._copied[behind] == first]
        most = max(1, _STEP_BYTES // (len(items) * self._layer_bytes))
        return items.tolist(), range(first, min(int(self._there[items].min()), first + most))

    def _close_copied(self) -> None:
        """Give their outcome to chunks that are whole, and to those behind a lost one. With the lock held."""
        if self._lease is None:
            return
        result = self._lease.result
        for i in np.flatnonzero(self.status < 0).tolist():
            if self._copied[i] == self._layers:
                self.close(i, Status.HIT, Reason.NONE, self.means.chunk_bytes, int(result.tier[i]))
            elif i > self._lost and result.status[i] != Status.REFUSED:  # of which there may be a copy
                self.close(i, Status.FAILED, Reason.CANCELLED)
