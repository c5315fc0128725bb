"""Emulated devices for tests that need one, and are skipped where none can be mounted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtier.errors import TierUnavailable
from kvtier.testing.emulated import EmulatedDevice

if TYPE_CHECKING:
    from collections.abc import Iterator


def instant_device(size: str) -> Iterator[EmulatedDevice]:
    """The body of a fixture: a device without latency, of that size."""
    try:
        made = EmulatedDevice("instant", size=size)
    except TierUnavailable as error:
        pytest.skip(str(error))
    with made:
        yield made
