"""Requests in progress: the items of one batch, what each came to, and where its bytes go."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kvtier.types import BatchResult, Reason, Status, TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from kvtier.store.clock import Alarm
    from kvtier.store.transfer import Transfer

_log = logging.getLogger(__name__)
_OPEN = -1

Progress: TypeAlias = "Callable[[int, npt.NDArray[np.uint8] | None, int], object]"
"""Told of the first bytes of chunks; see `Store.read`."""


class Request:
    """One batch in progress. All but `resolve` is used with the store's lock held."""

    __slots__ = (
        "_claimed", "_open", "alarm", "buffers", "keys", "nbytes", "reason", "status", "tier", "transfer"
    )  # fmt: skip

    def __init__(self, keys: Sequence[bytes], transfer: Transfer[Any], buffers: object) -> None:
        self.keys = keys
        self.transfer = transfer
        self.buffers = buffers  # the caller's: kept alive while anything refers to this
        self.status = [_OPEN] * len(keys)
        self.reason = [0] * len(keys)
        self.nbytes = [0] * len(keys)
        self.tier = [0] * len(keys)
        self._open = len(keys)
        self._claimed = False
        self.alarm: Alarm | None = None  # its deadline

    def is_open(self, i: int) -> bool:
        """Whether item `i` has no outcome yet."""
        return self.status[i] == _OPEN

    @property
    def is_done(self) -> bool:
        """Whether every item has its outcome."""
        return self._open == 0

    def claim(self) -> bool:
        """True once, when every item has its outcome: whoever gets it calls `resolve`."""
        claimed = self.is_done and not self._claimed
        self._claimed = self._claimed or claimed
        return claimed

    def close(
        self,
        i: int,
        status: Status,
        reason: Reason = Reason.NONE,
        nbytes: int = 0,
        tier: TierName = TierName.NONE,
    ) -> None:
        """Give the open item `i` its outcome."""
        self.status[i] = status
        self.reason[i] = reason
        self.nbytes[i] = nbytes
        self.tier[i] = tier
        self._open -= 1

    def result(self) -> BatchResult:
        """What the items came to."""
        return BatchResult(
            np.array(self.status, np.int8),
            np.array(self.reason, np.int8),
            np.array(self.nbytes, np.int64),
            np.array(self.tier, np.uint8),
        )

    def resolve(self) -> None:
        """Hand the outcome to the caller. Called once, without the lock."""
        if self.alarm is not None:
            self.alarm.cancel()
        self.transfer._finish(self.outcome())

    def outcome(self) -> Any:
        """What the transfer resolves to."""
        return self.result()


class Read(Request):
    """A get: every item is copied to, or read straight into, an address of the caller's."""

    __slots__ = ("copying", "dram_left", "lend", "lent", "targets")

    def __init__(
        self,
        keys: Sequence[bytes],
        transfer: Transfer[Any],
        buffers: object,
        *,
        targets: list[int],
        lend: bool,
    ) -> None:
        super().__init__(keys, transfer, buffers)
        self.targets = targets
        self.lend = lend
        self.lent = 0  # targets that the kernel may be writing to
        self.dram_left = 1.0  # share of DRAM it may still take: a larger read keeps its head
        self.copying: set[int] = set()  # items whose copy is under way: a deadline waits for them


class LeaseRead(Read):
    """A read: every item becomes a view of a slot that the lease pins."""

    __slots__ = ("_make", "releases", "views")

    def __init__(
        self,
        keys: Sequence[bytes],
        transfer: Transfer[Any],
        make: Callable[[LeaseRead], object],
    ) -> None:
        super().__init__(keys, transfer, None, targets=[], lend=False)
        self.views: list[npt.NDArray[np.uint8] | None] = [None] * len(keys)
        self.releases: list[Callable[[], None]] = []
        self._make = make

    def outcome(self) -> Any:
        """The lease."""
        return self._make(self)


class Prefetch(LeaseRead):
    """A read that wants its chunks cached, and is not served by a slot they only land in."""

    __slots__ = ()


class StreamRead(LeaseRead):
    """A read that is told, ahead of its outcome, how many of the first bytes of each chunk are there."""

    __slots__ = ("_has_outcome", "_news", "_tell", "_telling")

    def __init__(
        self,
        keys: Sequence[bytes],
        transfer: Transfer[Any],
        make: Callable[[LeaseRead], object],
        tell: Progress,
    ) -> None:
        super().__init__(keys, transfer, make)
        self._news: list[tuple[int, int]] = []
        self._tell = tell
        self._telling = threading.RLock()  # whoever is told may cancel the read
        self._has_outcome = False

    def note(self, i: int, nbytes: int) -> None:
        """So many of the first bytes of item `i` are there."""
        self._news.append((i, nbytes))

    def close(
        self,
        i: int,
        status: Status,
        reason: Reason = Reason.NONE,
        nbytes: int = 0,
        tier: TierName = TierName.NONE,
    ) -> None:
        """Give the open item `i` its outcome, which is news."""
        super().close(i, status, reason, nbytes, tier)
        if status != Status.REFUSED:
            self._news.append((i, nbytes if status == Status.HIT else -1))

    def tell(self, lock: threading.Lock) -> None:
        """Tell what is new. Without `lock`, the store's."""
        with self._telling:
            with lock:
                news, self._news = self._news, []
            for i, nbytes in news:
                if self._has_outcome:
                    return
                try:
                    self._tell(i, self.views[i] if nbytes >= 0 else None, nbytes)
                except Exception:
                    _log.exception("on_progress of a read failed")

    def outcome(self) -> Any:
        """The lease. Whoever gets it may release it: nothing is told any more."""
        with self._telling:
            self._has_outcome = True
        self.views = [
            view if status == Status.HIT else None
            for view, status in zip(self.views, self.status, strict=True)
        ]
        return super().outcome()
