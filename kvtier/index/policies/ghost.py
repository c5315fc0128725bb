"""Ghost: keys that are not stored any more, remembered in 8 bytes each."""

from __future__ import annotations

from array import array

import numpy as np

_WAYS = 8
"""Keys that share a set: the oldest of them makes room."""
_SET_BITS = 13
"""Bits of a key that only name its set; those above them tell it from others there."""
_FINGERPRINT = (1 << 31) - 1
_STAMP_BITS = 28
STAMPS = 1 << _STAMP_BITS
"""Stamps count up to here, and then from 0 again."""
TAGS = 16


class Ghost:
    """Remembers a tag below TAGS and a stamp below STAMPS for each of the latest keys.

    With half of its places in use one in fifty is forgotten too early. Two keys are taken for one with a
    probability of some 2^-28: nothing may depend on that but what leaves a tier.
    """

    def __init__(self, places: int = _WAYS << _SET_BITS) -> None:
        """Room for so many keys, a power of two from 65,536 on."""
        self._table = array("Q", bytes(8 * places))
        self._mask = places // _WAYS - 1

    def __len__(self) -> int:
        """Places there are."""
        return len(self._table)

    def remember(self, key: bytes, tag: int = 0, stamp: int = 0) -> None:
        """Note a key that leaves and is not known."""
        bits = int.from_bytes(key[:8], "little")
        entry = (bits >> _SET_BITS & _FINGERPRINT | 1 << 31) << 32 | tag << _STAMP_BITS | stamp & STAMPS - 1
        first = (bits & self._mask) * _WAYS
        table = self._table
        if table[first]:
            table[first + 1 : first + _WAYS] = table[first : first + _WAYS - 1]
        table[first] = entry

    def recall(self, key: bytes) -> tuple[int, int] | None:
        """The tag and the stamp of a key, which is then forgotten; None if it is not known."""
        bits = int.from_bytes(key[:8], "little")
        wanted = bits >> _SET_BITS & _FINGERPRINT | 1 << 31
        table, first = self._table, (bits & self._mask) * _WAYS
        for place in range(first, first + _WAYS):
            entry = table[place]
            if entry >> 32 == wanted:
                last = first + _WAYS - 1
                table[place:last] = table[place + 1 : last + 1]
                table[last] = 0
                return entry >> _STAMP_BITS & TAGS - 1, entry & STAMPS - 1
            if not entry:
                break
        return None

    def grow(self) -> None:
        """Twice the places; what is known stays."""
        before = np.frombuffer(self._table, np.uint64)
        places = np.flatnonzero(before)
        entries = before[places]
        self._table = array("Q", bytes(16 * len(before)))
        sets = self._mask = 2 * self._mask + 1
        known = ((entries >> np.uint64(32)).astype(np.int64) & _FINGERPRINT) << _SET_BITS
        target = (known | places // _WAYS) & sets
        order = np.argsort(target, kind="stable")
        starts = np.searchsorted(target[order], target[order])
        np.frombuffer(self._table, np.uint64)[target[order] * _WAYS + np.arange(len(order)) - starts] = (
            entries[order]
        )
