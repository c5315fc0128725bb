"""Save: blocks are copied into reserved slots of the store; where these are too few, a put waits for more."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvtier.connector.operation import Operation, log
from kvtier.connector.request import touch
from kvtier.errors import StoreClosed
from kvtier.types import Reason, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kvtier.connector.operation import Copy, Means
    from kvtier.owner import Owner
    from kvtier.store.lease import Reservation, Until
    from kvtier.store.transfer import Transfer
    from kvtier.types import BatchResult, ChunkKey

STAGING = 512 << 20
"""Bytes of copies that the saves of a connector wait with for slots, all together."""
_LOT_BYTES = 16 << 20
"""Bytes copied at a time: loads get in between."""


class Staging:
    """How much memory of that is left, in chunks."""

    def __init__(self, chunk_bytes: int) -> None:
        self._left = max(1, STAGING // chunk_bytes)
        self._lock = threading.Lock()

    def take(self, count: int) -> int:
        """As much of `count` as there is."""
        with self._lock:
            taken = min(count, self._left)
            self._left -= taken
        return taken

    def give_back(self, count: int) -> None:
        """The reverse."""
        with self._lock:
            self._left += count


class Save(Operation):
    """The engine's blocks are borrowed for as long as the copies take, however full the store is."""

    name = "save"

    def __init__(
        self,
        means: Means,
        keys: Sequence[ChunkKey],
        table: npt.NDArray[np.int64],
        copy: Copy,
        timeout: float,
        *,
        staging: Staging,
        prefix: Sequence[ChunkKey],
        owner: Owner,
        ttl: float | None,
        until: Until,
        codec: str,
    ) -> None:
        """`prefix` are the keys of all chunks from the first of the request to the last of these; the rest
        is as of a put.
        """
        super().__init__(means, keys, table, copy, timeout)
        self._staging = staging
        self._staged = 0  # chunks of it that are taken
        self._prefix = prefix
        self._owner = owner
        self._ttl = ttl
        self._until: Until = until
        self._codec = codec
        self._lot = max(1, _LOT_BYTES // means.chunk_bytes)
        self._reservation: Reservation | None = None
        self._targets: Sequence[npt.NDArray[np.uint8] | None] | None = None  # None for what is known
        self._stored: Transfer[BatchResult] | None = None
        self._is_handed_over = False

    def run(self) -> None:
        """Copy one lot, and come back for the next."""
        if self._step():
            self.means.mover.submit(self.run)

    def finish_copying(self) -> None:
        """Copy on this thread what the mover has not, and wait until all of it is."""
        while self._step():
            pass
        self.transfer.wait_copied()

    def let_go(self) -> None:
        """The prefix was used, its head last."""
        self._drop()
        self.means.mover.submit(partial(touch, self.means.store, self._prefix))

    def outcome(self) -> BatchResult:
        """As of a put."""
        return self.result()

    def give_up(self, reason: Reason) -> None:
        """Drop all that the store does not have yet. With the lock held."""
        if not self._is_handed_over:
            self.close_open(range(len(self.keys)), Status.FAILED, reason)

    def stop(self, reason: Reason) -> bool:
        """As any operation; what the store has is cancelled there."""
        if (stored := self._stored) is not None:
            return stored.cancel()
        stopped = super().stop(reason)
        self._tell_copied()
        return stopped

    def _step(self) -> bool:
        """Copy the next lot; whether there is one behind it."""
        with self.lock:
            if self.stopped or self._is_handed_over or len(self.copying):
                return False
            lot = range(self.begun, min(self.begun + self._lot, len(self.keys)))
            self.copying = lot
        error = Reason.NONE
        try:
            if (targets := self._targets) is None:
                targets = self._targets = self._reserve()
            wanted = [(i, view) for i in lot if i < len(targets) and (view := targets[i]) is not None]
            if wanted:
                self.copy([view for _, view in wanted], self.table[[i for i, _ in wanted]])
        except StoreClosed:
            error = Reason.CLOSED
        except Exception:
            log.exception("a copy out of the engine's blocks failed; they are not stored")
            error = Reason.IO_ERROR
        with self.lock:
            self.copying = ()
            self.begun = lot.stop
            if self.stopped:  # meanwhile
                self.close_open(lot, Status.FAILED, Reason.CANCELLED)
            more = self.begun < len(self.keys) and not self.stopped and not error
            self._is_handed_over = not (more or self.stopped or error)
        if error:
            self.stop(error)
        elif self._is_handed_over:
            self._hand_over()
        self._tell_copied()
        self.settle()
        return more

    def _reserve(self) -> Sequence[npt.NDArray[np.uint8] | None]:
        """Where the chunks are copied to. Without a slot for each, as a put knows how to keep the head of
        what is too much, and can wait for slots, it gets copies, of as many as there is memory for.
        """
        reservation = self.means.store.reserve(self.keys, self.means.chunk_bytes, owner=self._owner)
        if not (reservation.result.status == Status.REFUSED).any():
            self._reservation = reservation
            return reservation.views
        reservation.abort()
        self._staged = self._staging.take(len(self.keys))
        with self.lock:
            for i in range(self._staged, len(self.keys)):
                if self.status[i] < 0:
                    self.close(i, Status.REFUSED, Reason.NO_SPACE)
        return [np.empty(self.means.chunk_bytes, np.uint8) for _ in range(self._staged)]

    def _hand_over(self) -> None:
        """Let the store have the chunks."""
        left = max(self.deadline - time.monotonic(), 1e-3)
        try:
            if self._reservation is not None:
                stored = self._reservation.commit(
                    until=self._until, codec=self._codec, ttl=self._ttl, timeout=left
                )
            else:
                assert self._targets is not None, "copied"
                stored = self.means.store.put(
                    self.keys[: self._staged],
                    [copy for copy in self._targets if copy is not None],
                    until=self._until,
                    codec=self._codec,
                    owner=self._owner,
                    ttl=self._ttl,
                    timeout=left,
                )
        except StoreClosed:
            with self.lock:
                self._is_handed_over = False
            self.stop(Reason.CLOSED)
            return
        self._stored = stored
        stored.add_done_callback(self._note)

    def _note(self, done: Transfer[BatchResult]) -> None:
        """Take what the store made of it; on whatever thread it uses."""
        result = done.result()
        with self.lock:
            for i, (status, reason, nbytes) in enumerate(
                zip(result.status.tolist(), result.reason.tolist(), result.nbytes.tolist(), strict=True)
            ):
                self.close(i, Status(status), Reason(reason), nbytes)
        self.settle()

    def _drop(self) -> None:
        """Give back what is reserved and not committed, and the memory of copies."""
        self._targets = ()
        if self._reservation is not None:
            self._reservation.abort()
        staged, self._staged = self._staged, 0
        self._staging.give_back(staged)

    def _tell_copied(self) -> None:
        with self.lock:
            copied = (self.stopped or self._is_handed_over) and not len(self.copying)
        if copied:
            self.transfer._set_copied()
