"""Lifetimes: how long chunks stay in a tier, and how long it is until one is wanted again."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from kvtier.metrics import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np
    import numpy.typing as npt


_MASK = (1 << 32) - 1  # what a column holds, whatever the clock says


class Lifetimes:
    """Two times per row, to the second: 8 bytes a chunk, and constant time for each call and row."""

    def __init__(self, wall: Callable[[], float]) -> None:
        """`wall` tells the seconds since 1970."""
        self.residence = Histogram()
        """From when a chunk entered the tier to when it was evicted to make room."""
        self.reuse_gap = Histogram()
        """From when a chunk entered, or was last asked for here, to when it is asked for here."""
        self._wall = wall
        self._entered = array("I")
        self._used = array("I")  # 0: not known, from before the store was opened

    def enter(self, row: int) -> None:
        """A chunk enters in a row: one used before, or the next."""
        now = int(self._wall()) & _MASK
        if row < len(self._used):
            self._entered[row] = self._used[row] = now
        else:
            self._entered.append(now)
            self._used.append(now)

    def load(self, stored_at: npt.NDArray[np.generic]) -> None:
        """Fill an empty one, shape (n,): chunks that were in the tier since `stored_at`."""
        self._entered.frombytes(stored_at.astype("u4").tobytes())
        self._used.frombytes(bytes(self._used.itemsize * len(stored_at)))

    def use(self, rows: Iterable[int]) -> None:
        """Chunks are asked for."""
        now, used, before, count = int(self._wall()) & _MASK, self._used, 0, 0
        for row in rows:
            if used[row] != before:  # those of one request were mostly last used together
                if before:
                    self.reuse_gap.add(now - before, count)
                before, count = used[row], 0
            count += 1
            used[row] = now
        if before:
            self.reuse_gap.add(now - before, count)

    def leave(self, row: int) -> None:
        """A chunk is evicted to make room."""
        self.residence.add((int(self._wall()) & _MASK) - self._entered[row])
