"""The budget of writes: held over any day, whatever comes, over restarts and steps of the clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config import GIB, MIB
from kvtier.tiers.slab import endurance
from kvtier.tiers.slab.endurance import DAY, Endurance

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BUDGET = 240 * GIB
HOUR = BUDGET / 24


class Time:
    """Two clocks that a test turns, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.wall = 1.8e9

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        self.wall += seconds

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.wall * 1e9)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(endurance, "time", made)
    return made


@pytest.fixture
def opened(tmp_path: Path, time: Time) -> Iterator[list[Endurance]]:
    made: list[Endurance] = []
    yield made
    for budget in made:
        budget.close()


def reopen(path: Path, opened: list[Endurance], *, well: bool = True, per_day: int = BUDGET) -> Endurance:
    """The next process's; `well`: the one before was closed."""
    if opened and well:
        opened[-1].save()
    opened.append(Endurance(path, per_day, 0o600))
    return opened[-1]


def write_what_is_allowed(
    budget: Endurance, time: Time, hours: float, chunk: int = 64 * MIB
) -> list[tuple[float, int]]:
    """Offer more than the budget, a chunk every two seconds; when what was written."""
    written = []
    end = time.now + hours * 3600
    while time.now < end:
        if budget.left > 0:
            budget.spend(chunk)
            written.append((time.now, chunk))
        time.pass_by(2)
    return written


def test_any_day_keeps_to_the_budget_and_no_hour_is_without_writes(
    tmp_path: Path, time: Time, opened: list[Endurance]
) -> None:
    budget = reopen(tmp_path, opened)
    time.pass_by(5 * DAY)  # idle: no more than an hour's worth is saved up
    written = write_what_is_allowed(budget, time, 48)
    start = written[0][0]
    for hour in range(48):
        within = sum(n for at, n in written if start + 3600 * hour <= at < start + 3600 * hour + DAY)
        assert within <= BUDGET * 25 / 24 + 64 * MIB
        assert hour > 24 or within >= 0.98 * BUDGET
        assert any(start + 3600 * hour <= at < start + 3600 * (hour + 1) for at, _ in written)


def test_a_restart_gives_nothing_away(tmp_path: Path, time: Time, opened: list[Endurance]) -> None:
    budget = reopen(tmp_path, opened)
    assert budget.left == HOUR
    budget.spend(int(HOUR) + 5 * MIB)
    for _ in range(50):
        budget = reopen(tmp_path, opened)
        assert budget.left == pytest.approx(-5 * MIB, abs=100)
        assert budget.spent == int(HOUR) + 5 * MIB
    time.pass_by(1800)
    assert reopen(tmp_path, opened).left == pytest.approx(HOUR / 2 - 5 * MIB, abs=100)


def test_a_death_costs_what_was_not_saved_only(tmp_path: Path, time: Time, opened: list[Endurance]) -> None:
    budget = reopen(tmp_path, opened)
    budget.spend(100 * MIB)
    budget.save()
    budget.spend(MIB)
    again = reopen(tmp_path, opened, well=False)
    assert again.left == HOUR - 100 * MIB
    assert again.spent == 100 * MIB


@pytest.mark.parametrize(("step", "expected"), [(-10 * DAY, 0), (-1, 0), (0, 0), (3600 * 0.5, 0.5)])
def test_a_step_of_the_wall_clock_between_processes(
    tmp_path: Path, time: Time, opened: list[Endurance], step: float, expected: float
) -> None:
    budget = reopen(tmp_path, opened)
    budget.spend(int(HOUR))
    budget.save()
    time.wall += step
    assert reopen(tmp_path, opened, well=False).left == pytest.approx(expected * HOUR, abs=100)


def test_years_between_processes_are_worth_no_more_than_an_hour(
    tmp_path: Path, time: Time, opened: list[Endurance]
) -> None:
    reopen(tmp_path, opened).spend(int(HOUR))
    opened[-1].save()
    time.wall += 3650 * DAY
    assert reopen(tmp_path, opened, well=False).left == HOUR


def test_a_step_of_the_wall_clock_while_running_is_nothing(
    tmp_path: Path, time: Time, opened: list[Endurance]
) -> None:
    budget = reopen(tmp_path, opened)
    budget.spend(int(HOUR))
    time.wall += 10 * DAY
    assert budget.left == pytest.approx(0, abs=100)


def test_another_budget_than_before(tmp_path: Path, time: Time, opened: list[Endurance]) -> None:
    reopen(tmp_path, opened).spend(100 * GIB)
    assert reopen(tmp_path, opened, per_day=24 * MIB).left == -24 * MIB, "a day at most is owed"
    time.pass_by(2 * DAY)
    assert opened[-1].left == MIB


def test_without_a_budget_there_is_no_limit_and_no_file(tmp_path: Path) -> None:
    free = Endurance(tmp_path, 0, 0o600)
    free.spend(1 << 60)
    free.save()
    assert free.left == float("inf")
    assert free.spent == 1 << 60
    free.close()
    assert not list(tmp_path.iterdir())


@given(st.binary(max_size=60), st.booleans())
def test_a_file_of_any_bytes_gives_nothing(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, ours: bool
) -> None:
    path = tmp_path_factory.mktemp("budget")
    (path / "endurance").write_bytes(b"KVTENDU\0" + data if ours else data)
    budget = Endurance(path, BUDGET, 0o600)
    try:
        assert budget.left <= (HOUR if not (data or ours) else MIB), "full only where there was nothing"
        assert budget.spent == 0
        budget.spend(MIB)
        budget.save()
        again = Endurance(path, BUDGET, 0o600)
        assert again.spent == MIB
        again.close()
    finally:
        budget.close()


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_a_file_that_says_anything_is_kept_within_bounds(
    tmp_path_factory: pytest.TempPathFactory, left: int, spent: int, then: int
) -> None:
    import xxhash

    path = tmp_path_factory.mktemp("budget")
    body = endurance._RECORD.pack(b"KVTENDU\0", left, spent, then, 0)[:-8]
    (path / "endurance").write_bytes(body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little"))
    budget = Endurance(path, BUDGET, 0o600)
    try:
        assert -BUDGET <= budget.left <= HOUR
        assert 0 <= budget.spent < 2**63
        budget.spend(MIB)
        budget.save()
    finally:
        budget.close()
