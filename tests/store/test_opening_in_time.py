"""A device that hangs while it is opened."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kvtier
from kvtier.errors import InvalidRequest, TierUnavailable
from kvtier.store.opening import open_in_time
from kvtier.testing.emulated import EmulatedDevice
from kvtier.testing.faults import Fault
from kvtier.testing.profiles import profile
from small_stores import SMALL
from store_calls import put_and_get

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATH = Path("/dev/slow")


def closer(closed: list[int]) -> Callable[[int], None]:
    return closed.append


def test_what_opens_is_handed_over_and_not_closed() -> None:
    closed: list[int] = []
    assert open_in_time(PATH, 20.0, lambda: 7, closer(closed)) == 7
    assert not closed


def test_what_is_raised_is_raised() -> None:
    def fail() -> int:
        raise InvalidRequest("wrong")

    with pytest.raises(InvalidRequest, match="wrong"):
        open_in_time(PATH, 20.0, fail, lambda made: None)


def test_what_comes_late_is_closed() -> None:
    goes_on, closed, done = threading.Event(), list[int](), threading.Event()

    def hang() -> int:
        goes_on.wait(20)
        return 7

    def close(made: int) -> None:
        closed.append(made)
        done.set()

    with pytest.raises(TierUnavailable, match=r"/dev/slow does not answer.*0.05 s; see to the device"):
        open_in_time(PATH, 0.05, hang, close)
    assert not closed
    goes_on.set()
    assert done.wait(20)
    assert closed == [7]


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    try:
        made = EmulatedDevice(replace(profile("instant"), devices=2), size="32MiB")
    except TierUnavailable as error:
        pytest.skip(str(error))
    with made:
        yield made
        made.clear_faults()


def test_a_path_that_hangs_at_open_is_named_and_the_rest_can_be_opened_without_it(
    device: EmulatedDevice, payload: Any, key: Any
) -> None:
    paths = [path / "store" for path in device.paths[:2]]
    settings = {**SMALL, "dram": 0, "capacity": 16 << 20}
    with kvtier.open(paths, **settings) as store:
        put_and_get(store, key(0), payload(0))
    device.inject(Fault(op="any", hang=True), device=1)
    start = time.monotonic()
    with pytest.raises(TierUnavailable, match=f"{paths[1]} does not answer"):
        kvtier.open(paths, **settings, open_timeout=0.5)
    assert time.monotonic() - start < 20
    with kvtier.open(paths[0], **SMALL) as store:
        put_and_get(store, key(1), payload(1))
    device.clear_faults()
    end = time.monotonic() + 20
    while True:  # until the opening that was given up has let go of the directory
        try:
            kvtier.open(paths, **settings).close()
            break
        except kvtier.StoreInUse:
            assert time.monotonic() < end
            time.sleep(0.02)
