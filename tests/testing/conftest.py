"""Emulated devices for the tests, one per file and freed of faults after each test."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

import pytest

from kvtier.errors import TierUnavailable
from kvtier.testing.emulated import EmulatedDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvtier.testing.profiles import DeviceProfile

MIB = 1 << 20


@pytest.fixture(scope="session")
def emulate() -> Iterator[Callable[..., EmulatedDevice]]:
    """`emulate(profile, size=...)`: devices, closed at the end; skips where FUSE cannot be had."""
    made: list[EmulatedDevice] = []

    def make(profile: DeviceProfile | str = "instant", size: str = "64MiB") -> EmulatedDevice:
        try:
            made.append(EmulatedDevice(profile, size=size))
        except TierUnavailable as error:
            pytest.skip(str(error))
        return made[-1]

    yield make
    for device in made:
        device.close()


@pytest.fixture(scope="module")
def shared_device(emulate: Callable[..., EmulatedDevice]) -> EmulatedDevice:
    return emulate()


@pytest.fixture
def device(shared_device: EmulatedDevice) -> Iterator[EmulatedDevice]:
    """A device without timing, empty and without faults."""
    shared_device.reset_stats()
    yield shared_device
    shared_device.clear_faults()
    for path in shared_device.paths[0].iterdir():
        path.unlink()


@pytest.fixture
def file(device: EmulatedDevice) -> Path:
    """2 MiB of random bytes on the device, and the device's counters at zero."""
    path = device.paths[0] / "slab"
    path.write_bytes(os.urandom(2 * MIB))
    device.reset_stats()
    return path


@pytest.fixture
def page_buffer() -> Callable[[int], mmap.mmap]:
    """`page_buffer(nbytes)`: memory that O_DIRECT takes."""
    return lambda nbytes: mmap.mmap(-1, nbytes)
