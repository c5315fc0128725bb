"""The circuit breaker, on a clock of its own."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.io.base import CHECKSUM, SHORT
from kvtier.store.health import Health, Seldom, is_failure


def test_a_path_that_works_may_always_be_asked() -> None:
    health = Health()
    assert all(health.may_ask(now) for now in (0.0, 0.0, 5.0))
    assert not health.worked()
    assert not health.is_down


def test_some_failures_in_a_row_take_it_out() -> None:
    health = Health()
    assert [health.failed(0.0) for _ in range(3)] == [False, False, True]
    assert health.is_down
    assert health.outages == 1
    assert not health.may_ask(0.9)


def test_failures_between_successes_do_not() -> None:
    health = Health()
    for now in range(10):
        assert not health.failed(float(now))
        assert not health.failed(float(now))
        assert not health.worked()
    assert not health.is_down


def test_one_hang_takes_it_out() -> None:
    health = Health()
    assert health.hung(0.0)
    assert not health.hung(0.1), "it is told once"
    assert health.outages == 1


def test_one_request_tries_it_after_each_pause_and_pauses_grow() -> None:
    health = Health()
    health.hung(0.0)
    tried = [now / 10 for now in range(10_000) if health.may_ask(now / 10)]
    gaps = [round(later - earlier) for earlier, later in zip([0.0, *tried], tried, strict=False)]
    assert gaps[:7] == [1, 2, 4, 8, 16, 32, 60]
    assert set(gaps[6:]) == {60}


def test_it_is_back_when_the_try_works() -> None:
    health = Health()
    health.hung(0.0)
    assert health.may_ask(1.0)
    assert health.worked()
    assert not health.is_down
    assert health.may_ask(1.0)
    health.hung(2.0)
    assert health.may_ask(3.0), "the pause begins at the least again"


@pytest.mark.parametrize("outcome", [errno.EIO, errno.ENODEV, errno.ENOLINK, errno.EROFS, errno.ENXIO])
def test_errors_of_a_device_speak_against_it(outcome: int) -> None:
    assert is_failure(outcome)


@pytest.mark.parametrize("outcome", [0, CHECKSUM, SHORT, errno.ENOSPC, errno.EDQUOT, errno.ECANCELED])
def test_what_a_full_or_lying_disk_says_does_not(outcome: int) -> None:
    assert not is_failure(outcome)


@given(
    st.lists(st.tuples(st.sampled_from(["ask", "worked", "failed", "hung"]), st.floats(0, 100)), max_size=60)
)
def test_it_is_down_from_outage_to_success(events: list[tuple[str, float]]) -> None:
    health, now, in_a_row, down = Health(), 0.0, 0, False
    for event, seconds in events:
        now += seconds
        if event == "ask":
            assert health.may_ask(now) or down
        elif event == "worked":
            assert health.worked() == down
            in_a_row, down = 0, False
        elif event == "failed":
            in_a_row += 1
            assert health.failed(now) == (in_a_row >= 3 and not down)
            down = down or in_a_row >= 3
        else:
            assert health.hung(now) == (not down)
            down = True
        assert health.is_down == down


def test_one_of_many_is_let_through_with_the_number_of_the_others() -> None:
    seldom = Seldom(every=10.0)
    assert [seldom.due(now) for now in (0.0, 1.0, 9.9, 10.0, 10.1, 25.0, 40.0)] == [
        0,
        None,
        None,
        2,
        None,
        1,
        0,
    ]
