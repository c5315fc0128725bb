"""Operation: a load or a save in progress. Its chunks, what each came to, and the blocks it may touch."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kvtier.store.transfer import Transfer
from kvtier.types import BatchResult, Reason, Status, TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from kvtier.connector.mover import Inline, Mover
    from kvtier.store.store import Store
    from kvtier.types import ChunkKey

Copy: TypeAlias = "Callable[[Sequence[npt.NDArray[np.uint8]], npt.NDArray[np.int64]], None]"
"""Copies between slots and the blocks of the same rows of a table; back when all is copied."""

log = logging.getLogger(__name__)
_OPEN = -1


@dataclass(frozen=True, slots=True)
class Means:
    """What all operations of a connector work with."""

    store: Store
    mover: Mover | Inline
    chunk_bytes: int
    over: Callable[[Operation], None]
    """Told once of every operation that is over, without any lock."""


class Operation(ABC):
    """One load or save. `lock` guards its state; the store is not called, and nothing copied, under it."""

    name: str

    def __init__(
        self,
        means: Means,
        keys: Sequence[ChunkKey],
        table: npt.NDArray[np.int64],
        copy: Copy,
        timeout: float,
    ) -> None:
        """`table` has the blocks of each chunk, shape (chunks, blocks per chunk)."""
        self.means = means
        self.keys = keys
        self.table = table
        self.copy = copy
        self.begun_at = time.monotonic()
        self.deadline = self.begun_at + timeout
        self.lock = threading.Lock()
        self.transfer: Transfer[Any] = self.make_transfer()
        self.transfer._on_cancel = lambda: self.stop(Reason.CANCELLED)
        self.status = np.full(len(keys), _OPEN, np.int8)
        self.reason = np.zeros(len(keys), np.int8)
        self.nbytes = np.zeros(len(keys), np.int64)
        self.tier = np.zeros(len(keys), np.uint8)
        self.begun = 0  # chunks asked for, or taken over, from the head
        self.stopped = False  # no copy may begin any more
        self.copying: Sequence[int] = ()  # chunks that a copy is moving now
        self._finished = False

    @abstractmethod
    def run(self) -> None:
        """Begin, or go on. On the mover's thread."""

    def make_transfer(self) -> Transfer[Any]:
        """What the engine gets."""
        return Transfer()

    @abstractmethod
    def outcome(self) -> Any:
        """What the transfer resolves to."""

    def let_go(self) -> None:  # noqa: B027  most have nothing to do
        """Called once, when all is over, before the outcome is there."""

    def refuse(self) -> None:
        """End before anything has begun, for there is too much to do already."""
        with self.lock:
            self.stopped = True
            self.close_open(range(len(self.keys)), Status.REFUSED, Reason.QUEUE_FULL)
        self.settle()

    def close(
        self, i: int, status: Status, reason: Reason, nbytes: int = 0, tier: int = TierName.NONE
    ) -> None:
        """Give the open chunk `i` its outcome. With the lock held."""
        self.tier[i] = tier
        self.status[i], self.reason[i], self.nbytes[i] = status, reason, nbytes

    def close_open(self, items: Sequence[int], status: Status, reason: Reason) -> None:
        """Give the open chunks among `items` that no copy is moving their outcome. With the lock held."""
        for i in items:
            if self.status[i] == _OPEN and i not in self.copying:
                self.close(i, status, reason)

    def stop(self, reason: Reason) -> bool:
        """Begin no copy any more, and give up what can be; whether that was anything."""
        with self.lock:
            if self.stopped:
                return False
            self.stopped = True
            before = int((self.status == _OPEN).sum())
            self.give_up(reason)
            dropped = before > int((self.status == _OPEN).sum())
        self.settle()
        return dropped

    def give_up(self, reason: Reason) -> None:
        """Give the open chunks their outcome. With the lock held."""
        self.close_open(range(len(self.keys)), Status.FAILED, reason)

    def settle(self) -> None:
        """Hand out the outcome, if every chunk has one: those that a copy is moving have none yet."""
        with self.lock:
            if self._finished or (self.status == _OPEN).any():
                return
            self._finished = self.stopped = True
        self.let_go()
        self.means.over(self)
        self.transfer._set_copied()
        self.transfer._set_released()
        self.transfer._finish(self.outcome())

    def result(self) -> BatchResult:
        """What became of the chunks."""
        return BatchResult(self.status.copy(), self.reason.copy(), self.nbytes.copy(), self.tier.copy())

    def touches(self, blocks: npt.NDArray[np.int64]) -> bool:
        """Whether it may read or write one of these blocks."""
        return bool(np.isin(self.table, blocks).any())
