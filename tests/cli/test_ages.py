"""Time spans in words."""

from __future__ import annotations

from kvtier.cli.ages import age


def test_an_age_is_told_in_a_unit_of_which_there_are_some() -> None:
    assert [age(n) for n in (-1, 5, 119, 120, 7200, 86400 * 3)] == [
        "0 s", "5 s", "119 s", "2 min", "2 h", "3 d"
    ]  # fmt: skip
