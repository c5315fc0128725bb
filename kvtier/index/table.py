"""KeyTable: 32-byte key to row number, open addressing over flat columns.

A dict of bytes objects would take about 160 bytes per chunk before any column; this takes about 44.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from kvtier._native import core
from kvtier.types import KEY_BYTES

if TYPE_CHECKING:
    import numpy.typing as npt

EMPTY = -1


class KeyTable:
    """Maps keys to rows. A row number names its key's place in the key column."""

    def __init__(self, expected: int = 0) -> None:
        self._keys = bytearray()
        self._count = 0
        self._place(np.empty(0, np.int32), expected * 3 // 2)

    def __len__(self) -> int:
        return self._count

    def key(self, row: int) -> bytes:
        """The key stored for `row`."""
        return bytes(self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES])

    def keys(self, start: int, stop: int) -> npt.NDArray[np.void]:
        """A copy of the keys last stored for these rows: shape (n,)."""
        return np.frombuffer(bytes(self._keys[start * KEY_BYTES : stop * KEY_BYTES]), f"V{KEY_BYTES}")

    def find(self, key: bytes) -> int:
        """Row of `key`, or EMPTY."""
        # As `_slot`, without its call: whole prompts are looked up key by key.
        rows, mask, keys = self._rows, self._mask, self._keys
        slot = hash(key) & mask
        while (row := rows[slot]) != EMPTY and not keys.startswith(key, row * KEY_BYTES):
            slot = (slot + 1) & mask
        return row

    def find_all(self, keys: list[bytes]) -> list[int]:
        """Rows of many keys, EMPTY for each that is not bound."""
        if core is not None:
            rows: list[int] = core.find_all(keys, self._rows, self._keys)
            return rows
        table, mask, stored = self._rows, self._mask, self._keys
        found = []
        for key in keys:
            slot = hash(key) & mask
            while (row := table[slot]) != EMPTY and not stored.startswith(key, row * KEY_BYTES):
                slot = (slot + 1) & mask
            found.append(row)
        return found

    def replace_all(self, bound: list[int], keys: list[bytes]) -> None:
        """Bind bound rows to keys that are not in the table, instead of their own."""
        if core is not None:
            core.replace_all(bound, keys, self._rows, self._keys)
            return
        for row, key in zip(bound, keys, strict=True):
            self._replace(row, key)

    def _replace(self, row: int, key: bytes) -> None:
        rows, mask, keys = self._rows, self._mask, self._keys
        start = row * KEY_BYTES
        hole = hash(bytes(keys[start : start + KEY_BYTES])) & mask
        while rows[hole] != row:
            hole = (hole + 1) & mask
        slot = hole
        while (other := rows[slot := (slot + 1) & mask]) != EMPTY:
            first = other * KEY_BYTES
            if (slot - hash(bytes(keys[first : first + KEY_BYTES]))) & mask >= (slot - hole) & mask:
                rows[hole] = other
                hole = slot
        rows[hole] = EMPTY
        slot = hash(key) & mask
        while rows[slot] != EMPTY:
            slot = (slot + 1) & mask
        rows[slot] = row
        keys[start : start + KEY_BYTES] = key

    def insert(self, key: bytes, row: int) -> None:
        """Bind a key that is not in the table to a row that no key is bound to."""
        if 3 * (self._count + 1) > 2 * len(self._rows):
            self._place(self.rows(), 2 * len(self._rows))
        start = row * KEY_BYTES
        if start == len(self._keys):
            self._keys += key
        else:
            self._keys[start : start + KEY_BYTES] = key
        self._rows[self._slot(key)] = row
        self._count += 1

    def remove(self, key: bytes) -> None:
        """Unbind a key that is in the table; its row may be bound again."""
        rows, mask = self._rows, self._mask
        hole = slot = self._slot(key)
        while (row := rows[slot := (slot + 1) & mask]) != EMPTY:
            home = hash(self.key(row)) & mask
            # An entry moves into the hole unless its home lies between the hole and itself.
            if (slot - home) & mask >= (slot - hole) & mask:
                rows[hole] = row
                hole = slot
        rows[hole] = EMPTY
        self._count -= 1

    def rows(self) -> npt.NDArray[np.int32]:
        """Every bound row, in no particular order."""
        places = np.array(self._rows, np.int32)
        rows: npt.NDArray[np.int32] = places[places != EMPTY]
        return rows

    def load(self, keys: bytes) -> None:
        """Bind rows 0.. to the distinct `keys` (32 bytes each, joined) of an empty table."""
        self._keys = bytearray(keys)
        self._count = len(keys) // KEY_BYTES
        self._place(np.arange(self._count, dtype=np.int32), self._count * 3 // 2 + 1)

    def _slot(self, key: bytes) -> int:
        """Where `key` is, or the empty place where it belongs."""
        rows, mask, keys = self._rows, self._mask, self._keys
        slot = hash(key) & mask
        while (row := rows[slot]) != EMPTY and not keys.startswith(key, row * KEY_BYTES):
            slot = (slot + 1) & mask
        return slot

    def _place(self, rows: npt.NDArray[np.int32], places: int) -> None:
        """Lay `rows` out anew over a power of two of at least `places`, all at once."""
        size = 1 << (max(places, 64) - 1).bit_length()
        mask = size - 1
        table = np.full(size, EMPTY, np.int32)
        keys = bytes(self._keys)
        starts = (rows.astype(np.int64) * KEY_BYTES).tolist()
        homes = np.fromiter((hash(keys[i : i + KEY_BYTES]) for i in starts), np.int64, len(rows)) & mask
        while rows.size:
            vacant = table[homes] == EMPTY
            table[homes[vacant]] = rows[vacant]
            lost = table[homes] != rows
            rows, homes = rows[lost], (homes[lost] + 1) & mask
        self._rows = array("i")
        self._rows.frombytes(table.tobytes())
        self._mask = mask
