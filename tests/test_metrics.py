"""Counters."""

from __future__ import annotations

import pytest

from kvtier.metrics import Counters, names
from kvtier.types import Reason, Status, TierName

FAILURES = [reason for reason in Reason if reason]


def fresh() -> Counters:
    return Counters(dict.fromkeys(names(), 0))


def test_names_are_distinct_and_start_at_zero() -> None:
    listed = list(names())
    assert len(listed) == len(set(listed))
    assert set(fresh().values()) == {0}


@pytest.mark.parametrize("tier", [TierName.DRAM, TierName.DISK])
def test_a_hit_counts_for_its_tier(tier: TierName) -> None:
    counters = fresh()
    counters.count_get(Status.HIT, Reason.NONE, tier)
    assert +counters == {f"{tier.name.lower()}.hits": 1}


@pytest.mark.parametrize("reason", FAILURES)
def test_invariant_7_every_reason_has_its_counter(reason: Reason) -> None:
    counters = fresh()
    counters.count_get(Status.MISS, reason, TierName.NONE)
    counters.count_put(Status.REFUSED, reason)
    assert +counters == {f"get.{reason.name.lower()}": 1, f"put.{reason.name.lower()}": 1}
    assert set(counters) == set(names()), "a counter appeared that a fresh store does not show"


@pytest.mark.parametrize(("status", "name"), [(Status.STORED, "put.stored"), (Status.KNOWN, "put.known")])
def test_stored_and_known_are_told_apart(status: Status, name: str) -> None:
    counters = fresh()
    counters.count_put(status, Reason.NONE)
    assert +counters == {name: 1}
    assert set(counters) == set(names())


def test_invariant_10_the_outcomes_add_up_to_the_requests() -> None:
    counters = fresh()
    gets = [(Status.HIT, Reason.NONE, TierName.DRAM), (Status.HIT, Reason.NONE, TierName.DISK)]
    gets += [(Status.MISS, reason, TierName.NONE) for reason in FAILURES]
    puts = [(Status.STORED, Reason.NONE), (Status.KNOWN, Reason.NONE)]
    puts += [(Status.FAILED, reason) for reason in FAILURES]
    for get in gets * 3:
        counters["get.requested"] += 1
        counters.count_get(*get)
    for put in puts * 2:
        counters["put.requested"] += 1
        counters.count_put(*put)
    misses = sum(counters[f"get.{reason.name.lower()}"] for reason in FAILURES)
    assert counters["get.requested"] == counters["dram.hits"] + counters["disk.hits"] + misses
    failed = sum(counters[f"put.{reason.name.lower()}"] for reason in FAILURES)
    assert counters["put.requested"] == counters["put.stored"] + counters["put.known"] + failed
