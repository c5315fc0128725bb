"""Sizes and rates as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cli.accept.quantities import parse_rate, parse_size
from kvtier.errors import InvalidRequest


@given(st.integers(1, 10**6), st.sampled_from(["", "KiB", "MiB", "GiB", "TiB"]))
def test_binary_sizes(count: int, unit: str) -> None:
    power = ["", "KiB", "MiB", "GiB", "TiB"].index(unit)
    assert parse_size(f"{count}{unit}", "--capacity") == count * 1024**power
    assert parse_size(f"{count} {unit}", "--capacity") == count * 1024**power


def test_decimal_sizes_and_rates() -> None:
    assert parse_size("1.6TB", "--capacity") == 1_600_000_000_000
    assert parse_rate("3GB/s", "--stated-read") == 3.0
    assert parse_rate("900 MB/s", "--stated-read") == 0.9
    assert parse_rate("1GiB/s", "--stated-read") == pytest.approx(1.073741824)


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e9", "64gib", "3GB/s", "0GiB", "1 XB", "1kiB"])
def test_no_size(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"--capacity is .* needs a size such as 64GiB"):
        parse_size(text, "--capacity")


@pytest.mark.parametrize("text", ["3GB", "3", "fast", "3Gb/s", "0GB/s"])
def test_no_rate(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"--stated-read is .* needs a rate such as 3GB/s"):
        parse_rate(text, "--stated-read")
