"""An earlier run's report, to be compared with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtier.cli.accept import single
from kvtier.errors import InvalidRequest

if TYPE_CHECKING:
    from pathlib import Path

    from kvtier.cli.accept.plan import Plan

FORMAT, VERSION = "kvtier-accept", 1


@dataclass(frozen=True, slots=True)
class Baseline:
    """The figures of a named configuration."""

    name: str
    single: dict[str, float]
    """As `single.summary` makes them."""
    recovery: list[dict[str, Any]]
    """As `recovery.summary` makes them."""


def load_baseline(file: Path, plan: Plan) -> Baseline:
    """The report in `file`. Raises InvalidRequest if it is none, or of a run that asked for other things."""
    try:
        report = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"--baseline {file} cannot be read ({error}): give the report.json of an earlier "
            "`kvtier accept`, or recompute"
        ) from error
    if not isinstance(report, dict) or report.get("format") != FORMAT or report.get("version") != VERSION:
        raise InvalidRequest(f"--baseline {file} is no report of version {VERSION} of `kvtier accept`")
    gates = {gate["id"]: gate for gate in report["gates"]}
    for needed in ("G2", "G3"):
        if not gates[needed]["figures"]:
            raise InvalidRequest(
                f"--baseline {file}: its gate {needed} was not run to its end; finish it first"
            )
    found = gates["G3"]["figures"]
    own = json.loads(json.dumps(plan.method))
    if differing := sorted(name for name in own if own[name] != found["method"].get(name)):
        said = ", ".join(f"{name}: {found['method'].get(name)!r}, here {own[name]!r}" for name in differing)
        raise InvalidRequest(f"--baseline {file} asked for other things ({said}): only equal runs compare")
    at_once = {row["concurrency"] for row in found["rows"]}
    if missing := [count for count in plan.concurrency if count not in at_once]:
        raise InvalidRequest(f"--baseline {file} has no {missing} sessions at once, only {sorted(at_once)}")
    return Baseline(report["name"], single.summary(gates["G2"]["figures"]), found["rows"])
