"""G4, stability: hours of load on a store, every byte compared, and the speed measured again and again."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvtier.cli.accept.single import read_pass, write_pass
from kvtier.cli.accept.verdict import Check, at_least, at_most, measured
from kvtier.cli.soak.content import LARGEST, Contents
from kvtier.cli.soak.run import SETTINGS, Soak
from kvtier.cli.soak.watch import Sample, trends
from kvtier.cli.soak.worker import Violation
from kvtier.errors import KVTierError, StoreInUse
from kvtier.tiers.slab.directory import lock_directory

if TYPE_CHECKING:
    from pathlib import Path

    from kvtier.cli.accept.context import Context

_SAVE_EVERY = 2.0  # seconds: what a kill may cost
_SAMPLES = 100  # kept of every stretch
_ROUNDS = 2  # of each re-measurement
_DEADLINE = 20.0  # seconds: what takes longer has failed, however slow the device
_UNITS = {
    "rss": ("memory", 1 << 20, "MiB"),
    "descriptors": ("descriptors", 1, ""),
    "threads": ("threads", 1, ""),
}


def run(context: Context) -> tuple[list[Check], dict[str, Any]]:
    """Load until the hours are over, over as many processes as it takes; the first error ends it."""
    record: dict[str, Any] = context.state.get("G4.soak") or {
        "seconds": 0.0, "stretches": [], "measured": [], "ended": ""
    }  # fmt: skip
    total, interval = 3600 * context.plan.hours, 60 * context.plan.remeasure_minutes
    while not record["ended"]:
        if record["seconds"] >= min(total, interval * len(record["measured"])):
            _measure(context, record)
        if record["ended"] or record["seconds"] >= total:
            break
        until = min(total, interval * len(record["measured"]))
        _stretch(context, record, until - record["seconds"])
    return _checks(context, record), record


def _measure(context: Context, record: dict[str, Any]) -> None:
    """Read and write bandwidth, with the load at rest."""
    try:
        read, write = read_pass(context, _ROUNDS), write_pass(context, _ROUNDS)
    except (KVTierError, OSError, AssertionError) as error:
        record["ended"] = f"cannot be measured any more: {error}"
    else:
        record["measured"].append(
            {"seconds": record["seconds"], "read_gb_s": read["gb_s"], "write_gb_s": write["gb_s"]}
        )
    context.state.put("G4.soak", record)


def _stretch(context: Context, record: dict[str, Any], seconds: float) -> None:
    """The load up to the next measurement, kept as it goes."""
    plan, begin = context.plan, record["seconds"]
    scale = plan.soak_scale
    folder = context.work / "soak"
    folder.parent.mkdir(exist_ok=True)
    _wait_until_free(folder)
    soak = Soak(
        folder, None, plan.seed + len(record["stretches"]), "auto", contents=Contents(scale),
        is_new=not folder.exists(), capacity=plan.soak_capacity, dram=scale * SETTINGS["dram"],
        landing=scale * SETTINGS["landing"], chunk_bytes=scale * LARGEST, get_timeout=_DEADLINE,
        put_timeout=_DEADLINE, scrub=0,
    )  # fmt: skip
    stretch: dict[str, Any] = {"run": len(context.state.runs), "seconds": 0.0, "counts": {}, "samples": []}
    record["stretches"].append(stretch)
    saved = time.monotonic()

    def keep(passed: float) -> None:
        record["seconds"] = begin + passed
        thin = soak.samples[:: 1 + len(soak.samples) // _SAMPLES]
        stretch.update(
            seconds=passed, counts=dict(soak.total()),
            samples=[{**asdict(sample), "seconds": begin + sample.seconds} for sample in thin],
        )  # fmt: skip
        context.state.put("G4.soak", record)

    def tell(passed: float) -> None:
        nonlocal saved
        counts = soak.total()
        done = (begin + passed) / 3600
        context.say(f"{done:.3g} of {plan.hours:g} hours, {counts['get.hit']} hits, {counts['kills']} kills")
        if bad := _failures(dict(counts)):
            raise Violation(f"{sum(bad.values())} requests failed")
        if time.monotonic() - saved > _SAVE_EVERY:
            saved = time.monotonic()
            keep(passed)

    keep(0.0)
    try:
        soak.run(seconds, tell)
    except Violation as error:
        record["ended"] = str(error)
    except (KVTierError, OSError) as error:
        record["ended"] = f"the store cannot go on: {error}"
    finally:
        keep(min(seconds, soak.samples[-1].seconds) if soak.samples else 0.0)
    if not record["ended"]:
        keep(seconds)


def _wait_until_free(folder: Path) -> None:
    """What a killed process had started ends a little later. Raises StoreInUse if it does not."""
    end = time.monotonic() + _DEADLINE
    while folder.exists():
        try:
            os.close(lock_directory(folder))
        except StoreInUse:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
        else:
            return


def _failures(counts: dict[str, int]) -> dict[str, int]:
    """What a sound device never does: requests that failed, and chunks that were not as they were written."""
    names = ("get.failed", "put.failed", "get.miss.checksum", "get.miss.short_read")
    return {name: count for name, count in counts.items() if name.startswith(names)}


def _checks(context: Context, record: dict[str, Any]) -> list[Check]:
    plan, stretches = context.plan, record["stretches"]
    counts: dict[str, int] = {}
    for stretch in stretches:
        for name, count in stretch["counts"].items():
            counts[name] = counts.get(name, 0) + count
    failures = _failures(counts)
    checks = [
        at_least("hours of load", record["seconds"] / 3600, plan.hours, "h",
                 f"stopped and resumed {max(0, len({stretch['run'] for stretch in stretches}) - 1)} times"),
        at_most("broken promises", float(bool(record["ended"])), 0.0, "", record["ended"]),
        at_most("requests that failed, chunks that were bad", float(sum(failures.values())), 0.0, "",
                ", ".join(f"{count} {name}" for name, count in failures.items())),
        measured("chunks read and compared", float(counts.get("get.hit", 0))),
        measured("chunks written", float(counts.get("put.stored", 0))),
        measured("restarts of the store", float(counts.get("reopens", 0)), "",
                 f"{counts.get('kills', 0)} after a kill -9"),
    ]  # fmt: skip
    return checks + _flat(stretches) + _steady(context, record["measured"])


def _flat(stretches: list[dict[str, Any]]) -> list[Check]:
    """Whether what the process takes grows, in the process that ran for longest."""
    by_run: dict[int, list[Sample]] = {}
    for stretch in stretches:
        by_run.setdefault(stretch["run"], []).extend(Sample(**sample) for sample in stretch["samples"])
    found = trends(max(by_run.values(), key=len, default=[]))
    checks = []
    for name, (label, unit, shown) in _UNITS.items():
        if name in found:
            trend = found[name]
            checks.append(at_most(f"{label}, last third", trend.last / unit, trend.most / unit, shown,
                                  f"first third {trend.first / unit:.4g}"))  # fmt: skip
        else:
            checks.append(measured(f"{label}, last third", None, shown, "too short to see it grow"))
    return checks


def _steady(context: Context, found: list[dict[str, float]]) -> list[Check]:
    checks = []
    for name in ("read", "write"):
        rates = sorted(one[f"{name}_gb_s"] for one in found)
        drop = 100 * (1 - rates[0] / rates[len(rates) // 2]) if rates else None
        note = f"{len(rates)} times, {rates[0]:.3g} to {rates[-1]:.3g} GB/s" if rates else "never measured"
        limit = context.plan.limits.bandwidth_drop
        checks.append(at_most(f"{name} measured again, worst below the median", drop, limit, "%", note))
    return checks
