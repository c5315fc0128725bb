"""Rows: what an index knows of every chunk, in flat columns behind a table of keys. Memory only."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.index.expiry import Expiry
from kvtier.index.table import EMPTY, KeyTable

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kvtier.index.owners import Holdings

NO_ROW = EMPTY
COLUMNS = {
    "offset": "q", "nbytes": "I", "generation": "Q", "stored_bytes": "I", "codec": "B", "owner": "Q",
    "stored_at": "I", "expires_at": "I",
}  # fmt: skip
"""What an index keeps of every chunk, by row: attributes of SlotCache, and their array type codes."""
GONE = 1  # discarded while pinned: out of the table, slot still in use
_FEW_ROWS = 1 << 14
SUSPECT = 2  # the device failed to read it: a put replaces it
ENDS = 4  # it expires at some time


class Rows:
    """An entry is named by a row number until it is discarded and its last pin is gone."""

    holdings: Holdings

    def __init__(self, expected: int, wall: Callable[[], float]) -> None:
        self.table = KeyTable(expected)
        self.expiry = Expiry(wall)
        self.offset = array("q")
        self.nbytes = array("I")
        self.generation = array("Q")
        self.stored_bytes = array("I")  # in the slot: whole pages
        self.codec = array("B")
        self.owner = array("Q")  # names namespace and tenant; 0: nobody
        self.stored_at = array("I")  # seconds since 1970
        self.expires_at = array("I")  # the same; 0: never
        self._pins = array("I")
        self._flags = array("B")
        self._touched = array("Q")

    def __len__(self) -> int:
        return len(self.table)

    def find(self, key: bytes) -> int:
        """Row of `key`, or NO_ROW."""
        return self.table.find(key)

    def is_sound(self, key: bytes) -> bool:
        """Whether there is an entry for `key` in its time, and the device did not last fail to read it."""
        row = self.table.find(key)
        if row == NO_ROW:
            return False
        flags = self._flags[row]
        return not flags or not (flags & SUSPECT or self.is_expired(row))

    def has(self, key: bytes) -> bool:
        """As `is_sound`, whatever the time: an entry ends when it is swept."""
        row = self.table.find(key)
        return row != NO_ROW and not self._flags[row] & SUSPECT

    def is_expired(self, row: int) -> bool:
        """Whether the time of an entry is over."""
        return self.expiry.is_over(self.expires_at[row])

    def key(self, row: int) -> bytes:
        """Key of an entry."""
        return self.table.key(row)

    def is_gone(self, row: int) -> bool:
        """Whether a pinned entry was discarded."""
        return bool(self._flags[row] & GONE)

    def by_age(self) -> npt.NDArray[np.int64]:
        """Rows in the table, shape (n,): least recently used first, pinned ones last."""
        rows = self.table.rows().astype(np.int64)
        ages = np.frombuffer(self._touched, np.uint64)[rows] if rows.size else np.empty(0, np.uint64)
        pinned = np.frombuffer(self._pins, np.uint32)[rows] > 0 if rows.size else np.empty(0, bool)
        return rows[np.lexsort((ages, pinned))]

    def columns(self, start: int, stop: int) -> dict[str, npt.NDArray[Any]]:
        """Copies of what is kept of the live entries among these rows: COLUMNS, `row`, `key`, `touched`
        (when it was last used: the higher, the later) and `pinned`.
        """
        live = np.flatnonzero(np.frombuffer(self._flags[start:stop], np.uint8) & GONE == 0)
        found: dict[str, npt.NDArray[Any]] = {
            name: np.frombuffer(getattr(self, name)[start:stop], code)[live] for name, code in COLUMNS.items()
        }
        found["row"] = start + live
        found["key"] = self.table.keys(start, stop)[live]
        found["touched"] = np.frombuffer(self._touched[start:stop], np.uint64)[live]
        found["pinned"] = np.frombuffer(self._pins[start:stop], np.uint32)[live] > 0
        return found

    def keys(self, start: int, stop: int) -> npt.NDArray[np.void]:
        """A copy of the keys in these rows that `has` is true of: shape (n,)."""
        flags = np.frombuffer(self._flags[start:stop], np.uint8)
        keys: npt.NDArray[np.void] = self.table.keys(start, stop)[flags & (GONE | SUSPECT) == 0]
        return keys

    def next_live(self, row: int) -> int:
        """The first row of an entry from `row` on, or NO_ROW."""
        for start in range(row, len(self._flags), _FEW_ROWS):
            flags = np.frombuffer(self._flags[start : start + _FEW_ROWS], np.uint8)
            live = np.flatnonzero(flags & GONE == 0)
            if live.size:
                return start + int(live[0])
        return NO_ROW

    @property
    def rows(self) -> int:
        """Row numbers ever given out: all entries have lower ones."""
        return len(self.offset)

    def rows_of(self, owners: set[int]) -> list[int]:
        """Rows in the table that belong to any of `owners`."""
        if not owners & self.holdings.by_owner.keys():
            return []
        wanted = np.fromiter(owners, np.uint64, len(owners))
        found = np.isin(np.frombuffer(self.owner, np.uint64), wanted)
        found &= np.frombuffer(self._flags, np.uint8) & GONE == 0
        rows: list[int] = np.flatnonzero(found).tolist()
        return rows

    def sweep(self, most: int) -> list[int]:
        """Some rows in the table whose time is over, at most `most`; look again while `expiry.is_due`."""
        if not self.expiry.is_due():
            return []
        ends, flags = np.frombuffer(self.expires_at, np.uint32), np.frombuffer(self._flags, np.uint8)
        return self.expiry.step(ends, flags, GONE, most)
