"""What must hold of every plan: more never costs time, break-even points break even, figures add up."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import InvalidRequest
from kvtier.plan import expressions
from kvtier.plan.units import Quantity, unit
from plans import tables, work_out

if TYPE_CHECKING:
    from kvtier.plan.sheet import Sheet

COUNTS = (1, 8, 32)
gb_s = st.floats(0.05, 100)
rates = st.floats(0.01, 1)
latencies = st.floats(0, 0.5)


def tier(name: str = "disk", **fields: Any) -> dict[str, Any]:
    given_ = {"name": name, "bandwidth": 6e9, "hit_rate": 0.5, "price": 1000, "lifetime": 4, "power": 10}
    return {**given_, **fields}


def value(sheet: Sheet, name: str) -> float:
    found = sheet.get(name)
    assert found is not None, sheet.absent.get(name, name)
    return found


def test_a_plan_worked_out_by_hand() -> None:
    sheet = work_out(tables())
    per_token = 62 * 2 * 8 * 128 * 2
    load = 8 * 30_000 * per_token * 0.9 / 6e9
    ttft = load + 8 * 3000 / 4000
    rate = 8 / (ttft + 500 * 0.02)
    expected = {
        "bytes_per_token": per_token,
        "session_bytes": per_token * 30_000,
        "recompute.at_8.ttft": 60,
        "s.at_8.ttft": ttft,
        "s.at_8.times_sooner": 60 / ttft,
        "s.at_8.throughput": rate * 500,
        "s.disk.sessions_held": 1e12 / (per_token * 30_000),
        "s.disk.rate": 6e9 / (per_token * 27_000),
        "s.at_8.cost_of_tokens": (20 + 0.6 + 20_000 / (4 * 8760) + 0.01) / (rate * 500 * 3600) * 1e6,
        "s.at_8.energy_per_request": 6.1 * (ttft + 10) / 3600 / 8,
        "s.at_8.energy_cost": 6.1 * (ttft + 10) / 3600 / 8 * 50_000 * 365 * 0.1,
        "s.at_8.machines": math.ceil(1000 / (rate * 500)),
        "s.at_8.payback_by_earning": 20_000
        / ((rate * 500 - 8 / 70 * 500) * 3600 * 4e-6 - 0.01) / 8760,
        "s.at_8.payback_by_saving": 20_000 / (20.6 * (rate / (8 / 70) - 1) - 0.01) / 8760,
    }  # fmt: skip
    assert {name: value(sheet, name) for name in expected} == pytest.approx(expected)
    assert sheet.absent == {}


@given(st.lists(st.tuples(gb_s, st.just(0.0) | st.floats(1e-6, 0.5), latencies), min_size=1, max_size=2))
def test_every_figure_follows_from_its_record_alone(given_: list[tuple[float, float, float]]) -> None:
    tiers = [
        tier(f"t{i}", bandwidth=f"{speed} GB/s", hit_rate=rate, latency=latency)
        for i, (speed, rate, latency) in enumerate(given_)
    ]
    sheet = work_out(tables(*tiers))
    for record in json.loads(json.dumps(sheet.as_json())):
        if "formula" in record:
            inputs = record["inputs"]

            def quantity(name: str, inputs: Any = inputs) -> Quantity:
                of = unit(inputs[name]["unit"])
                return Quantity(inputs[name]["value"] * of.factor, of.dimensions)

            again = expressions.evaluate(record["formula"], quantity)
            assert again.to(unit(record["unit"])) == pytest.approx(record["value"], rel=1e-6, abs=1e-9)


@given(gb_s, st.floats(1, 10), rates, latencies)
def test_more_bandwidth_never_raises_ttft(speed: float, more: float, rate: float, latency: float) -> None:
    slow, fast = (
        work_out(tables(tier(bandwidth=f"{each} GB/s", hit_rate=rate, latency=latency)))
        for each in (speed, speed * more)
    )
    for count in COUNTS:
        for figure, sign in (
            ("ttft", -1),
            ("throughput", 1),
            ("cost_of_tokens", -1),
            ("energy_per_request", -1),
        ):
            name = f"s.at_{count}.{figure}"
            change = sign * (value(fast, name) - value(slow, name))
            assert change >= -1e-9 * value(slow, name)


@given(gb_s, st.floats(0, 1), st.floats(0, 1), latencies)
def test_more_hits_help_only_above_the_break_even_bandwidth(
    speed: float, rate: float, other: float, latency: float
) -> None:
    low, high = sorted((rate, other))
    few, many = (
        work_out(tables(tier(bandwidth=f"{speed} GB/s", hit_rate=each, latency=latency)))
        for each in (low, high)
    )
    change = value(many, "s.at_8.ttft") - value(few, "s.at_8.ttft")
    least = value(few, "bytes_per_token") * value(few, "prefill_speed") / 1e9
    assert change * (speed - least) <= 1e-9


@given(st.integers(1, 64), st.integers(0, 64), gb_s, rates)
def test_a_larger_crowd_waits_longer_and_is_served_faster(
    count: int, more: int, speed: float, rate: float
) -> None:
    sheet = work_out(tables(tier(bandwidth=f"{speed} GB/s", hit_rate=rate),
                            workload={"concurrency": sorted({count, count + more})}))  # fmt: skip
    for name in ("s", "recompute"):
        for figure in ("ttft", "throughput"):
            small, large = (value(sheet, f"{name}.at_{each}.{figure}") for each in (count, count + more))
            assert large >= small * (1 - 1e-9)
    assert value(sheet, f"s.at_{count + more}.throughput") <= value(sheet, "s.most_throughput") * (1 + 1e-9)


@given(rates, latencies, st.sampled_from(COUNTS))
def test_the_break_even_bandwidth_breaks_even(rate: float, latency: float, count: int) -> None:
    sheet = work_out(tables(tier(hit_rate=rate, latency=latency)))
    name = f"s.at_{count}.disk.break_even_bandwidth"
    if sheet.get(name) is None:
        assert latency >= value(sheet, f"s.at_{count}.compute_of_hits")
        assert sheet.absent[name] == "its latency alone takes longer than computing"
        return
    even = work_out(tables(tier(hit_rate=rate, latency=latency, bandwidth=f"{value(sheet, name)!r} GB/s")))
    assert value(even, f"s.at_{count}.ttft") == pytest.approx(value(even, f"recompute.at_{count}.ttft"))


@given(gb_s, gb_s, st.floats(0.01, 0.99), latencies, st.sampled_from(COUNTS))
def test_break_even_hit_rates_break_even(
    fast: float, slow: float, part: float, latency: float, count: int
) -> None:
    """With two tiers whose shares of the hits stay as they are; where several would do, the larger."""

    def plan(rate: float) -> Sheet:
        dram = tier("dram", bandwidth=f"{fast} GB/s", hit_rate=rate * part)
        return work_out(
            tables(dram, tier(bandwidth=f"{slow} GB/s", hit_rate=rate * (1 - part), latency=latency))
        )

    sheet = plan(0.5)
    for figure, same in (("", "ttft"), ("_of_cost", "cost_of_tokens")):
        rate = sheet.get(f"s.at_{count}.break_even_hit_rate{figure}")
        if rate is None:
            assert "loading takes longer" in sheet.absent[f"s.at_{count}.break_even_hit_rate{figure}"]
        elif 1e-6 < rate <= 1:
            even = plan(rate)
            with_tier, without = (value(even, f"{name}.at_{count}.{same}") for name in ("s", "recompute"))
            assert with_tier == pytest.approx(without)


def test_a_tier_that_another_outweighs_has_no_break_even() -> None:
    sheet = work_out(tables(tier("dram"), tier(bandwidth="0.01 GB/s")))
    assert (
        sheet.absent["s.at_8.dram.break_even_bandwidth"] == "another tier alone takes longer than computing"
    )


@given(gb_s, st.floats(0.01, 0.99))
def test_saturation_is_where_a_device_is_never_idle(speed: float, rate: float) -> None:
    sheet = work_out(tables(tier(bandwidth=f"{speed} GB/s", hit_rate=rate)))
    for device in ("disk", "prefill"):
        sessions = value(sheet, f"s.{device}.saturation")
        assert sessions / value(sheet, "s.alone.residence") == pytest.approx(value(sheet, f"s.{device}.rate"))
    busy = value(sheet, "s.most_requests") / value(sheet, "s.disk.rate")
    assert busy <= 1 + 1e-9
    assert min(value(sheet, f"s.{device}.saturation") for device in ("disk", "prefill")) >= 1 - 1e-9


def test_bandwidth_by_concurrency_holds_from_there_on() -> None:
    by = {"8": "4 GB/s", "16": "5 GB/s"}
    sheet = work_out(tables(tier(bandwidth=by), workload={"concurrency": [1, 8, 12, 16, 64]}))
    assert [sheet.get(f"s.at_{n}.disk.bandwidth") for n in (1, 8, 12, 16, 64)] == [4, 4, 4, 5, 5]


def test_what_is_not_given_is_named() -> None:
    whole = tables()
    del whole["machine"], whole["prefill"]
    whole["setup"][0]["tier"][0]["price"] = "100000 CNY"
    sheet = work_out(whole)
    assert sheet.absent["s.at_8.ttft"] == "needs speed, or seconds and concurrency, in [prefill]"
    assert sheet.absent["s.disk.hardware_per_hour"] == "needs CNY in [money] exchange: CNY for one USD"
    assert sheet.absent["s.at_8.energy_cost"] == "needs power in [machine]"
    assert sheet.get("s.at_8.load") is not None


def test_a_measured_crowd_gives_the_prefill_speed() -> None:
    whole = tables()
    whole["prefill"] = {"seconds": 150, "concurrency": 16}
    assert work_out(whole).get("prefill_speed") == 16 * 30_000 / 150
    with pytest.raises(InvalidRequest, match="leave one"):
        work_out(tables(prefill={"seconds": 150, "concurrency": 16}))


def test_tiers_serve_at_most_everything() -> None:
    with pytest.raises(InvalidRequest, match="120"):
        work_out(tables(tier("dram", hit_rate=0.6), tier(hit_rate=0.6)))
