"""`kvtier plan`: what a tier would bring, from stated inputs, every figure with its formula."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeAlias

from cyclopts import Parameter

from kvtier.cli._plan import report
from kvtier.cli.bench.report import check_outputs
from kvtier.errors import InvalidRequest
from kvtier.plan import accounting, cases, inputs, schema

_Text: TypeAlias = str | None
_HITS = ("hit_rate", "hit_curve", "policy", "trace")
_HITS_OF = {"workload.hit_rate", "workload.hit_curve", "workload.trace"}
_BANDWIDTH = ("bandwidth", "bench", "row")


def plan(
    file: Path | None = None,
    *,
    case: Annotated[_Text, Parameter(help="A published case that comes with kvtier: fx100.")] = None,
    model: Annotated[_Text, Parameter(help="The model's config.json, or its directory.")] = None,
    prompt_tokens: Annotated[_Text, Parameter(help="Tokens of a session's prompt.")] = None,
    output_tokens: Annotated[_Text, Parameter(help="Tokens that a request generates.")] = None,
    tpot: Annotated[_Text, Parameter(help="Time per output token of a session, such as '20 ms'.")] = None,
    hit_rate: Annotated[_Text, Parameter(help="Share of prompt tokens that the tier has, 0 to 1.")] = None,
    hit_curve: Annotated[Path | None, Parameter(help="JSON of `kvtier replay --json`.")] = None,
    policy: Annotated[_Text, Parameter(help="Policy whose rows of the curve to take.")] = None,
    chunk_tokens: Annotated[int | None, Parameter(help="Tokens per chunk of the curve or trace.")] = None,
    trace: Annotated[Path | None, Parameter(help="Trace in Mooncake's format, through an LRU.")] = None,
    concurrency: Annotated[
        tuple[int, ...], Parameter(negative="", help="Sessions at once; repeat it for several.")
    ] = (),
    prefill: Annotated[_Text, Parameter(help="Prefill speed of the machine, such as '3200 token/s'.")] = None,
    bandwidth: Annotated[_Text, Parameter(help="Of the tier, such as 6GB/s.")] = None,
    bench: Annotated[Path | None, Parameter(help="Or the JSON of `kvtier bench read --json`.")] = None,
    size: Annotated[_Text, Parameter(help="Of the tier, such as 14TB.")] = None,
    price: Annotated[_Text, Parameter(help="Of the tier, such as '50000 USD'.")] = None,
    lifetime: Annotated[_Text, Parameter(help="Of the tier, such as '3 years'.")] = None,
    power: Annotated[_Text, Parameter(help="Of the tier, such as '300 W'.")] = None,
    machine_price: Annotated[_Text, Parameter(help="Of the machine an hour, such as 20 (USD).")] = None,
    machine_power: Annotated[_Text, Parameter(help="Of the machine, such as '10 kW'.")] = None,
    electricity: Annotated[_Text, Parameter(help="Price of a kWh, such as 0.1 (USD).")] = None,
    token_price: Annotated[_Text, Parameter(help="What tokens sell for, such as '2 USD/Mtoken'.")] = None,
    set_: Annotated[
        tuple[str, ...],
        Parameter(
            name="--set", negative="", help="SECTION.FIELD=VALUE or SETUP.TIER.FIELD=VALUE; repeat it."
        ),
    ] = (),
    explain: Annotated[bool, Parameter(negative="", help="Show every figure's formula and inputs.")] = False,
    json: Annotated[Path | None, Parameter(help="File to write all figures to, each with both.")] = None,
    plot: Annotated[
        Path | None, Parameter(help="PNG of TTFT and rate over concurrency. Needs matplotlib.")
    ] = None,
) -> None:
    """Work out what a tier would bring: TTFT, throughput, saturation, break-even, cost, energy, payback.

    FILE is a TOML file of inputs; docs/PLANNING.md describes it, the formulas and what they assume. Options
    override it, or do without it. Figures that an input is missing for are left out, and named.
    """
    check_outputs(json, plot)
    tables, directory = _tables(file, case)
    here = Path.cwd()
    options: dict[str, Any] = {
        "model.config": model,
        "workload.prompt_tokens": prompt_tokens,
        "workload.output_tokens": output_tokens,
        "workload.tpot": tpot,
        "workload.hit_rate": hit_rate,
        "workload.hit_curve": hit_curve,
        "workload.policy": policy,
        "workload.chunk_tokens": chunk_tokens,
        "workload.trace": trace,
        "workload.concurrency": list(concurrency) or None,
        "prefill.speed": prefill,
        "machine.price_per_hour": machine_price,
        "machine.power": machine_power,
        "money.electricity": electricity,
        "money.token_price": token_price,
    }
    of_tier: dict[str, Any] = {
        "bandwidth": bandwidth, "bench": bench, "size": size, "price": price, "lifetime": lifetime,
        "power": power,
    }  # fmt: skip
    given = {name: value for name, value in options.items() if value is not None}
    tier_given = {name: value for name, value in of_tier.items() if value is not None}
    if not _HITS_OF.isdisjoint(given):
        _forget(tables.get("workload", {}), _HITS)
    if prefill is not None:
        _forget(tables.get("prefill", {}), ("seconds", "concurrency"))
    if tier_given:
        name, tier = _only_tier(tables)
        if not tier_given.keys().isdisjoint(_BANDWIDTH):
            _forget(tier, _BANDWIDTH)
        given |= {f"{name}.{field}": value for field, value in tier_given.items()}
    inputs.override(tables, given, here)
    inputs.override(tables, dict(map(inputs.assignment, set_)), here)
    if tables == {"version": schema.VERSION}:
        raise InvalidRequest(
            "there is nothing to plan: give a FILE, a --case, or options such as --model config.json "
            "--prompt-tokens 30000 --hit-rate 0.9 --bandwidth 6GB/s --prefill 4000"
        )
    read = inputs.build(tables, directory)
    sheet = accounting.work_out(read)
    results = accounting.results(read, sheet)
    report.show(read, sheet, results)
    if explain:
        report.explain(sheet)
    report.write_json(json, read, sheet, results)
    if plot is not None:
        from kvtier.cli._plan.matplotlib import draw

        draw(plot, read, sheet)


def _tables(file: Path | None, case: str | None) -> tuple[dict[str, Any], Path]:
    """The file's or case's tables, and where files that it names are."""
    if file is not None and case is not None:
        raise InvalidRequest("a plan is of a FILE or of a --case: leave one out, and override with --set")
    if case is not None:
        return cases.read(case), Path.cwd()
    if file is not None:
        return inputs.read(file), file.absolute().parent
    return {"version": schema.VERSION}, Path.cwd()


def _only_tier(tables: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The tier that options mean, as SETUP.TIER and its table: made where the plan has no setups."""
    anew = {"name": "tier", "label": "with the tier", "tier": [{"name": "disk"}]}
    found = {
        f"{setup.get('name')}.{tier.get('name')}": tier
        for setup in tables.setdefault("setup", [anew])
        for tier in setup.get("tier", [])
    }
    if len(found) != 1:
        raise InvalidRequest(
            f"the plan has the tiers {', '.join(found) or 'none'}: say which, --set SETUP.TIER.FIELD=VALUE"
        )
    return found.popitem()


def _forget(table: dict[str, Any], names: tuple[str, ...]) -> None:
    """Drop what an option takes the place of."""
    for name in names:
        table.pop(name, None)
