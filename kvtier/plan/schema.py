"""The fields of a plan's input file: names, units, meaning. Unknown ones are refused with a suggestion."""

from __future__ import annotations

import difflib
import keyword
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtier.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

VERSION = 1
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TAKEN = re.compile(r"at_\d+|max|min|ceil|alone|prefill|recompute|exchange|version|title|model|workload"
                    r"|machine|money|setup|check|given|derived")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Field:
    """One quantity of the input file."""

    figure: str
    """Its name on the sheet."""
    unit: str
    """The unit of a bare number; `money` for an amount in any currency."""
    short: str = ""
    """A unit that is understood to be meant so too."""
    above: float | None = None
    """Needs to be above this; None: of at least 0."""
    most: float | None = None
    """Needs to be at most this."""


MODEL = ("config", "name", "layers", "kv_heads", "head_dim", "kv_lora_rank", "rope_head_dim", "dtype")
WORKLOAD = {
    "prompt_tokens": Field("prompt_tokens", "token/request", "token", above=0),
    "output_tokens": Field("output_tokens", "token/request", "token", above=0),
    "session_bytes": Field("session_bytes", "B/request", "B", above=0),
    "tpot": Field("tpot", "s*request/token", "s"),
    "requests_per_day": Field("requests_per_day", "request/d", above=0),
    "target_throughput": Field("target_throughput", "token/s", above=0),
}
WORKLOAD_OTHER = ("concurrency", "hit_rate", "hit_curve", "policy", "chunk_tokens", "trace")
PREFILL = {
    "speed": Field("prefill_speed", "token/s", above=0),
    "seconds": Field("prefill_seconds", "s", above=0),
    "concurrency": Field("prefill_concurrency", "request", "1", above=0),
}
MACHINE = {
    "price_per_hour": Field("machine_price", "{currency}/h", "{currency}"),
    "power": Field("machine_power", "W"),
}
MONEY = {
    "token_price": Field("token_price", "{currency}/token"),
    "electricity": Field("electricity_price", "{currency}/kWh"),
}
MONEY_OTHER = ("currency", "exchange")
TIER = {
    "size": Field("size", "B", above=0),
    "latency": Field("latency", "s"),
    "hit_rate": Field("hit_rate", "1", most=1),
    "price": Field("price", "money"),
    "lifetime": Field("lifetime", "year", above=0),
    "power": Field("power", "W"),
}
TIER_OTHER = ("name", "label", "bandwidth", "bench", "row")
SETUP = ("name", "label", "tier")
CHECK = ("name", "printed", "formula", "note", "at_least", "reading")
READING = ("name", "formula", "unit")
SECTIONS = (
    "version", "title", "notes", "model", "workload", "prefill", "machine", "money", "setup", "given",
    "derived", "check",
)  # fmt: skip


def known(section: Mapping[str, Any], where: str, *fields: Iterable[str]) -> None:
    """Raise InvalidRequest, with the nearest name, for a field that is none of `fields`."""
    if not isinstance(section, dict):
        raise InvalidRequest(f"{where} is {section!r}, needs a table of fields")
    names = [name for some in fields for name in some]
    for name in section:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(names)
            raise InvalidRequest(f"unknown field {name!r} in {where}; {hint}")


def named(section: Mapping[str, Any], where: str, others: Iterable[str]) -> str:
    """The name of a setup or tier, which formulas use. Raises InvalidRequest for one that they cannot."""
    name = section.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise InvalidRequest(f"{where} has the name {name!r}, needs one of a-z, 0-9 and _, a letter first")
    if _TAKEN.fullmatch(name):
        raise InvalidRequest(f"{where} has the name {name!r}, which formulas use for something else")
    if name in others:
        raise InvalidRequest(f"{where} has the name {name!r}, which is taken: give each its own")
    return name


def text(section: Mapping[str, Any], name: str, where: str, default: str = "") -> str:
    """A field that is a string. Raises InvalidRequest for another."""
    value = section.get(name, default)
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} in {where} is {value!r}, needs a string")
    return value
