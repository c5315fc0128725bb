"""Lease and Reservation: views of slots, for callers that copy between a slot and their own blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from kvtier.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    import numpy as np
    import numpy.typing as npt

    from kvtier.store.transfer import Transfer
    from kvtier.types import BatchResult

Until = Literal["dram", "disk"]


class Lease:
    """Chunks held in memory for reading: a context manager, or call `release`.

    The store owns the memory; the views are read-only and valid until `release`, not after.
    """

    def __init__(
        self,
        result: BatchResult,
        views: Sequence[npt.NDArray[np.uint8] | None],
        release: Callable[[], None],
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        self.result = result
        """Per key HIT, or why there is no view of it."""
        self.views = views
        """Per key a read-only uint8 array of the payload, shape (nbytes,), or None."""
        self._release: Callable[[], None] | None = release
        self._later = later

    def release(self) -> None:
        """Give the slots back. Idempotent."""
        release, self._release, self.views = self._release, None, ()
        if release is not None:
            release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        # The collector may run anywhere, even under the store's lock: leave it to another thread.
        if self._release is not None:
            self._later(self._release)


class Reservation:
    """Slots to write payloads into: a context manager that aborts what was not committed.

    The store owns the memory; the views are writable and valid until `commit` or `abort`.
    """

    def __init__(
        self,
        result: BatchResult,
        views: Sequence[npt.NDArray[np.uint8] | None],
        commit: Callable[[Until, str, float | None, float | None], Transfer[BatchResult]],
        abort: Callable[[], None],
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        self.result = result
        """Per key STORED where there is a view to fill, KNOWN or REFUSED where there is none."""
        self.views = views
        """Per key a writable uint8 array of shape (nbytes,), or None."""
        self._commit: Callable[[Until, str, float | None, float | None], Transfer[BatchResult]] | None = (
            commit
        )
        self._abort: Callable[[], None] | None = abort
        self._later = later

    def commit(
        self,
        *,
        until: Until = "dram",
        codec: str = "raw",
        ttl: float | None = None,
        timeout: float | None = None,
    ) -> Transfer[BatchResult]:
        """Publish the filled slots; resolves as `Store.put` does, per key of the reservation.

        Raises InvalidRequest if it was committed or aborted before, or for a wrong `until`, `codec` or
        `ttl`.
        """
        if self._commit is None:
            raise InvalidRequest("the reservation is over: reserve again to store more")
        transfer = self._commit(until, codec, ttl, timeout)
        self._commit = self._abort = None
        self.views = ()
        return transfer

    def abort(self) -> None:
        """Give back the slots unpublished. Idempotent."""
        abort, self._abort, self._commit, self.views = self._abort, None, None, ()
        if abort is not None:
            abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def __del__(self) -> None:
        if self._abort is not None:
            self._later(self._abort)
