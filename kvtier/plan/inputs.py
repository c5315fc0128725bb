"""A plan's input file, read, overridden and checked. `docs/PLANNING.md` describes its fields."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from kvtier.errors import InvalidRequest
from kvtier.plan import checks, hits, model, schema, setups
from kvtier.plan.units import measured
from kvtier.plan.values import Given, currency_name, read_all, read_one

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.layout import KVLayout

DEFAULT_CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
_FILES = ("config", "hit_curve", "trace", "bench")


@dataclass(frozen=True, slots=True)
class Inputs:
    """All that a plan is worked out from."""

    title: str
    notes: str
    currency: str
    values: tuple[Given, ...]
    layout: KVLayout | None
    layout_source: str
    concurrency: tuple[int, ...]
    setups: tuple[setups.Setup, ...]
    curve: hits.Curve | None = None
    trace: hits.Trace | None = None
    chunk_tokens: int | None = None
    derived: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Formula and unit by name."""
    checks: tuple[checks.Check, ...] = ()


def read(file: Path) -> dict[str, Any]:
    """A file's tables. Raises InvalidRequest for what cannot be read, or is no TOML."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"cannot read the plan {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the plan {file} is not valid TOML: {error}") from error


def override(tables: dict[str, Any], values: Mapping[str, Any], directory: Path) -> None:
    """Set fields by dotted name: `workload.hit_rate`, and of a tier `SETUP.TIER.bandwidth`.

    Files are looked for from `directory` on. Raises InvalidRequest for a section or tier that is not there.
    """
    for path, value in values.items():
        *parents, name = path.split(".")
        if name in _FILES and isinstance(value, str | PurePath):
            value = str((directory / value).absolute())
        _table(tables, parents, path)[name] = value


def assignment(text: str) -> tuple[str, Any]:
    """Name and value of "workload.hit_rate=0.8": the value is TOML, or the text as it stands."""
    path, equals, value = text.partition("=")
    if not equals or "." not in path:
        raise InvalidRequest(f"--set {text} needs SECTION.FIELD=VALUE, or SETUP.TIER.FIELD=VALUE")
    return path.strip(), _toml_value(value.strip())


def build(tables: Mapping[str, Any], directory: Path) -> Inputs:
    """Check everything. Files it names are looked for from `directory` on. Raises InvalidRequest."""
    schema.known(tables, "the plan", schema.SECTIONS)
    if tables.get("version") != schema.VERSION:
        raise InvalidRequest(
            f"version of the plan is {tables.get('version')!r}; this kvtier reads version = {schema.VERSION}"
        )
    workload = tables.get("workload", {})
    schema.known(workload, "[workload]", schema.WORKLOAD, schema.WORKLOAD_OTHER)
    money = tables.get("money", {})
    schema.known(money, "[money]", schema.MONEY, schema.MONEY_OTHER)
    currency = currency_name(schema.text(money, "currency", "[money]", "USD"))
    layout, layout_source = None, ""
    if "model" in tables:
        layout, layout_source = model.layout(tables["model"], directory)
    chunk_tokens = _whole(workload, "chunk_tokens")
    curve, trace = _hits(workload, directory, chunk_tokens)
    values = [
        *read_all(workload, "[workload]", schema.WORKLOAD, currency, schema.WORKLOAD_OTHER),
        *read_all(tables.get("prefill", {}), "[prefill]", schema.PREFILL, currency),
        *read_all(tables.get("machine", {}), "[machine]", schema.MACHINE, currency),
        *read_all(money, "[money]", schema.MONEY, currency, schema.MONEY_OTHER),
        *_exchange(money.get("exchange", {}), currency),
        *_given(tables.get("given", {})),
    ]
    return Inputs(
        title=schema.text(tables, "title", "the plan"),
        notes=schema.text(tables, "notes", "the plan"),
        currency=currency,
        values=tuple(values),
        layout=layout,
        layout_source=layout_source,
        concurrency=_concurrency(workload.get("concurrency", list(DEFAULT_CONCURRENCY))),
        setups=setups.read(tables.get("setup", []), workload, currency, directory),
        curve=curve,
        trace=trace,
        chunk_tokens=chunk_tokens,
        derived=checks.derived(tables.get("derived", {})),
        checks=checks.read(tables.get("check", [])),
    )


def _hits(
    workload: Mapping[str, Any], directory: Path, chunk_tokens: int | None
) -> tuple[hits.Curve | None, hits.Trace | None]:
    if len([name for name in ("hit_rate", "hit_curve", "trace") if name in workload]) > 1:
        raise InvalidRequest("[workload] has more than one of hit_rate, hit_curve and trace: leave one")
    if "policy" in workload and "hit_curve" not in workload:
        raise InvalidRequest("policy in [workload] chooses among the rows of a hit_curve, and there is none")
    if "hit_curve" in workload:
        file = directory / schema.text(workload, "hit_curve", "[workload]")
        return hits.read_curve(file, workload.get("policy"), chunk_tokens), None
    if "trace" in workload:
        return None, hits.read_trace(directory / schema.text(workload, "trace", "[workload]"))
    return None, None


def _concurrency(value: Any) -> tuple[int, ...]:
    counts = value if isinstance(value, list) else [value]
    whole = [
        count for count in counts if isinstance(count, int) and not isinstance(count, bool) and count > 0
    ]
    if not counts or whole != counts or len(set(whole)) < len(whole):
        raise InvalidRequest(f"concurrency in [workload] is {value!r}, needs different numbers from 1 up")
    return tuple(sorted(whole))


def _whole(section: Mapping[str, Any], name: str) -> int | None:
    value = section.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise InvalidRequest(f"{name} in [workload] is {value!r}, needs a whole number of at least 1")
    return value


def _exchange(table: Mapping[str, Any], currency: str) -> list[Given]:
    if not isinstance(table, dict):
        raise InvalidRequest(f"exchange in [money] is {table!r}, needs a table such as {{CNY = 7.1}}")
    rates = []
    for name, value in table.items():
        kind = schema.Field(f"exchange.{name}", f"{currency_name(name)}/{currency}", above=0)
        rates.append(read_one(value, name, "[money] exchange", kind, currency))
    return rates


def _given(table: Mapping[str, Any]) -> list[Given]:
    """Quantities of any unit that formulas of the file use."""
    if not isinstance(table, dict):
        raise InvalidRequest(f"given is {table!r}, needs a table of quantities")
    found = []
    for name, text in table.items():
        if not isinstance(text, str | int | float) or isinstance(text, bool):
            raise InvalidRequest(f"{name} in [given] is {text!r}, needs a text such as '74.9 token/s'")
        value, of = measured(str(text))
        found.append(Given(f"given.{name}", value, of.text, f"{name} in [given]"))
    return found


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text


def _table(tables: dict[str, Any], parents: Sequence[str], path: str) -> dict[str, Any]:
    """The table that a dotted name means: a section, made if it is not there, or a tier that is there."""
    where: Any = tables
    setups = [one for one in tables.get("setup", []) if isinstance(one, dict)]
    setup = next((one for one in setups if one.get("name") == parents[0]), None)
    if setup is not None:
        tiers = [one for one in setup.get("tier", []) if isinstance(one, dict)]
        where = next((one for one in tiers if parents[1:2] == [one.get("name")]), None)
        if where is None:
            names = ", ".join(str(one.get("name")) for one in tiers)
            raise InvalidRequest(f"{path} names no tier; the setup {parents[0]!r} has {names}")
        parents = parents[2:]
    elif parents[0] not in schema.SECTIONS:
        known = [*schema.SECTIONS, *(str(one.get("name")) for one in setups)]
        schema.known({parents[0]: None}, path, known)
    for parent in parents:
        where = where.setdefault(parent, {}) if isinstance(where, dict) else None
    if not isinstance(where, dict):
        raise InvalidRequest(f"{path} names no field of a table")
    return where
