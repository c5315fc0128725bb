"""What prefill and loads take."""

from __future__ import annotations

import pytest

from kvtier.connector import Economy
from kvtier.integrations.vllm.pace import LoadClock, PrefillPace


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_steps_of_little_but_prefill_count() -> None:
    economy, clock = Economy(), Clock()
    pace = PrefillPace(economy, clock)
    for prefill, tokens, seconds in ((512, 520, 1.0), (512, 600, 9.0), (32, 32, 9.0), (0, 0, 9.0)):
        pace.step(prefill, tokens, was_idle=False)
        clock.now += seconds
    pace.step(512, 512, was_idle=False)
    assert economy.prefill_time(512) == 1.0
    clock.now += 100.0
    pace.step(512, 512, was_idle=True)
    assert economy.prefill_time(512) == 1.0


def test_loads_share_the_time_that_they_take_together() -> None:
    clock = Clock()
    loads = LoadClock(clock)
    loads.begin("a")
    clock.now = 1.0
    loads.begin("b")
    clock.now = 3.0
    assert loads.end("a") == 2.0
    clock.now = 4.0
    loads.begin("c")
    clock.now = 5.0
    assert loads.end("c") == 0.5
    assert loads.end("b") == 2.5
    clock.now = 100.0
    loads.begin("d")
    clock.now = 101.0
    assert loads.end("d") == pytest.approx(1.0)
