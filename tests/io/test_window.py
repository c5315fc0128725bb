"""The budget of bytes in flight, on devices whose bandwidth follows from arithmetic."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.io.window import LEAST_BYTES, MOST_BYTES, Tuner, Window

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
SIZES = [8 * MIB, 11 * MIB, 16 * MIB, 22 * MIB, 32 * MIB, 45 * MIB, 64 * MIB, 90 * MIB, 128 * MIB]


def device(latency: float, bandwidth: float) -> Callable[[int], float]:
    """Bandwidth reached with a window: in proportion to it up to the device's own."""
    return lambda window: min(window / latency, bandwidth)


def settle(tuner: Tuner, rate_of: Callable[[int], float], rounds: int = 40) -> list[int]:
    used = []
    for _ in range(rounds):
        used.append(tuner.size)
        tuner.measured(rate_of(tuner.size))
    return used


@pytest.mark.parametrize("start", range(len(SIZES)))
@pytest.mark.parametrize(
    ("latency", "bandwidth", "wanted"),
    [
        (10e-3, 2.0e9, 20_000_000),  # 20 MB keep it busy
        (1e-3, 1.0e9, 8 * MIB),  # the least already does
        (100e-3, 5.0e9, 128 * MIB),  # more than the most would be needed
    ],
)
def test_it_finds_the_smallest_window_that_keeps_a_device_busy(
    start: int, latency: float, bandwidth: float, wanted: int
) -> None:
    tuner = Tuner(SIZES, start)
    rate_of = device(latency, bandwidth)
    used = settle(tuner, rate_of)[-20:]
    enough = next(size for size in SIZES if size >= 0.95 * wanted or size == SIZES[-1])
    assert Counter(used).most_common(1)[0][0] == enough, "but for a try of the sizes beside it now and then"
    assert tuner.rate == pytest.approx(rate_of(SIZES[-1]), rel=0.05)


def test_it_shrinks_when_only_the_latency_grows() -> None:
    tuner = Tuner(SIZES, len(SIZES) - 1)
    used = settle(tuner, device(1e-3, 1e9), 12)
    assert used == sorted(used, reverse=True), "every smaller window brings as much"
    assert tuner.size == SIZES[0]


def test_it_follows_a_device_that_changes() -> None:
    tuner = Tuner(SIZES, 6)
    for latency, wanted in ((4e-3, 8 * MIB), (40e-3, 90 * MIB), (4e-3, 8 * MIB)):
        used = settle(tuner, device(latency, 2e9), 200)[-50:]
        assert Counter(used).most_common(1)[0][0] == wanted


def test_noise_does_not_cost_bandwidth() -> None:
    noise = random.Random(7)
    rate_of = device(10e-3, 2e9)
    tuner = Tuner(SIZES, 6)
    used = settle(tuner, lambda size: rate_of(size) * noise.uniform(0.9, 1.1), 400)
    reached = sum(rate_of(size) for size in used[40:]) / len(used[40:])
    assert reached > 0.95 * 2e9


@given(st.lists(st.floats(1e3, 1e12), min_size=1, max_size=200), st.integers(0, len(SIZES) - 1))
def test_it_stays_within_its_bounds_whatever_it_measures(rates: list[float], start: int) -> None:
    tuner = Tuner(SIZES, start)
    for rate in rates:
        tuner.measured(rate)
        assert tuner.size in SIZES
        assert tuner.rate >= 0.0


def test_a_fixed_window_is_never_tuned() -> None:
    window = Window(5 * MIB, MIB)
    drive(window, 500, lambda size: 1e9)
    assert window.limit == 5 * MIB
    assert window.rate == pytest.approx(1e9, rel=0.01)


@given(st.integers(0, 4 << 30))
def test_bounds_hold_two_of_the_largest_slots(slot: int) -> None:
    window = Window(0, slot)
    assert window.limit >= max(LEAST_BYTES, 2 * slot)
    assert window.limit <= max(MOST_BYTES, 2 * slot)


def drive(window: Window, requests: int, rate_of: Callable[[int], float], *, busy: bool = True) -> None:
    """Keep a window full of 1 MiB requests on a device, one done after the other."""
    clock = 0.0
    for _ in range(requests):
        while window.has_room:
            window.enter(MIB, clock)
        clock += MIB / rate_of(window.limit)
        window.leave(MIB, clock, busy=busy)
    window.leave(window.in_flight, clock, busy=False)


def test_a_window_measures_the_device_it_keeps_busy() -> None:
    window = Window(0, MIB)
    drive(window, 8000, device(5e-3, 4e9))
    assert window.rate == pytest.approx(4e9, rel=0.05)
    assert 19 * MIB <= window.limit <= 32 * MIB
    assert window.in_flight == 0


def test_a_device_that_nobody_keeps_busy_is_not_measured() -> None:
    window = Window(0, MIB)
    before = window.limit
    drive(window, 2000, device(5e-3, 4e9), busy=False)
    assert (window.limit, window.rate) == (before, 0.0)


def test_what_another_shortage_held_up_is_not_measured() -> None:
    window = Window(0, MIB)
    for i in range(2000):
        window.enter(MIB, i * 1e-3)
        window.leave(MIB, (i + 1) * 1e-3, busy=True)  # one at a time: slots to land in are short, say
    assert window.rate == 0.0


def test_a_window_knows_when_it_was_last_used() -> None:
    window = Window(0, MIB)
    assert window.last_use == -math.inf
    window.enter(MIB, 3.0)
    window.leave(MIB, 4.0, busy=False)
    assert window.last_use == 4.0


def test_a_window_knows_how_long_nothing_came_back() -> None:
    window = Window(0, MIB)
    assert window.stalled(100.0) == 0.0
    window.enter(MIB, 3.0)
    window.enter(MIB, 5.0)
    assert window.stalled(6.0) == 3.0
    window.leave(MIB, 7.0, busy=False)
    assert window.stalled(9.0) == 2.0
    window.leave(MIB, 9.0, busy=False)
    assert window.stalled(50.0) == 0.0
