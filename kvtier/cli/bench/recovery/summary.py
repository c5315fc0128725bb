"""Figures of a wave, and how they compare with those of the wave that stored the same sessions."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.cli.bench.recovery.client import Answer
    from kvtier.cli.bench.recovery.wave import Wave

COLUMNS = {
    "ttft_p50_s": "TTFT p50 s", "ttft_p90_s": "p90", "ttft_p99_s": "p99", "ttft_mean_s": "mean",
    "tpot_ms": "TPOT ms", "tokens_per_s": "out tok/s", "cached_fraction": "cached", "read_gb": "read GB",
    "same_tokens": "same tokens", "failed": "failed",
}  # fmt: skip


def summarize(
    name: str, wave: Wave, *, read_bytes: int | None, reference: Mapping[int, Answer] | None = None
) -> dict[str, Any]:
    """A row: TTFT in seconds, TPOT in milliseconds, what was cached of the prompts, what the devices read.

    `reference` is what the same sessions were answered before. Figures that nothing tells are None.
    """
    answers = wave.answers
    row: dict[str, Any] = {
        "name": name,
        "sessions": len(answers) + len(wave.failures),
        "failed": len(wave.failures),
        "wall_s": wave.wall_s,
        **ttft_figures([answer.ttft_s for answer in answers.values()]),
    }
    tpots = [answer.tpot_s for answer in answers.values() if answer.tpot_s is not None]
    cached, source = _cached_tokens(wave)
    prompts = [answer.prompt_tokens or 0 for answer in answers.values()]
    differ = None if reference is None else different(answers, reference)
    return row | {
        "tpot_ms": statistics.fmean(tpots) * 1e3 if tpots else None,
        "tokens_per_s": sum(answer.output_tokens for answer in answers.values()) / wave.wall_s,
        "cached_tokens": cached,
        "cached_by": source,
        "cached_fraction": cached / sum(prompts) if cached is not None and all(prompts) and prompts else None,
        "prompt_tokens": sum(prompts) if all(prompts) and prompts else None,
        "read_gb": None if read_bytes is None else read_bytes / 1e9,
        "same_tokens": None if differ is None else not differ,
        "different": differ,
        "ttft_s": {str(session): answer.ttft_s for session, answer in sorted(answers.items())},
        "failures": {str(session): why for session, why in sorted(wave.failures.items())},
    }


def ttft_figures(ttfts: Sequence[float]) -> dict[str, float | None]:
    """Percentiles and mean, in seconds; each None of no values."""
    names = {"ttft_p50_s": 50, "ttft_p90_s": 90, "ttft_p99_s": 99}
    found: dict[str, float | None] = {
        name: float(np.percentile(ttfts, percent)) if ttfts else None for name, percent in names.items()
    }
    return found | {"ttft_mean_s": statistics.fmean(ttfts) if ttfts else None}


def different(answers: Mapping[int, Answer], reference: Mapping[int, Answer]) -> list[int]:
    """Sessions whose output is not that of the reference: by token ids, or by text where there are none."""
    return [session for session, answer in sorted(answers.items()) if _differs(answer, reference[session])]


def _differs(answer: Answer, other: Answer) -> bool:
    if answer.token_ids is not None and other.token_ids is not None:
        return answer.token_ids != other.token_ids
    return answer.text != other.text


def _cached_tokens(wave: Wave) -> tuple[float | None, str | None]:
    """By the answers if each tells, else by the server's metrics."""
    told = [answer.cached_tokens for answer in wave.answers.values()]
    if told and None not in told:
        return sum(count for count in told if count is not None), "usage"
    return (None, None) if wave.hit_tokens is None else (wave.hit_tokens, "/metrics")
