"""G3, main gate: how soon known sessions answer after everything but the disk was lost, and how many."""

from __future__ import annotations

import statistics
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.cli.accept.verdict import Check, at_least, at_most, measured
from kvtier.cli.bench.recovery.course import plan_waves, run_waves
from kvtier.cli.bench.recovery.sessions import make_prompts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.cli.accept.context import Context
    from kvtier.cli.accept.plan import Limits
    from kvtier.cli.bench.recovery.wave import Wave

_RECOMPUTE = "recompute"


def run(context: Context) -> tuple[list[Check], dict[str, Any]]:
    """All trials, and each number of sessions at once against the baseline's."""
    plan, limits = context.plan, context.plan.limits
    trials = [
        context.state.step(f"G3.trial {number}", partial(_trial, context, number))
        for number in range(plan.trials)
    ]
    recovered = summary([trial["recovering"] for trial in trials])
    computed = summary([trial["storing"] for trial in trials])
    baseline = computed if context.baseline is None else context.baseline.recovery
    name = _RECOMPUTE if context.baseline is None else context.baseline.name
    checks = [at_least("trials", float(len(trials)), 3.0)]
    for own in recovered:
        other = next(row for row in baseline if row["concurrency"] == own["concurrency"])
        checks += _compare(own, other, limits)
    rows = [row for trial in trials for row in trial["recovering"]]
    known = [row["cached_fraction"] for row in rows if row["cached_fraction"] is not None]
    checks += [
        at_most("sessions that failed", float(sum(row["failed"] for row in rows)), 0.0, "",
                next((why for row in rows for why in row["failures"].values()), "")),
        at_least("prompt tokens from the cache", 100 * min(known) if known else None, limits.cached, "%",
                 "the least of all waves" if known else "the server tells of no cached tokens"),
        _cold(context, rows),
        measured("sessions with other output", _percent_other(rows), "%",
                 "rounding differs with the shape of a batch or a prefill"),
    ]  # fmt: skip
    figures = {
        "baseline": name, "rows": recovered, "baseline_rows": baseline, "recompute_rows": computed,
        "trials": trials, "method": plan.method, "target": context.target_description(),
    }  # fmt: skip
    return checks, figures


def summary(trials: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """For every number of sessions at once, what the trials came to: medians, and all values behind them."""
    found = []
    for waves in zip(*trials, strict=True):
        ttft = [row["ttft_p50_s"] for row in waves]
        rate = [row["tokens_per_s"] for row in waves]
        ttfts = [seconds for row in waves for seconds in row["ttft_s"].values()]
        tpots = [ms for row in waves for ms in row["tpots_ms"]]
        found.append(
            {
                "concurrency": waves[0]["sessions"],
                "ttft_p50_s": _median(ttft),
                "ttft_of_trials": ttft,
                "ttft_spread": _spread(ttft),
                "ttft_p99_s": _p99(ttfts),
                "tpot_p99_ms": _p99(tpots),
                "tokens_per_s": _median(rate),
                "tokens_per_s_of_trials": rate,
                "tokens_per_s_spread": _spread(rate),
                "good_sessions_per_s": _median([row["good_per_s"] for row in waves]),
                "good_percent": 100 * sum(row["good"] for row in waves) / _sessions(waves),
            }
        )
    return found


def _trial(context: Context, number: int) -> dict[str, Any]:
    """Sessions of its own: stored, forgotten but on disk, and asked for again."""
    plan, target = context.plan, context.target()
    waves = plan_waves(plan.concurrency)
    prompts = make_prompts(
        sum(map(len, waves)), plan.tokens, plan.prompt, vocabulary=target.vocabulary,
        seed=context.seed + 100 + number,
    )  # fmt: skip

    def step(name: str) -> None:
        context.say(f"trial {number + 1} of {plan.trials}: {name}")

    stored = run_waves(target.ask, prompts, waves, "storing", step, target.reads)
    step("forgetting")
    forgotten = target.forget()
    found = run_waves(target.ask, prompts, waves, "recovering", step, target.reads, stored)
    return {
        "seed": context.seed + 100 + number,
        "forgotten": forgotten,
        "storing": [_row(row, wave, plan.limits) for row, wave in stored],
        "recovering": [_row(row, wave, plan.limits) for row, wave in found],
    }


def _row(row: dict[str, Any], wave: Wave, limits: Limits) -> dict[str, Any]:
    """With what goodput needs: TPOT by session, and how many sessions were as fast as is asked for."""
    good = [
        answer
        for answer in wave.answers.values()
        if (limits.ttft_s is None or answer.ttft_s <= limits.ttft_s)
        and (limits.tpot_ms is None or answer.tpot_s is None or 1e3 * answer.tpot_s <= limits.tpot_ms)
    ]
    tpots = [1e3 * answer.tpot_s for answer in wave.answers.values() if answer.tpot_s is not None]
    return {**row, "tpots_ms": tpots, "good": len(good), "good_per_s": len(good) / wave.wall_s}


def _compare(own: dict[str, Any], other: dict[str, Any], limits: Limits) -> list[Check]:
    def lower(name: str) -> float | None:
        return None if not own[name] or not other[name] else 100 * (1 - own[name] / other[name])

    higher = lower("tokens_per_s")
    at_once = f"{own['concurrency']} at once"
    rate_spread = _percent(own["tokens_per_s_spread"])
    spread = "" if rate_spread is None else f"of TTFT, from least to most; of throughput {rate_spread:.3g} %"
    checks = [
        at_least(f"TTFT lower, {at_once}", lower("ttft_p50_s"), limits.ttft_lower, "%",
                 _against(own, other, "ttft_p50_s", "ttft_of_trials", "s")),
        at_least(f"throughput higher, {at_once}", None if higher is None else -higher,
                 limits.throughput_higher, "%",
                 _against(own, other, "tokens_per_s", "tokens_per_s_of_trials", "output tokens/s")),
    ]  # fmt: skip
    wanted = {
        f"TTFT up to {limits.ttft_s} s": limits.ttft_s,
        f"TPOT up to {limits.tpot_ms} ms": limits.tpot_ms,
    }
    goal = " and ".join(text for text, limit in wanted.items() if limit is not None)
    good = f"{own['good_percent']:.0f} % of sessions with {goal}" if goal else "no TTFT or TPOT is asked for"
    checks += [
        measured(f"spread over trials, {at_once}", _percent(own["ttft_spread"]), "%", spread),
        at_most(f"TTFT p99, {at_once}", own["ttft_p99_s"], limits.ttft_s, "s", "over all trials"),
        at_most(f"TPOT p99, {at_once}", own["tpot_p99_ms"], limits.tpot_ms, "ms", "over all trials"),
        measured(f"goodput, {at_once}", own["good_sessions_per_s"], "sessions/s", good),
    ]  # fmt: skip
    return checks


def _against(own: dict[str, Any], other: dict[str, Any], name: str, trials: str, unit: str) -> str:
    def shown(row: dict[str, Any]) -> str:
        values = [value for value in row[trials] if value is not None]
        if not values:
            return "nothing"
        return f"{row[name]:.3g} {unit} ({min(values):.3g} to {max(values):.3g})"

    return f"{shown(own)} against {shown(other)}"


def _cold(context: Context, rows: Sequence[dict[str, Any]]) -> Check:
    """Whether the devices delivered what was restored."""
    kv = context.target_description().get("kv_bytes_per_token")
    read = [row["read_gb"] for row in rows]
    if None in read:
        return measured("read from the device", None, "GB", "nothing counts reads here")
    if kv is None:
        return measured("read from the device", sum(read), "GB", "by its own counter")
    needed = sum(row["cached_tokens"] or 0 for row in rows) * kv / 1e9
    return at_least("read from the device", sum(read), needed, "GB", "what was restored, by its own counter")


def _percent_other(rows: Sequence[dict[str, Any]]) -> float:
    return 100 * sum(len(row["different"] or ()) for row in rows) / _sessions(rows)


def _sessions(rows: Sequence[dict[str, Any]]) -> int:
    return sum(int(row["sessions"]) for row in rows)


def _percent(part: float | None) -> float | None:
    return None if part is None else 100 * part


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _spread(values: Sequence[float | None]) -> float | None:
    """From least to most, as a part of the median."""
    known = [value for value in values if value is not None]
    return (max(known) - min(known)) / statistics.median(known) if known else None


def _p99(values: Sequence[float]) -> float | None:
    return float(np.percentile(values, 99)) if values else None
