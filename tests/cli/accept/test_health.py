"""Blocks that are written and read back, on files and on devices with faults."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from kvtier.cli.accept.health import BLOCK, Blocks
from kvtier.errors import TierUnavailable
from kvtier.testing.emulated import EmulatedDevice
from kvtier.testing.faults import Fault

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CAPACITY = 64 * BLOCK
COUNT = 16


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    try:
        emulated = EmulatedDevice("instant", size=2 * CAPACITY)
    except TierUnavailable as error:
        pytest.skip(str(error))
    with emulated:
        yield emulated


def opened(path: Path, flags: int = 0) -> int:
    fd = os.open(path / "slab", os.O_RDWR | os.O_CREAT | flags, 0o600)
    os.ftruncate(fd, CAPACITY)
    return fd


def test_a_sound_file(tmp_path: Path) -> None:
    fd = opened(tmp_path)
    blocks = Blocks(fd, CAPACITY, COUNT, seed=1)
    for outcome in (blocks.write(), blocks.read(compare=True), blocks.read(compare=False)):
        assert (outcome.nbytes, outcome.errors, outcome.wrong, outcome.hung) == (COUNT * BLOCK, 0, 0, 0)
        assert outcome.gb_s > 0
    data = (tmp_path / "slab").read_bytes()
    written = [i for i in range(64) if any(data[i * BLOCK : i * BLOCK + 4096])]
    assert len(written) == len(blocks) == COUNT
    assert written[0] == 0
    assert written[-1] == 63, "the end of the capacity is written, too"
    os.close(fd)


def test_one_wrong_byte_and_two_swapped_pages_are_found(tmp_path: Path) -> None:
    fd = opened(tmp_path)
    blocks = Blocks(fd, CAPACITY, 64, seed=1)
    blocks.write()
    byte = os.pread(fd, 1, 5 * BLOCK + 4097)
    os.pwrite(fd, bytes([byte[0] ^ 1]), 5 * BLOCK + 4097)
    one, other = os.pread(fd, 4096, 9 * BLOCK), os.pread(fd, 4096, 17 * BLOCK)
    assert one[8:] == other[8:], "blocks of the same pool differ by their marks alone"
    os.pwrite(fd, one, 17 * BLOCK)
    os.pwrite(fd, other, 9 * BLOCK)
    assert blocks.read(compare=True).wrong == 3
    os.close(fd)


def test_more_blocks_than_there_is_room_for_are_not_written(tmp_path: Path) -> None:
    fd = opened(tmp_path)
    assert len(Blocks(fd, CAPACITY, 1000, seed=0)) == 64
    os.close(fd)


def test_errors_are_counted_by_their_words(device: EmulatedDevice) -> None:
    fd = opened(device.paths[0], os.O_DIRECT)
    blocks = Blocks(fd, CAPACITY, COUNT, seed=2)
    device.inject(Fault(op="write", errno=errno.EIO, count=3))
    device.inject(Fault(op="fsync", errno=errno.ENOSPC))
    written = blocks.write()
    assert (written.errors, written.nbytes) == (4, (COUNT - 3) * BLOCK)
    assert written.said == {os.strerror(errno.EIO): 3, os.strerror(errno.ENOSPC): 1}
    device.clear_faults()
    device.inject(Fault(op="read", short=4096, count=1))
    read = blocks.read(compare=True)
    assert read.errors == 1
    assert read.wrong in (2, 3), "what was never written reads as zeros"
    os.close(fd)


def test_a_flipped_bit_is_a_wrong_block(device: EmulatedDevice) -> None:
    fd = opened(device.paths[0], os.O_DIRECT)
    blocks = Blocks(fd, CAPACITY, COUNT, seed=3)
    blocks.write()
    device.inject(Fault(op="read", flip_bit=70_000, count=2))
    assert blocks.read(compare=True).wrong == 2
    assert blocks.read(compare=True).wrong == 0
    os.close(fd)


def test_a_device_that_hangs_is_left_alone(device: EmulatedDevice) -> None:
    fd = opened(device.paths[0], os.O_DIRECT)
    blocks = Blocks(fd, CAPACITY, COUNT, seed=4, patience=0.5)
    device.inject(Fault(op="write", hang=True, nth=COUNT - 3))
    written = blocks.write()
    assert written.hung >= 1
    assert written.nbytes < COUNT * BLOCK
    device.clear_faults()
