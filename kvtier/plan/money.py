"""Money and energy: what an hour, a million tokens and a request cost, and when a tier has paid itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.plan.sheet import Sheet

_BASELINE = "recompute"


def of_machine(sheet: Sheet, currency: str) -> None:
    """What the machine costs an hour with no tier; a whole machine, busy or not."""
    for name, needs in (("machine_price", "price_per_hour"), ("machine_power", "power")):
        sheet.need(name, f"needs {needs} in [machine]")
    for name, needs in (("electricity_price", "electricity"), ("token_price", "token_price")):
        sheet.need(name, f"needs {needs} in [money]")
    for name in ("output_tokens", "requests_per_day", "target_throughput"):
        sheet.need(name, f"needs {name} in [workload]")
    sheet.work_out(
        f"{_BASELINE}.cost_per_hour", "machine_price + machine_power * electricity_price", f"{currency}/h"
    )


def of_tier(sheet: Sheet, scope: str, price_currency: str | None, currency: str) -> None:
    """A tier's price in the plan's currency, and what an hour of it costs: price over its life, and power."""
    name = scope.replace(".", " ")
    sheet.need(f"{scope}.price", f"needs the price of {name}")
    sheet.need(f"{scope}.lifetime", f"needs the lifetime of {name}")
    if price_currency is not None and price_currency != currency:
        rate = f"exchange.{price_currency}"
        sheet.need(rate, f"needs {price_currency} in [money] exchange: {price_currency} for one {currency}")
        sheet.work_out(f"{scope}.cost", f"price / {rate}", currency)
    else:
        sheet.work_out(f"{scope}.cost", "price", currency)
    sheet.work_out(f"{scope}.hardware_per_hour", "cost / lifetime", f"{currency}/h")
    sheet.work_out(f"{scope}.power_per_hour", "power * electricity_price", f"{currency}/h")
    sheet.work_out(f"{scope}.cost_per_hour", "hardware_per_hour + power_per_hour", f"{currency}/h")
    if f"{scope}.size" in sheet.figures:
        sheet.work_out(f"{scope}.cost_per_size", "cost / size", f"{currency}/TB")


def of_setup(sheet: Sheet, setup: str, tiers: Sequence[str], currency: str) -> None:
    """Sums over its tiers, and with the machine."""
    for name, unit in (("cost", currency), ("power", "W"), ("power_per_hour", f"{currency}/h")):
        sheet.work_out(f"{setup}.{name}", " + ".join(f"{tier}.{name}" for tier in tiers), unit)
    total = " + ".join(f"{tier}.cost_per_hour" for tier in tiers)
    sheet.work_out(f"{setup}.cost_per_hour", f"{_BASELINE}.cost_per_hour + {total}", f"{currency}/h")


def at(sheet: Sheet, setup: str, concurrency: int, currency: str, *, power: str) -> None:
    """Of a crowd: cost of a million output tokens, energy of a request and of a year, machines."""
    scope = f"{setup}.at_{concurrency}"
    sheet.work_out(f"{scope}.cost_of_tokens", "cost_per_hour / throughput", f"{currency}/Mtoken")
    # The machine draws its power for all sessions at once, and each has its part of it.
    sheet.work_out(
        f"{scope}.energy_per_request", f"({power}) * (ttft + decode_seconds) / concurrency", "kWh/request"
    )
    sheet.work_out(f"{scope}.energy_of_tokens", "energy_per_request / output_tokens", "kWh/Mtoken")
    sheet.work_out(f"{scope}.energy_per_year", "energy_per_request * requests_per_day", "kWh/year")
    sheet.work_out(f"{scope}.energy_cost", "energy_per_year * electricity_price", f"{currency}/year")
    sheet.work_out(f"{scope}.machines", "ceil(target_throughput / throughput)", "machine")


def against(sheet: Sheet, setup: str, concurrency: int, currency: str) -> None:
    """Against recomputing: what more tokens earn, what the same save, and when either has paid the tiers."""
    scope, baseline = f"{setup}.at_{concurrency}", f"{_BASELINE}.at_{concurrency}"
    sheet.work_out(f"{scope}.added_throughput", f"throughput - {baseline}.throughput", "token/s")
    sheet.work_out(f"{scope}.earned_per_hour", "added_throughput * token_price", f"{currency}/h")
    sheet.work_out(
        f"{scope}.payback_by_earning",
        "cost / (earned_per_hour - power_per_hour)",
        "year",
        impossible="what more tokens earn does not pay for the tier's power",
    )
    sheet.work_out(
        f"{scope}.saved_per_hour",
        f"{_BASELINE}.cost_per_hour * (request_rate / {baseline}.request_rate - 1) - power_per_hour",
        f"{currency}/h",
    )
    sheet.work_out(
        f"{scope}.payback_by_saving",
        "cost / saved_per_hour",
        "year",
        impossible="it saves no machines",
    )
