"""G2, single-machine baseline: reads, writes, both at once, and what recomputing would take."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from kvtier.cli.accept.verdict import FLAG, Check, at_least, at_most, measured
from kvtier.cli.bench import mixed
from kvtier.cli.bench.data import Data
from kvtier.cli.bench.measure import Contender, interleave, rows
from kvtier.cli.bench.place import open_place
from kvtier.cli.bench.recovery.course import run_waves
from kvtier.cli.bench.recovery.sessions import make_prompts
from kvtier.cli.bench.stores import StoreReads
from kvtier.cli.bench.write import Slabs

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.cli.accept.context import Context
    from kvtier.cli.bench.place import Place

_ENGINE = "auto"
_PACE = 0.5
"""Of the bandwidth: what the mixed load's reads ask for."""
_PREFILLS = 3


def run(context: Context) -> tuple[list[Check], dict[str, Any]]:
    """The four figures, each beside what it must be."""
    step = context.state.step
    read = step("G2.read", partial(read_pass, context, context.plan.rounds))
    write = step("G2.write", partial(write_pass, context, context.plan.rounds))
    both = step("G2.mixed", partial(_mixed, context))
    prefill = step("G2.recompute", partial(_recompute, context))
    figures = {"read": read, "write": write, "mixed": both, "recompute": prefill}
    values = summary(figures)
    limits, baseline = context.plan.limits, context.baseline
    earlier = baseline.single if baseline is not None else {}
    slack = limits.baseline_tolerance

    def least(name: str, label: str, given: float | None, unit: str, note: str = "") -> Check:
        return at_least(label, values[name], *_limit(given, earlier.get(name), 1 - slack, unit, note))

    def most(name: str, label: str, given: float | None, unit: str) -> Check:
        return at_most(label, values[name], *_limit(given, earlier.get(name), 1 + slack, unit, ""))

    rounds = f"median of {context.plan.rounds}"
    spread = "rounds: " + ", ".join(f"{gb_s:.3g}" for gb_s in read["gb_s_of_rounds"])
    checks = [
        least("read_gb_s", "cold reads", limits.read_gb_s, "GB/s", spread),
        Check("reads are cold", None if read["cold"] is None else float(read["cold"]), FLAG, ">=", 1.0,
              read["cold"] is not False, "by the device's counter" if read["cold"] is not None
              else "nothing counts reads here"),
        least("write_gb_s", "synced writes", limits.write_gb_s, "GB/s", rounds),
        most("read_p99_ms", "p99 of reads under writes", limits.read_p99_ms, "ms"),
        at_most("times by which writes raise the p99", values["p99_ratio"], limits.p99_ratio),
        least("prefill_tokens_s", "prefill, recomputing", limits.prefill_tokens_s, "tokens/s",
              f"{context.plan.tokens} tokens, one session"),
    ]  # fmt: skip
    kv = prefill["kv_bytes_per_token"]
    loads = None if kv is None else read["gb_s"] * 1e9 / kv
    note = "a server does not tell its KV's size" if kv is None else f"{kv / 1e3:.1f} KB of KV a token"
    checks.append(measured("loading, by cold reads", loads, "tokens/s", note))
    return checks, figures


def summary(figures: dict[str, Any]) -> dict[str, float]:
    """The figures that another run may be compared with."""
    under_writes = figures["mixed"]["rows"][1]
    return {
        "read_gb_s": figures["read"]["gb_s"],
        "write_gb_s": figures["write"]["gb_s"],
        "read_p99_ms": under_writes["p99_ms"],
        "p99_ratio": figures["mixed"]["p99_ratio"],
        "prefill_tokens_s": figures["recompute"]["tokens_s"],
    }


def read_pass(context: Context, rounds: int) -> dict[str, Any]:
    """Cold reads through the store."""
    amount = context.plan.amount

    def measure(place: Place) -> dict[str, Any]:
        data = Data(place.directories, amount, lambda: context.say("writing what is to be read"))
        reads = StoreReads(data, amount.memory(), place.counter, engine=_ENGINE, leased=False)
        return _row(Contender("read", reads.run), rounds, context.say)

    return _in_place(context, amount.on_disk, measure)


def write_pass(context: Context, rounds: int) -> dict[str, Any]:
    """Writes through the store, until they are on disk and synced."""
    amount = context.plan.amount

    def measure(place: Place) -> dict[str, Any]:
        slabs = Slabs(place.directories, amount.memory())
        return _row(Contender("write", partial(slabs.write, _ENGINE)), rounds, context.say)

    return _in_place(context, amount.capacity, measure)


def _mixed(context: Context) -> dict[str, Any]:
    plan, amount = context.plan, context.plan.amount

    def measure(place: Place) -> dict[str, Any]:
        data = Data(place.directories, amount, lambda: context.say("writing what is to be read"))
        return mixed.measure(data, place.counter, context.say, engine=_ENGINE, fraction=_PACE,
                             seconds=plan.mixed_seconds, rounds=plan.rounds, seed=plan.seed)  # fmt: skip

    return _in_place(context, partial(mixed.room, amount), measure)


def _in_place(
    context: Context, needed: Callable[[int], int], measure: Callable[[Place], dict[str, Any]]
) -> dict[str, Any]:
    with open_place([context.folder("bench")], None, needed) as place:
        return measure(place)


def _row(contender: Contender, rounds: int, say: Callable[[str], object]) -> dict[str, Any]:
    samples = interleave([contender], rounds, 0, say)
    return asdict(rows([contender], samples)[0])


def _recompute(context: Context) -> dict[str, Any]:
    """Prompts that nobody has seen, one at a time."""
    plan, target = context.plan, context.target()
    prompts = make_prompts(
        _PREFILLS, plan.tokens, plan.prompt, vocabulary=target.vocabulary, seed=context.seed + 1
    )
    ran = run_waves(
        target.ask, prompts, [[i] for i in range(_PREFILLS)], "prefill", context.say, target.reads
    )
    ttfts = [wave.answers[i].ttft_s for i, (_, wave) in enumerate(ran)]
    return {
        "tokens_s": plan.tokens / statistics.median(ttfts),
        "ttft_s": ttfts,
        "kv_bytes_per_token": target.describe().get("kv_bytes_per_token"),
    }


def _limit(
    given: float | None, earlier: float | None, part: float, unit: str, note: str
) -> tuple[float | None, str, str]:
    """The limit, its unit, and where it is from."""
    if given is not None:
        return given, unit, note
    if earlier is None:
        return None, unit, note
    return earlier * part, unit, f"the baseline has {earlier:.3g}" + (f"; {note}" if note else "")
