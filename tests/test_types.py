"""Statuses, reasons and results."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.types import BatchResult, Reason, Status, TierName

H, S, K, M, R, F = Status.HIT, Status.STORED, Status.KNOWN, Status.MISS, Status.REFUSED, Status.FAILED


def result(*status: Status) -> BatchResult:
    n = len(status)
    return BatchResult(
        np.array(status, np.int8), np.zeros(n, np.int8), np.zeros(n, np.int64), np.zeros(n, np.uint8)
    )


@pytest.mark.parametrize(
    ("status", "prefix", "ok"),
    [
        ((), 0, True),
        ((H,), 1, True),
        ((H, S, K), 3, True),
        ((H, M), 1, False),
        ((M, H), 0, False),
        ((S, S, R, S), 2, False),
        ((K, F, M), 1, False),
        ((F,), 0, False),
    ],
)
def test_the_usable_part_is_the_prefix_without_a_gap(
    status: tuple[Status, ...], prefix: int, ok: bool
) -> None:
    assert result(*status).prefix == prefix
    assert type(result(*status).prefix) is int
    assert result(*status).ok is ok


def test_numbers_of_statuses_and_reasons_are_stable() -> None:
    assert [s.name for s in sorted(Status)] == ["HIT", "STORED", "KNOWN", "MISS", "REFUSED", "FAILED"]
    assert [int(s) for s in Status] == list(range(6))
    assert [int(r) for r in Reason] == list(range(len(Reason)))
    assert not Reason.NONE
    assert [(t.name, int(t)) for t in TierName] == [("NONE", 0), ("DRAM", 1), ("DISK", 2)]
    assert all(Reason(i) for i in range(1, len(Reason)))
