"""`kvtier bench cold-recovery`: store sessions, restart, and have each of them again."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from cyclopts import Parameter

from kvtier.cli.bench import options, report
from kvtier.cli.bench.recovery.clearing import Clearing
from kvtier.cli.bench.recovery.client import Api, Endpoint, EndpointError
from kvtier.cli.bench.recovery.counters import DeviceReads, drop_page_cache
from kvtier.cli.bench.recovery.course import plan_waves, run_waves
from kvtier.cli.bench.recovery.sessions import Kind, make_prompts
from kvtier.cli.bench.recovery.summary import COLUMNS
from kvtier.cli.bench.recovery.wave import Wave, run_wave
from kvtier.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PROBE_TOKENS = 16
_Paths: TypeAlias = Annotated[
    list[Path] | None,
    Parameter(negative="", help="Directory of the cache: its device's counters prove cold reads."),
]


def cold_recovery(
    *,
    url: Annotated[str, Parameter(help="The server, such as http://localhost:8000.")],
    model: Annotated[str, Parameter(help="The model's name, as the server has it.")],
    restart_command: Annotated[
        str | None, Parameter(help="Restarts the server, or clears its caches; run by the shell, must end.")
    ] = None,
    clear_post: Annotated[
        str | None, Parameter(help="Path to POST to instead, such as /reset_prefix_cache.")
    ] = None,
    pause: Annotated[bool, Parameter(negative="", help="Wait for Enter while you restart it.")] = False,
    concurrency: Annotated[
        tuple[int, ...],
        Parameter(negative="", help="Sessions at once, a wave for each; repeat it for several."),
    ] = (4, 8, 16),
    sessions: Annotated[int | None, Parameter(help="Sessions to store. Default: as the waves need.")] = None,
    tokens: Annotated[int, Parameter(help="Tokens per prompt.")] = 4000,
    output_tokens: Annotated[int, Parameter(help="Tokens to generate per session.")] = 16,
    api: Annotated[Api, Parameter(help="Which API; chat takes text alone.")] = "completions",
    prompt: Annotated[Kind, Parameter(help="Prompts of token ids, or of words.")] = "ids",
    vocabulary: Annotated[int, Parameter(help="Token ids are below this.")] = 16000,
    path: _Paths = None,
    settle: Annotated[
        float, Parameter(help="Seconds between storing and the restart, for late writes.")
    ] = 5.0,
    ready_timeout: Annotated[float, Parameter(help="Seconds within which it serves again.")] = 600.0,
    timeout: Annotated[float, Parameter(help="Seconds the server may be silent in a request.")] = 1800.0,
    seed: Annotated[int, Parameter(help="Draws the prompts.")] = 0,
    json: options.Json = None,
    plot: options.Plot = None,
) -> None:
    """Measure how soon an OpenAI-compatible server answers known prompts after it lost its memory.

    Distinct prompts are sent in waves, each wave all at once: the server computes and stores them. Then it
    is restarted or cleared, and the page cache dropped. Then the same waves are sent again: each session
    once, and in one wave only. Greedy and streamed. TTFT is from a request to its first token, TPOT the
    time per token after it. Outputs are compared with the first ones.
    """
    report.check_outputs(json, plot)
    clearing = Clearing(restart_command, clear_post, pause)
    clearing.check()
    paths = path or []
    waves = plan_waves(concurrency, sessions)
    _check(tokens, output_tokens, vocabulary, api, prompt, paths)
    endpoint = Endpoint(url, model, api=api, timeout=timeout)
    endpoint.check_model()
    reads = DeviceReads(paths)
    count = sum(map(len, waves))
    prompts = make_prompts(count, tokens, prompt, vocabulary=vocabulary, seed=seed)
    warm_up = make_prompts(1, _PROBE_TOKENS, prompt, vocabulary=vocabulary, seed=seed + 1)[0]
    endpoint.probe(warm_up)
    asked = waves[: len(concurrency)]
    ask = partial(run_wave, endpoint, tokens=output_tokens)
    with report.progress(sum(1 + len(wave) for wave in (*waves, *asked))) as step:
        stored = run_waves(ask, prompts, waves, "storing", step, reads)
        time.sleep(settle)
        step("restarting")
        done = clearing.clear(endpoint, ready_timeout)
        dropped = drop_page_cache(paths)
        endpoint.probe(warm_up)
        found = run_waves(ask, prompts, asked, "recovering", step, reads, stored)
    settings = {
        "model": model, "api": api, "prompt": prompt, "tokens": tokens, "output_tokens": output_tokens,
        "concurrency": list(concurrency), "sessions": count, "vocabulary": vocabulary, "seed": seed,
        "cleared": done, "page_cache": dropped,
    }  # fmt: skip
    rows = [row for row, _ in stored] + [row for row, _ in found]
    gains = [_gain(before, after) for (before, _), (after, _) in zip(stored, found, strict=False)]
    where = ", ".join(map(str, paths)) or url
    title = (
        f"cold recovery of {model}, prompts of {tokens} {'tokens' if prompt == 'ids' else 'words'}, {where}"
    )
    report.show(title, rows, COLUMNS, None, [done, dropped, *_notes(gains, found, reads)])
    report.write_json(json, where, {"bench": "cold-recovery", **settings, "gains": gains, "rows": rows})
    if plot is not None:
        from kvtier.cli.bench.recovery.matplotlib import draw

        series = {"storing": stored[: len(asked)], "recovering": found}
        draw(plot, title, {name: {row["sessions"]: row for row, _ in ran} for name, ran in series.items()})
    if failed := sum(row["failed"] for row, _ in found):
        raise EndpointError(f"{failed} of the sessions failed after the restart; their reasons are above")


def _check(
    tokens: int, output_tokens: int, vocabulary: int, api: Api, prompt: Kind, paths: Sequence[Path]
) -> None:
    if tokens < 1 or output_tokens < 1:
        raise InvalidRequest(f"--tokens is {tokens}, --output-tokens {output_tokens}: both need at least 1")
    if vocabulary < 2:
        raise InvalidRequest(f"--vocabulary is {vocabulary}, needs at least 2")
    if api == "chat" and prompt == "ids":
        raise InvalidRequest("--api chat takes no token ids: add --prompt text")
    for path in paths:
        if not path.is_dir():
            raise InvalidRequest(f"--path {path} is no directory")


def _gain(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """How many times sooner the same sessions had their first token the second time."""
    names = ("ttft_p50_s", "ttft_p99_s")
    return {
        "concurrency": after["sessions"],
        **{f"{name[:-2]}_times": before[name] / after[name] if after[name] else None for name in names},
    }


def _notes(
    gains: Sequence[Mapping[str, Any]], found: Sequence[tuple[dict[str, Any], Wave]], reads: DeviceReads
) -> list[str]:
    notes = []
    for gain, (row, _) in zip(gains, found, strict=True):
        if gain["ttft_p50_times"] is not None:
            notes.append(
                f"{gain['concurrency']} at once: first token {gain['ttft_p50_times']:.1f} times sooner than "
                f"when stored (p99 {gain['ttft_p99_times']:.1f} times)"
            )
        if row["different"]:
            notes.append(
                f"other output than when stored: sessions {row['different']} (in 16-bit types the size of a "
                "batch can change a token, with no cache at all)"
            )
        notes += [f"session {session} failed: {why}" for session, why in row["failures"].items()]
    if reads.why_not:
        notes.append(f"nothing counts reads ({reads.why_not}): whether they were cold is not proved")
    return notes
