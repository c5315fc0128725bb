"""StoreConfig's ranges, and the sizes derived from them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvtier.config import (
    FIELDS,
    GIB,
    KIB,
    MAX_EXTENT_BYTES,
    MAX_PAYLOAD_BYTES,
    MIB,
    MIN_JOURNAL_BYTES,
    PAGE,
    StoreConfig,
    extent_area,
    extent_size,
    journal_limit,
    page_up,
)
from kvtier.errors import InvalidRequest

DISK = Path("/somewhere")


def test_defaults_are_a_store_in_dram() -> None:
    config = StoreConfig()
    assert config.path is None
    assert config.dram == GIB
    assert config.part_bytes == MIB
    assert config.engine == "auto"
    assert config.on_incompatible == "error"


def test_settings_do_not_change_afterwards() -> None:
    config = StoreConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.dram = 1  # type: ignore[misc]
    assert FIELDS[:2] == ("paths", "capacity")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"capacity": -1}, "capacity is -1, needs to be at least 0"),
    ({"dram": -1}, "dram is -1, needs to be at least 0"),
    ({"chunk_bytes": 0}, "chunk_bytes is 0, needs to be at least 1"),
    ({"chunk_bytes": MAX_PAYLOAD_BYTES + 1}, f"chunk_bytes is .*at most {MAX_PAYLOAD_BYTES}"),
    ({"io_threads": 0}, "io_threads is 0"),
    ({"io_depth": 0}, "io_depth is 0"),
    ({"max_queued_chunks": 0}, "max_queued_chunks is 0"),
    ({"part_bytes": 0}, "part_bytes is 0, needs a power of two"),
    ({"part_bytes": 32 * KIB}, "part_bytes is 32768"),
    ({"part_bytes": 96 * KIB}, "part_bytes is 98304"),
    ({"part_bytes": 2 * MIB}, "part_bytes is 2097152"),
    ({"part_bytes": -64 * KIB}, "part_bytes is -65536"),
    ({"get_timeout": 0}, "get_timeout is 0, needs to be above 0 seconds"),
    ({"put_timeout": -1.0}, "put_timeout is -1.0"),
    ({"close_timeout": math.nan}, "close_timeout is nan"),
    ({"engine": "io_uring"}, "engine is 'io_uring', needs one of 'auto', 'uring', 'threads'"),
    ({"on_incompatible": "ignore"}, "on_incompatible is 'ignore', needs one of 'error', 'discard'"),
    ({"access": "everyone"}, "access is 'everyone', needs one of 'owner', 'group'"),
    ({"admission": "never"}, "admission is 'never', needs one of 'always', 'second-touch'"),
    ({"endurance": -1}, "endurance is -1, needs to be at least 0"),
    ({"free_space": -1}, "free_space is -1, needs to be at least 0"),
    ({"io_window": -1}, "io_window is -1, needs to be at least 0"),
    ({"paths": (DISK, Path("/other"), DISK)}, "paths names /somewhere twice"),
    (
        {"paths": (DISK, Path("/other")), "capacity": 8 * MIB},
        "capacity is 8388608 bytes, 4194304 for each path, below one chunk",
    ),
    ({"dram": 0}, "needs a tier: give a path"),
    ({"dram": 4 * MIB - 1}, "dram is 4194303 bytes, below one chunk of 4194304"),
    ({"landing": 4 * MIB - 1}, "landing is 4194303 bytes, needs room for one chunk"),
    ({"landing": 0, "paths": (DISK,)}, "landing is 0 bytes"),
    ({"io_window": 4 * MIB - 1}, "io_window is 4194303 bytes"),
    (
        {"paths": (DISK,), "capacity": 4 * MIB},
        "capacity is 4194304 bytes, below one chunk of 4194304",
    ),
]


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=[str(settings) for settings, _ in WRONG])
def test_a_value_out_of_its_range_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        StoreConfig(**settings)


def test_invariant_2_an_infinite_timeout_is_never(
    open_store: Any, keys: Any, payload: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(get_timeout=math.inf, put_timeout=math.inf, close_timeout=math.inf)
    names = keys(16)
    put = store.put(names, [payload(key, 64 * KIB) for key in names], until="disk")
    store.close()  # while the put is under way
    assert put.result(20).ok
    assert not caplog.records


def test_the_smallest_capacity_holds_a_chunk_and_its_journal() -> None:
    least = 64 * KIB + PAGE + 64 * KIB
    config = StoreConfig(paths=(DISK,), capacity=least, chunk_bytes=64 * KIB)
    assert extent_area(config.capacity, config.chunk_bytes) == 64 * KIB
    with pytest.raises(InvalidRequest, match="raise capacity, or lower chunk_bytes"):
        StoreConfig(paths=(DISK,), capacity=least - 1, chunk_bytes=64 * KIB)


@pytest.mark.parametrize("part", [64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, MIB])
def test_parts_of_every_power_of_two_in_range_do(part: int) -> None:
    assert StoreConfig(part_bytes=part).part_bytes == part


def test_paths_share_the_capacity_equally() -> None:
    both = StoreConfig(paths=(DISK, Path("/other")), capacity=2 * GIB + 1, io_threads=3)
    one = both.of_path(Path("/other"))
    assert (one.paths, one.capacity, one.io_threads) == ((Path("/other"),), GIB, 3)
    assert both.path == DISK


def test_dram_may_be_left_out_with_a_disk() -> None:
    assert StoreConfig(paths=(DISK,), dram=0).dram == 0


@given(st.integers(0, 1 << 50))
def test_pages_round_up(nbytes: int) -> None:
    up = page_up(nbytes)
    assert up % PAGE == 0
    assert nbytes <= up < nbytes + PAGE


@given(st.integers(64 * KIB, 1 << 44), st.integers(1, MAX_PAYLOAD_BYTES))
def test_invariant_5_area_and_journal_fit_the_capacity(capacity: int, chunk: int) -> None:
    limit = journal_limit(capacity, chunk)
    area = extent_area(capacity, chunk)
    assert area + limit + PAGE == capacity
    assert limit >= MIN_JOURNAL_BYTES
    assume(area >= page_up(chunk))
    extent = extent_size(area, chunk)
    assert extent % page_up(chunk) == 0
    assert page_up(chunk) <= extent <= max(MAX_EXTENT_BYTES, page_up(chunk))
    extents = area // extent
    assert extents >= 1
    wasted = area - extents * extent
    assert wasted < extent
    # A third of the journal holds a record for every chunk of the expected size.
    assert limit // 128 // 3 >= extents * (extent // page_up(chunk)) - 1


@given(st.integers(0, 1 << 40), st.integers(1, 64 * MIB))
def test_extents_are_about_a_sixteenth(area: int, chunk: int) -> None:
    assume(area >= 32 * page_up(chunk))
    extent = extent_size(area, chunk)
    assert area // extent >= 16
    if extent + page_up(chunk) <= MAX_EXTENT_BYTES:
        assert area // (extent + page_up(chunk)) <= 16
