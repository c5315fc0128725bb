"""The journal's header is there twice: no single sector or byte of it costs anything."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvtier.config import KIB, PAGE, StoreConfig
from kvtier.errors import IncompatibleStore
from kvtier.format import (
    HEADER,
    JOURNAL_HEADER_BYTES,
    JOURNAL_MAGIC,
    DamagedHeader,
    Header,
    decode_header,
    decode_journal_head,
    journal_head,
)
from kvtier.tiers.slab.tier import SlabTier

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COUNT = 12
COPIES = (0, PAGE)


@pytest.fixture
def config(small_config: Callable[..., StoreConfig]) -> StoreConfig:
    """Of a closed store with a few journalled chunks."""
    config = small_config()
    lock = threading.Lock()
    tier = SlabTier(config, lock)
    with tier.journal.lock, lock:
        writes = []
        for i in range(COUNT):
            offset = tier.reserve(64 * KIB)
            assert offset is not None
            writes.append(tier.start_write(bytes([i]) * 32, offset, 64 * KIB))
            writes[-1].sums = np.ones(1, np.uint64)
        tier.journal_puts(writes)
    tier.close()
    return config


def journal(config: StoreConfig) -> Path:
    assert config.path is not None
    return config.path / "journal"


def chunks(config: StoreConfig) -> int:
    """What an opening finds, after which both headers must be whole again."""
    tier = SlabTier(config, threading.Lock())
    found = len(tier.index)
    assert not tier.recovery["recovery_journal_lost"]
    tier.close()
    head = journal(config).read_bytes()[:JOURNAL_HEADER_BYTES]
    assert decode_journal_head(head, "journal")[1]
    assert head[:PAGE] == head[PAGE:]
    return found


@pytest.mark.parametrize("copy", COPIES)
def test_invariant_6_a_flipped_byte_of_either_header_costs_nothing(config: StoreConfig, copy: int) -> None:
    whole = journal(config).read_bytes()
    for at in range(HEADER.itemsize):
        damaged = bytearray(whole)
        damaged[copy + at] ^= 1 << at % 8
        journal(config).write_bytes(damaged)
        assert chunks(config) == COUNT, f"byte {copy + at}"


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("nbytes", [128, 512, PAGE])
@pytest.mark.parametrize("noise", [b"\0", b"\xff", b"KVTSLAB\0"])
def test_invariant_6_a_lost_sector_of_either_header_costs_nothing(
    config: StoreConfig, copy: int, nbytes: int, noise: bytes
) -> None:
    damaged = bytearray(journal(config).read_bytes())
    damaged[copy : copy + nbytes] = (noise * nbytes)[:nbytes]
    journal(config).write_bytes(damaged)
    assert chunks(config) == COUNT


def test_a_mended_header_is_not_mended_again(config: StoreConfig) -> None:
    damaged = bytearray(journal(config).read_bytes())
    damaged[0] ^= 1
    journal(config).write_bytes(damaged)
    assert chunks(config) == COUNT
    mended = journal(config).read_bytes()
    assert chunks(config) == COUNT
    assert journal(config).read_bytes() == mended


def test_without_either_header_the_store_starts_empty(config: StoreConfig) -> None:
    damaged = bytearray(journal(config).read_bytes())
    for copy in COPIES:
        damaged[copy] ^= 1
    journal(config).write_bytes(damaged)
    tier = SlabTier(config, threading.Lock())
    assert (len(tier.index), tier.recovery["recovery_journal_lost"]) == (0, 1)
    tier.close()


def header() -> Header:
    return Header.new(part_bytes=64 * KIB, capacity=1, extent_bytes=PAGE, chunk_bytes=PAGE).for_journal(7)


def test_the_head_of_a_journal_is_its_header_in_two_pages() -> None:
    made = header()
    head = journal_head(made)
    assert len(head) == JOURNAL_HEADER_BYTES == 8192
    assert head == 2 * (made.encode() + bytes(PAGE - HEADER.itemsize))
    assert decode_journal_head(head, "journal") == (made, True)


def test_copies_that_differ_are_written_anew() -> None:
    made = header()
    head = made.encode().ljust(PAGE, b"\0") + replace(made, next_generation=9).encode().ljust(PAGE, b"\0")
    assert decode_journal_head(head, "journal") == (made, False)


@pytest.mark.parametrize("data", [b"", bytes(JOURNAL_HEADER_BYTES), b"#!/bin/sh\n" * 1000])
def test_without_a_copy_it_says_what_the_first_is(data: bytes) -> None:
    with pytest.raises(DamagedHeader) as one:
        decode_header(data[:PAGE], JOURNAL_MAGIC, "/a/journal")
    with pytest.raises(DamagedHeader) as both:
        decode_journal_head(data, "/a/journal")
    assert str(both.value) == str(one.value)


def test_the_second_header_of_another_version_is_refused(monkeypatch: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("kvtier.format.FORMAT_VERSION", 3)
        second = journal_head(header())[PAGE:]
    with pytest.raises(IncompatibleStore, match="version 3"):
        decode_journal_head(bytes(PAGE) + second, "journal")
