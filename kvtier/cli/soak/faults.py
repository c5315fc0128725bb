"""Faults drawn at random for an emulated device."""

from __future__ import annotations

import errno
import random
from typing import TYPE_CHECKING, Any

from kvtier.testing.faults import Fault

if TYPE_CHECKING:
    from kvtier.testing.emulated import EmulatedDevice

_KINDS: dict[str, dict[str, Any]] = {
    "read error": {"op": "read", "errno": errno.EIO},
    "write error": {"op": "write", "errno": errno.EIO},
    "sync error": {"op": "fsync", "errno": errno.EIO},
    "no space": {"op": "write", "errno": errno.ENOSPC},
    "quota": {"op": "write", "errno": errno.EDQUOT},
    "out of memory": {"op": "read", "errno": errno.ENOMEM},
    "device gone": {"errno": errno.ENODEV},
    "short read": {"op": "read", "short": 4096},
    "short write": {"op": "write", "short": 4096},
    "torn write": {"op": "write", "torn": 512},
    "bit flipped when read": {"op": "read", "flip_bit": 12345},
    "bit flipped when written": {"op": "write", "flip_bit": 321},
    "slow": {"delay": 0.02},
    "slower": {"delay": 0.2},
    "hang": {"hang": True},
}


_FILES = {
    "slab": ["slab", "slab", "journal*", "*"],
    "files": ["*.kv1", "*-*", "ledger", "*"],  # chunks, temporaries
}
"""Where a fault strikes, by kind of store."""


class FaultDice:
    """Puts faults in force on a device, one at a time."""

    def __init__(self, device: EmulatedDevice, seed: int, store_kind: str) -> None:
        self.device = device
        self._files = _FILES[store_kind]
        self.rng = random.Random(seed)
        self.counts: dict[str, int] = {}
        """Requests struck, by kind."""
        self._now: tuple[str, Any] | None = None

    def throw(self) -> str:
        """Put one in force; returns its kind."""
        self.clear()
        kind = self.rng.choice(list(_KINDS))
        fields = {
            "file": self.rng.choice(self._files),
            "probability": self.rng.choice([1.0, 0.3, 0.05]),
            "seed": self.rng.randrange(1 << 30),
        }
        fault = Fault(**{**fields, **_KINDS[kind]})
        self._now = kind, self.device.inject(fault)
        return kind

    def clear(self) -> None:
        """End the fault in force, and let go of what hangs."""
        if self._now is not None:
            kind, injected = self._now
            self.counts[kind] = self.counts.get(kind, 0) + injected.hits
            self._now = None
        self.device.clear_faults()
