"""The native core's copies that hash what they copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtier import _native

core: Any = _native.core
pytestmark = pytest.mark.skipif(core is None, reason=_native.why_not)


def copy(sources: list[np.ndarray], targets: list[np.ndarray]) -> list[int]:
    addresses = [np.array([a.ctypes.data for a in arrays], np.uint64) for arrays in (sources, targets)]
    sums = np.zeros(len(sources), np.uint64)
    core.copy_hashed(*addresses, np.array([source.nbytes for source in sources], np.uint64), sums)
    return sums.tolist()


@given(
    lengths=st.lists(st.integers(241, 200_000), max_size=4),
    skew=st.sampled_from([0, 1, 48]),
    path=st.sampled_from(["auto", "portable"]),
)
def test_copies_are_exact_and_so_are_the_sums(lengths: list[int], skew: int, path: str) -> None:
    draw = np.random.default_rng(1)
    sources = [draw.integers(0, 256, nbytes, np.uint8) for nbytes in lengths]
    targets = [np.zeros(skew + nbytes, np.uint8)[skew:] for nbytes in lengths]
    core.set_checksum_path(path)
    try:
        sums = copy(sources, targets)
    finally:
        core.set_checksum_path("auto")
    assert sums == [xxhash.xxh3_64_intdigest(source.tobytes()) for source in sources]
    assert all((target == source).all() for source, target in zip(sources, targets, strict=True))


def test_pieces_too_short_for_it_are_refused() -> None:
    sources, targets = [np.ones(n, np.uint8) for n in (500, 240)], [np.zeros(n, np.uint8) for n in (500, 240)]
    with pytest.raises(ValueError, match="240 bytes"):
        copy(sources, targets)
    assert not targets[0].any()
