"""What a run cannot be asked for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.cli.accept.command import accept
from kvtier.cli.accept.plan import Plan
from kvtier.config import GIB
from kvtier.errors import InvalidRequest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("plan", [Plan(), Plan.short()])
def test_both_forms_are_possible_and_plain_data(plan: Plan) -> None:
    plan.check()
    assert json.loads(json.dumps(plan.config()))["hours"] == plan.hours
    assert 0 < plan.soak_capacity < plan.capacity


def test_only_what_is_given_changes() -> None:
    plan = Plan.short().with_({"tokens": 300, "trials": None}, {"ttft_lower": 40.0, "tolerance": None})
    assert (plan.tokens, plan.trials, plan.limits.ttft_lower, plan.limits.tolerance) == (300, 3, 40.0, 0.1)
    assert Plan().with_({}, {}) == Plan()


@pytest.mark.parametrize(
    ("given", "limits", "words"),
    [
        ({"trials": 2}, {}, "--trials is 2, needs at least 3"),
        ({"rounds": 0}, {}, "--rounds is 0"),
        ({"output_tokens": 1}, {}, "--output-tokens is 1, needs at least 2"),
        ({"hours": 0.0}, {}, "--hours is 0.0, needs to be above 0"),
        ({"hours": float("nan")}, {}, "--hours is nan"),
        ({"concurrency": (2, 2)}, {}, "--concurrency is"),
        ({"capacity": GIB}, {}, "--capacity is 1.0 GiB, but what is measured takes"),
        ({"gib": 0.0}, {}, "--gib is 0.0"),
        ({}, {"tolerance": 1.0}, "--tolerance is 1.0, needs 0 or more, below 1"),
        ({}, {"baseline_tolerance": -0.1}, "--baseline-tolerance is -0.1"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], limits: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        Plan().with_(given, limits)


def test_wrong_calls_do_nothing(tmp_path: Path) -> None:
    folder, report = tmp_path / "storage", tmp_path / "report"
    folder.mkdir()
    other = tmp_path / "other.json"
    other.write_text('{"format": "kvtier-accept", "version": 2, "gates": []}')
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"directory": tmp_path / "absent"}, "is no directory"),
        ({"report": folder / "report"}, "lies on what is judged"),
        ({"capacity": "big"}, "--capacity is 'big', needs a size"),
        ({"stated_read": "3GB"}, "--stated-read is '3GB', needs a rate"),
        ({"baseline": str(tmp_path / "absent.json")}, "--baseline .* cannot be read"),
        ({"baseline": __file__}, "--baseline .* cannot be read"),
        ({"baseline": str(other)}, "is no report of version 1"),
        ({"url": "http://localhost:1", "model": "m"}, "say how the server loses its caches"),
        ({"url": "http://localhost:1", "clear_post": "/clear"}, "--url needs --model"),
    ]
    for options, words in wrong:
        with pytest.raises(InvalidRequest, match=words):
            accept(**{"directory": folder, "report": report, "short": True, **options})
    assert list(folder.iterdir()) == []
    assert not report.exists()
