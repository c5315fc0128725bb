"""The formulas: what a crowd of sessions waits for, with setups of tiers and without any.

All sessions of a crowd come at once and share each device evenly, so that they end together: what they
wait for is the bytes, or tokens, of all of them over the device's speed. `docs/PLANNING.md` has the reasons.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.errors import InvalidRequest
from kvtier.layout import DTYPE_BYTES
from kvtier.plan import checks, hits, money
from kvtier.plan.sheet import Sheet
from kvtier.plan.units import Quantity, quantity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.plan.inputs import Inputs
    from kvtier.plan.setups import Setup, Tier
    from kvtier.plan.values import Given

BASELINE = "recompute"
_NOTHING_READ = "nothing is read from it"
_SLOWER = "loading takes longer than computing, at any hit rate"


def work_out(inputs: Inputs) -> Sheet:
    """Every figure that the inputs allow; `absent` of the sheet says what the others need.

    Raises InvalidRequest for inputs that contradict each other, and derived formulas that are wrong.
    """
    sheet = Sheet()
    _give_all(sheet, inputs.values)
    _session(sheet, inputs)
    _prefill(sheet)
    money.of_machine(sheet, inputs.currency)
    _baseline(sheet, f"{BASELINE}.alone", 1)
    for concurrency in inputs.concurrency:
        _baseline(sheet, f"{BASELINE}.at_{concurrency}", concurrency)
        money.at(sheet, BASELINE, concurrency, inputs.currency, power="machine_power")
    sheet.work_out(f"{BASELINE}.prefill.rate", "prefill_speed / prompt_tokens", "request/s")
    sheet.work_out(f"{BASELINE}.alone.residence", "ttft + decode_seconds", "s")
    sheet.work_out(f"{BASELINE}.prefill.saturation", "rate * alone.residence", "request")
    for setup in inputs.setups:
        _hit_rates(sheet, setup, inputs)
        for tier in setup.tiers:
            money.of_tier(sheet, f"{setup.name}.{tier.name}", tier.currency, inputs.currency)
        money.of_setup(sheet, setup.name, [tier.name for tier in setup.tiers], inputs.currency)
        _crowd(sheet, setup, f"{setup.name}.alone", 1)
        _saturation(sheet, setup)
        for concurrency in inputs.concurrency:
            scope = f"{setup.name}.at_{concurrency}"
            _crowd(sheet, setup, scope, concurrency)
            sheet.work_out(f"{scope}.times_sooner", f"{BASELINE}.at_{concurrency}.ttft / ttft", "1")
            money.at(sheet, setup.name, concurrency, inputs.currency, power="machine_power + power")
            _break_even(sheet, setup, concurrency)
            money.against(sheet, setup.name, concurrency, inputs.currency)
    for name, (formula, unit_text) in inputs.derived.items():
        if sheet.work_out(f"derived.{name}", formula, unit_text) is None:
            raise InvalidRequest(f"{name} in [derived]: {sheet.absent[f'derived.{name}']}")
    return sheet


def results(inputs: Inputs, sheet: Sheet) -> list[tuple[checks.Check, list[checks.Result]]]:
    """Each check of the inputs with its results, worked out on `sheet`."""
    return [(check, checks.run(check, number, sheet)) for number, check in enumerate(inputs.checks, start=1)]


def _give_all(sheet: Sheet, values: tuple[Given, ...], scope: str = "") -> None:
    for given in values:
        sheet.give(scope + given.figure, given.quantity, given.unit, given.source)


def _default(sheet: Sheet, name: str, text: str, unit_text: str, why: str) -> None:
    if name not in sheet.figures:
        sheet.give(name, quantity(text, unit_text), unit_text, why)


def _session(sheet: Sheet, inputs: Inputs) -> None:
    """Tokens and bytes of one request."""
    if (layout := inputs.layout) is not None:
        for name in ("layers", "planes", "kv_heads", "head_dim"):
            sheet.give(name, Quantity(getattr(layout, name)), "1", f"[model], {inputs.layout_source}")
        element = quantity(DTYPE_BYTES[layout.dtype], "B/token")
        sheet.give("element_bytes", element, "B/token", f"of {layout.dtype}, [model], {inputs.layout_source}")
        sheet.work_out("bytes_per_token", "layers * planes * kv_heads * head_dim * element_bytes", "B/token")
    else:
        sheet.need("bytes_per_token", "needs [model]")
    if (trace := inputs.trace) is not None:
        source = f"mean of the trace {trace.source}"
        _default(sheet, "prompt_tokens", str(trace.prompt_tokens), "token/request", source)
        if trace.output_tokens > 0:
            _default(sheet, "output_tokens", str(trace.output_tokens), "token/request", source)
    if "prompt_tokens" not in sheet.figures:
        sheet.need("prompt_tokens", "needs prompt_tokens in [workload]")
    if "session_bytes" in sheet.figures:
        sheet.work_out("session_bytes_by_shape", "prompt_tokens * bytes_per_token", "B/request")
    else:
        sheet.work_out("session_bytes", "prompt_tokens * bytes_per_token", "B/request")
    if "output_tokens" in sheet.figures and "tpot" in sheet.figures:
        sheet.work_out("decode_seconds", "output_tokens * tpot", "s")
    else:
        why = "output_tokens and tpot are not both given: decoding is not counted, so rates are upper bounds"
        sheet.give("decode_seconds", quantity(0, "s"), "s", why)


def _prefill(sheet: Sheet) -> None:
    """Tokens per second of the whole machine, given or from a measured crowd."""
    if "prefill_speed" not in sheet.figures:
        formula = "prefill_concurrency * prompt_tokens / prefill_seconds"
        if sheet.work_out("prefill_speed", formula, "token/s") is None:
            sheet.absent["prefill_speed"] = "needs speed, or seconds and concurrency, in [prefill]"
    elif "prefill_seconds" in sheet.figures:
        raise InvalidRequest("[prefill] has speed and seconds: leave one")


def _baseline(sheet: Sheet, scope: str, concurrency: int) -> None:
    _give_concurrency(sheet, scope, concurrency)
    sheet.work_out(f"{scope}.ttft", "concurrency * prompt_tokens / prefill_speed", "s")
    _rates(sheet, scope)


def _give_concurrency(sheet: Sheet, scope: str, concurrency: int) -> None:
    sheet.give(f"{scope}.concurrency", quantity(concurrency, "request"), "request", "sessions at once")


def _rates(sheet: Sheet, scope: str) -> None:
    """By Little's law, of sessions that each come again as soon as they are answered."""
    sheet.work_out(f"{scope}.request_rate", "concurrency / (ttft + decode_seconds)", "request/s")
    sheet.work_out(f"{scope}.throughput", "request_rate * output_tokens", "token/s")


def _hit_rates(sheet: Sheet, setup: Setup, inputs: Inputs) -> None:
    """Of each tier, the share of prompt tokens that it serves; of the setup, their sum."""
    above: list[str] = []
    for tier in setup.tiers:
        scope = f"{setup.name}.{tier.name}"
        _give_all(sheet, tier.values, f"{scope}.")
        _default(sheet, f"{scope}.latency", "0", "s", "not given: none")
        _default(sheet, f"{scope}.power", "0", "W", "not given: none is counted")
        if f"{scope}.size" in sheet.figures:
            sheet.work_out(f"{scope}.sessions_held", "size / session_bytes", "request")
        if f"{scope}.hit_rate" not in sheet.figures and (curve := _curve(sheet, inputs, scope)) is not None:
            chunks = sheet.work_out(f"{scope}.chunks", "size / (chunk_tokens * bytes_per_token)", "1")
            assert chunks is not None  # a curve is only made where it is there
            rate = Quantity(curve.at(chunks.value))
            sheet.give(
                f"{scope}.hit_rate_of_size", rate, "1", f"{curve.source}, at {chunks.value:.0f} chunks"
            )
            # Upper tiers are written through: a lower one serves what its size finds more than theirs do.
            more = f"max(0, hit_rate_of_size - {above[0]})" if len(above) == 1 else (
                f"max(0, hit_rate_of_size - max({', '.join(above)}))" if above else "hit_rate_of_size"
            )  # fmt: skip
            sheet.work_out(f"{scope}.hit_rate", more, "1")
            above.append(f"{tier.name}.hit_rate_of_size")
        if f"{scope}.hit_rate" not in sheet.figures:
            sheet.need(f"{scope}.hit_rate", "needs hit_rate, hit_curve or trace in [workload]")
    total = " + ".join(f"{tier.name}.hit_rate" for tier in setup.tiers)
    figure = sheet.work_out(f"{setup.name}.hit_rate", total, "1")
    if figure is not None and figure.value > 1 + 1e-9:
        raise InvalidRequest(f"the tiers of {setup.name!r} serve {figure.value:.1%} of all: at most 100 %")


def _curve(sheet: Sheet, inputs: Inputs, scope: str) -> hits.Curve | None:
    """The curve that tells a tier's hit rate; None, with the reason on the sheet, where there is none."""
    if inputs.curve is None and inputs.trace is None:
        return None
    if f"{scope}.size" not in sheet.figures or "bytes_per_token" not in sheet.figures:
        sheet.absent[f"{scope}.hit_rate"] = "a hit rate by size needs the tier's size and [model]"
        return None
    chunk_tokens = (
        inputs.curve.chunk_tokens if inputs.curve else inputs.chunk_tokens or hits.TRACE_BLOCK_TOKENS
    )
    _default(
        sheet, "chunk_tokens", str(chunk_tokens), "token", "per chunk of the curve or block of the trace"
    )
    if inputs.curve is not None:
        return inputs.curve
    assert inputs.trace is not None
    size, each = sheet.figures[f"{scope}.size"].quantity, sheet.figures["bytes_per_token"].quantity
    capacity = int(size.value / (each.value * chunk_tokens))
    return hits.trace_curve(inputs.trace, [capacity], chunk_tokens)


def _crowd(sheet: Sheet, setup: Setup, scope: str, concurrency: int) -> None:
    """TTFT and rates of `concurrency` sessions that come at once."""
    _give_concurrency(sheet, scope, concurrency)
    for tier in setup.tiers:
        bandwidth = tier.bandwidth_at(concurrency)
        sheet.give(f"{scope}.{tier.name}.bandwidth", bandwidth, "GB/s", tier.bandwidth_source)
        sheet.work_out(
            f"{scope}.{tier.name}.load",
            f"{tier.name}.latency + concurrency * session_bytes * {tier.name}.hit_rate / bandwidth",
            "s",
        )
    loads = [f"{tier.name}.load" for tier in setup.tiers]
    sheet.work_out(f"{scope}.load", _largest(loads), "s")
    sheet.work_out(f"{scope}.compute", "concurrency * prompt_tokens * (1 - hit_rate) / prefill_speed", "s")
    sheet.work_out(f"{scope}.ttft", "load + compute", "s")
    _rates(sheet, scope)


def _saturation(sheet: Sheet, setup: Setup) -> None:
    """Of each device: requests per second at which it is never idle, and the sessions that make it so.

    Asymptotic bounds of closed queueing networks (Lazowska et al., Quantitative System Performance, 1984,
    chapter 5): with N sessions no device serves more than min(N / residence, rate).
    """
    sheet.work_out(f"{setup.name}.alone.residence", "ttft + decode_seconds", "s")
    devices = []
    for tier in setup.tiers:
        scope = f"{setup.name}.{tier.name}"
        best = max(tier.bandwidth.values(), key=lambda bandwidth: bandwidth.value)
        sheet.give(f"{scope}.best_bandwidth", best, "GB/s", tier.bandwidth_source)
        _device(sheet, scope, "best_bandwidth / (session_bytes * hit_rate)", _NOTHING_READ)
        devices.append(tier.name)
    scope = f"{setup.name}.prefill"
    _device(sheet, scope, "prefill_speed / (prompt_tokens * (1 - hit_rate))", "nothing is left to compute")
    devices.append("prefill")
    rates = [f"{device}.rate" for device in devices if f"{setup.name}.{device}.rate" in sheet.figures]
    if rates:
        sheet.work_out(f"{setup.name}.most_requests", f"min({', '.join(rates)})", "request/s")
        sheet.work_out(f"{setup.name}.most_throughput", "most_requests * output_tokens", "token/s")


def _device(sheet: Sheet, scope: str, rate: str, impossible: str) -> None:
    sheet.work_out(f"{scope}.rate", rate, "request/s", impossible=impossible)
    sheet.work_out(f"{scope}.saturation", "rate * alone.residence", "request")


def _break_even(sheet: Sheet, setup: Setup, concurrency: int) -> None:
    """The bandwidth of each tier, and the hit rate, at which the crowd waits as long as without tiers."""
    scope = f"{setup.name}.at_{concurrency}"
    hit_rate = sheet.get(f"{setup.name}.hit_rate")
    saved: list[tuple[str, str]] = []
    sheet.work_out(f"{scope}.compute_of_hits", "concurrency * prompt_tokens * hit_rate / prefill_speed", "s")
    budget = sheet.get(f"{scope}.compute_of_hits")
    for tier in setup.tiers:
        if hit_rate == 0 or sheet.get(f"{setup.name}.{tier.name}.hit_rate") == 0:
            sheet.absent[f"{scope}.{tier.name}.break_even_bandwidth"] = _NOTHING_READ
            continue
        _break_even_bandwidth(sheet, setup, tier, scope, budget)
        sheet.work_out(
            f"{scope}.{tier.name}.saved_per_hit_rate",
            "concurrency * (prompt_tokens / prefill_speed"
            f" - {tier.name}.hit_rate / hit_rate * session_bytes / bandwidth)",
            "s",
            impossible=_SLOWER,
        )  # fmt: skip
        saved.append((f"{tier.name}.latency", f"{tier.name}.saved_per_hit_rate"))
    if not saved:
        sheet.absent[f"{scope}.break_even_hit_rate"] = _NOTHING_READ
        return
    sheet.work_out(f"{scope}.break_even_hit_rate", _largest([f"{a} / {b}" for a, b in saved]), "1",
                   impossible=_SLOWER)  # fmt: skip
    # What may be lost to waiting before a token costs more than without tiers.
    dearer = "(1 - recompute.cost_per_hour / cost_per_hour)"
    longest = f"(recompute.at_{concurrency}.ttft + decode_seconds)"
    sheet.work_out(f"{scope}.to_be_earned", f"{longest} * {dearer}", "s")
    ways = [f"({a} + to_be_earned) / {b}" for a, b in saved]
    sheet.work_out(f"{scope}.break_even_hit_rate_of_cost", _largest(ways), "1", impossible=_SLOWER)


def _break_even_bandwidth(sheet: Sheet, setup: Setup, tier: Tier, scope: str, budget: float | None) -> None:
    name = f"{scope}.{tier.name}.break_even_bandwidth"
    others = [sheet.get(f"{scope}.{other.name}.load") for other in setup.tiers if other is not tier]
    if budget is not None and any(load is not None and load > budget for load in others):
        sheet.absent[name] = "another tier alone takes longer than computing"
        return
    sheet.work_out(
        name,
        f"concurrency * session_bytes * {tier.name}.hit_rate / (compute_of_hits - {tier.name}.latency)",
        "GB/s",
        impossible="its latency alone takes longer than computing",
    )


def _largest(ways: Sequence[str]) -> str:
    return ways[0] if len(ways) == 1 else f"max({', '.join(ways)})"
