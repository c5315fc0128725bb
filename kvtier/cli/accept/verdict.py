"""What a gate found: every value beside its limit, and whether it passes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self, TypeAlias

Outcome: TypeAlias = Literal["passed", "failed", "not run"]

FLAG = "yes or no"
"""The unit of what is 1 or 0."""


@dataclass(frozen=True, slots=True)
class Check:
    """One value. `ok` is None of a value without a limit, which is told and not judged."""

    name: str
    value: float | None
    unit: str = ""
    relation: Literal[">=", "<=", ""] = ""
    limit: float | None = None
    ok: bool | None = None
    note: str = ""


def measured(name: str, value: float | None, unit: str = "", note: str = "") -> Check:
    """A value that is not judged."""
    return Check(name, value, unit, note=note)


def at_least(name: str, value: float | None, limit: float | None, unit: str = "", note: str = "") -> Check:
    """A value that is to be `limit` or more; one that could not be measured fails. No limit: not judged."""
    if limit is None:
        return measured(name, value, unit, note)
    return Check(name, value, unit, ">=", limit, value is not None and value >= limit, note)


def at_most(name: str, value: float | None, limit: float | None, unit: str = "", note: str = "") -> Check:
    """The same for `limit` or less."""
    if limit is None:
        return measured(name, value, unit, note)
    return Check(name, value, unit, "<=", limit, value is not None and value <= limit, note)


@dataclass(slots=True)
class Gate:
    """A gate's outcome, as it is kept and reported."""

    id: str
    title: str
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    """Everything behind the checks, as plain data."""
    error: str = ""
    """What ended the gate before its end."""
    was_run: bool = True
    seconds: float = 0.0

    @property
    def outcome(self) -> Outcome:
        """It passes if it came to its end and no value is beyond its limit."""
        if not self.was_run:
            return "not run"
        failed = self.error or not self.checks or any(check.ok is False for check in self.checks)
        return "failed" if failed else "passed"

    def data(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "outcome": self.outcome}

    @classmethod
    def of(cls, data: dict[str, Any]) -> Self:
        """What `data` gave."""
        fields = {name: value for name, value in data.items() if name != "outcome"}
        return cls(**{**fields, "checks": [Check(**check) for check in data["checks"]]})
