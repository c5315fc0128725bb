"""Setups of tiers: the devices that KV is loaded from, and their bandwidths."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtier.errors import InvalidRequest
from kvtier.plan import schema
from kvtier.plan.units import Quantity, unit
from kvtier.plan.values import read_all, read_one

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from kvtier.plan.values import Given


@dataclass(frozen=True, slots=True)
class Tier:
    """A device that KV is loaded from."""

    name: str
    label: str
    values: tuple[Given, ...]
    bandwidth: Mapping[int, Quantity]
    """By concurrency, from which on it holds; at least one."""
    bandwidth_source: str
    currency: str | None
    """Of its price; None without one."""

    def bandwidth_at(self, concurrency: int) -> Quantity:
        """Of the largest concurrency told that is not above this one, else of the smallest."""
        below = [told for told in self.bandwidth if told <= concurrency]
        return self.bandwidth[max(below) if below else min(self.bandwidth)]


@dataclass(frozen=True, slots=True)
class Setup:
    """Tiers that work together; setups are alternatives, each compared with recomputing."""

    name: str
    label: str
    tiers: tuple[Tier, ...]


def read(tables: Any, workload: Mapping[str, Any], currency: str, directory: Path) -> tuple[Setup, ...]:
    """The setups of an input file. Bench files are looked for from `directory` on. Raises InvalidRequest."""
    if not isinstance(tables, list):
        raise InvalidRequest("setup needs to be a list: [[setup]] for each, and [[setup.tier]] under it")
    setups: list[Setup] = []
    for table in tables:
        schema.known(table, "[[setup]]", schema.SETUP)
        name = schema.named(table, "a setup", [setup.name for setup in setups])
        tiers: list[Tier] = []
        if not isinstance(table.get("tier"), list) or not table["tier"]:
            raise InvalidRequest(f"the setup {name!r} has no tier: give it a [[setup.tier]]")
        for one in table["tier"]:
            tiers.append(_tier(one, [tier.name for tier in tiers], name, workload, currency, directory,
                               alone=len(table["tier"]) == 1))  # fmt: skip
        setups.append(Setup(name, schema.text(table, "label", name, name), tuple(tiers)))
    return tuple(setups)


def _tier(
    table: Mapping[str, Any],
    others: Sequence[str],
    setup: str,
    workload: Mapping[str, Any],
    currency: str,
    directory: Path,
    *,
    alone: bool,
) -> Tier:
    schema.known(table, "[[setup.tier]]", schema.TIER, schema.TIER_OTHER)
    name = schema.named(table, f"a tier of {setup!r}", others)
    where = f"the tier {setup}.{name}"
    values = read_all(table, where, schema.TIER, currency, schema.TIER_OTHER)
    if "hit_rate" in workload:
        if not alone or "hit_rate" in table:
            raise InvalidRequest(
                "hit_rate in [workload] is for setups of one tier: give each tier its own, the share of "
                "prompt tokens that it serves"
            )
        values.append(
            read_one(workload["hit_rate"], "hit_rate", "[workload]", schema.TIER["hit_rate"], currency)
        )
    bandwidth, source = _bandwidth(table, where, directory)
    currencies = [given.unit for given in values if given.figure == "price"]
    return Tier(
        name=name,
        label=schema.text(table, "label", where, name),
        values=tuple(values),
        bandwidth=bandwidth,
        bandwidth_source=source,
        currency=currencies[0] if currencies else None,
    )


def _bandwidth(table: Mapping[str, Any], where: str, directory: Path) -> tuple[dict[int, Quantity], str]:
    if ("bandwidth" in table) == ("bench" in table):
        raise InvalidRequest(
            f"{where} needs either bandwidth, or bench: the JSON of `kvtier bench read --json`"
        )
    if "bench" in table:
        row = table.get("row")
        return _of_bench(directory / schema.text(table, "bench", where), row)
    given = table["bandwidth"]
    by_concurrency = given if isinstance(given, dict) else {"1": given}
    found: dict[int, Quantity] = {}
    for concurrency, value in by_concurrency.items():
        if not concurrency.isdecimal() or int(concurrency) < 1:
            raise InvalidRequest(f"bandwidth of {where} is by {concurrency!r}, needs sessions at once, as 16")
        kind = schema.Field("bandwidth", "B/s", above=0)
        found[int(concurrency)] = read_one(value, "bandwidth", where, kind, "").quantity
    if not found:
        raise InvalidRequest(f"bandwidth of {where} is an empty table")
    return found, f"bandwidth in {where}"


def _of_bench(file: Path, row: Any) -> tuple[dict[int, Quantity], str]:
    """What kvtier's fastest checked reads gave, or the row that is named."""
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
        speeds = {str(one["name"]): float(one["gb_s"]) for one in report["rows"]}
    except OSError as error:
        raise InvalidRequest(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidRequest(f"{file} is not what `kvtier bench read --json` writes: {error!r}") from error
    ours = [name for name in speeds if name.startswith("kvtier-") and not name.endswith("-unchecked")]
    if row is None and ours:
        row = max(ours, key=speeds.__getitem__)
    if row not in speeds:
        raise InvalidRequest(f"{file} has no row {row!r}; its rows are {', '.join(speeds)}")
    if not speeds[row] > 0:
        raise InvalidRequest(f"{file} has {speeds[row]} GB/s in its row {row!r}, needs a figure above 0")
    return {1: Quantity(speeds[row] * 1e9, unit("B/s").dimensions)}, f"{file.name}, row {row}"
