"""`kvtier accept DIR`: the options, and what surrounds the gates."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter
from rich.console import Console

import kvtier
from kvtier.cli.accept.baseline import load_baseline
from kvtier.cli.accept.context import WORK, Context
from kvtier.cli.accept.page import page
from kvtier.cli.accept.plan import Plan
from kvtier.cli.accept.quantities import parse_rate, parse_size
from kvtier.cli.accept.report import report_data, show_gate
from kvtier.cli.accept.run import Messages, now, run_gates
from kvtier.cli.accept.state import State, write_whole
from kvtier.cli.accept.system import describe
from kvtier.cli.bench.recovery.clearing import Clearing
from kvtier.cli.bench.recovery.client import Api  # noqa: TC001  the command line reads the types
from kvtier.cli.bench.recovery.sessions import Kind  # noqa: TC001
from kvtier.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.cli.accept.target import Target
    from kvtier.cli.accept.verdict import Gate

_G1, _G2, _G3, _G4 = (
    Group(f"{name}", sort_key=i)
    for i, name in enumerate(("G1 arrival", "G2 single machine", "G3 main gate", "G4 stability"), 1)
)
_MODEL = Group("The model", sort_key=5)
_SPARE_SESSIONS = 3  # beside those of one trial: the oldest make room


def accept(
    directory: Path,
    *,
    report: Path = Path("kvtier-accept-report"),
    name: str | None = None,
    short: Annotated[bool, Parameter(negative="")] = False,
    baseline: str = "recompute",
    keep_going: Annotated[bool, Parameter(negative="")] = False,
    seed: int | None = None,
    capacity: Annotated[str | None, Parameter(group=_G1)] = None,
    health: Annotated[str | None, Parameter(group=_G1)] = None,
    stated_read: Annotated[str | None, Parameter(group=_G1)] = None,
    stated_write: Annotated[str | None, Parameter(group=_G1)] = None,
    tolerance: Annotated[float | None, Parameter(group=_G1)] = None,
    must_reserve: Annotated[bool | None, Parameter(group=_G1, negative="--may-not-reserve")] = None,
    alignment: Annotated[int | None, Parameter(group=_G1)] = None,
    gib: Annotated[float | None, Parameter(group=_G2)] = None,
    chunk_mib: Annotated[float | None, Parameter(group=_G2)] = None,
    rounds: Annotated[int | None, Parameter(group=_G2)] = None,
    mixed_seconds: Annotated[float | None, Parameter(group=_G2)] = None,
    min_read: Annotated[str | None, Parameter(group=_G2)] = None,
    min_write: Annotated[str | None, Parameter(group=_G2)] = None,
    max_read_p99_ms: Annotated[float | None, Parameter(group=_G2)] = None,
    max_p99_ratio: Annotated[float | None, Parameter(group=_G2)] = None,
    min_prefill: Annotated[float | None, Parameter(group=_G2)] = None,
    baseline_tolerance: Annotated[float | None, Parameter(group=_G2)] = None,
    tokens: Annotated[int | None, Parameter(group=_G3)] = None,
    output_tokens: Annotated[int | None, Parameter(group=_G3)] = None,
    concurrency: Annotated[tuple[int, ...] | None, Parameter(group=_G3, negative="")] = None,
    trials: Annotated[int | None, Parameter(group=_G3)] = None,
    ttft_lower: Annotated[float | None, Parameter(group=_G3)] = None,
    throughput_higher: Annotated[float | None, Parameter(group=_G3)] = None,
    min_cached: Annotated[float | None, Parameter(group=_G3)] = None,
    max_ttft: Annotated[float | None, Parameter(group=_G3)] = None,
    max_tpot_ms: Annotated[float | None, Parameter(group=_G3)] = None,
    hours: Annotated[float | None, Parameter(group=_G4)] = None,
    remeasure_minutes: Annotated[float | None, Parameter(group=_G4)] = None,
    max_drop: Annotated[float | None, Parameter(group=_G4)] = None,
    model: Annotated[str | None, Parameter(group=_MODEL)] = None,
    dtype: Annotated[Literal["float32", "bfloat16"] | None, Parameter(group=_MODEL)] = None,
    url: Annotated[str | None, Parameter(group=_MODEL)] = None,
    api: Annotated[Api | None, Parameter(group=_MODEL)] = None,
    prompt: Annotated[Kind | None, Parameter(group=_MODEL)] = None,
    vocabulary: Annotated[int | None, Parameter(group=_MODEL)] = None,
    restart_command: Annotated[str | None, Parameter(group=_MODEL)] = None,
    clear_post: Annotated[str | None, Parameter(group=_MODEL)] = None,
    pause: Annotated[bool, Parameter(group=_MODEL, negative="")] = False,
    settle: Annotated[float | None, Parameter(group=_MODEL)] = None,
) -> int:
    """Judge the storage below DIRECTORY in four gates: arrival, single machine, main gate, stability.

    Every value is shown beside its limit. The exit code is 0 only if all four gates pass, 1 if one does not,
    2 if the run cannot go on, 130 if it was stopped. However a run was stopped, the same command with the
    same --report goes on with it. All that is made in DIRECTORY is removed at the end.

    Parameters
    ----------
    directory
        On the storage to judge. Nothing there is touched but what the run makes.
    report
        Directory, on other storage, for state.json, report.json and report.html.
    name
        What this configuration is called in reports. Default: the directory.
    short
        A few minutes in place of three days: 1 GiB, prompts of 1,024 tokens, less than two minutes of soak.
    baseline
        report.json of an earlier run on other storage, or `recompute` for prefill with no cache.
    keep_going
        Run the gates after one that failed, too.
    seed
        Draws places, prompts and load. Default: 0.
    capacity
        What the directory is to hold, such as 1.6TB. Default: 64GiB; short: 1GiB.
    health
        How much to write and verify, spread over the capacity. Default: 8GiB; short: 256MiB.
    stated_read
        Read bandwidth that was promised, such as 3GB/s.
    stated_write
        Write bandwidth that was promised.
    tolerance
        Part by which both may be missed. Default: 0.1.
    must_reserve
        Whether the file system must hold the space. Default: yes.
    alignment
        Coarsest alignment of direct reads, in bytes. Default: 4096.
    gib
        GiB per pass. Default: 4; short: 0.125.
    chunk_mib
        MiB per chunk. Default: 2.
    rounds
        Rounds that count. Default: 5; short: 3.
    mixed_seconds
        Seconds of each phase of the mixed load. Default: 5; short: 2.
    min_read
        Least bandwidth of cold reads. From a report as --baseline if not given, as the next two and
        --min-prefill are.
    min_write
        Least bandwidth of synced writes.
    max_read_p99_ms
        Most milliseconds of the p99 of reads beside saturating writes.
    max_p99_ratio
        By how many times writes may raise that p99.
    min_prefill
        Least prefill speed in tokens per second.
    baseline_tolerance
        Part by which these figures may be worse than the baseline's. Default: 0.2.
    tokens
        Tokens per prompt. Default: 4096; short: 1024.
    output_tokens
        Tokens generated per session. Default: 16.
    concurrency
        Sessions at once; repeat it for several. Default: 4, 8, 16; short: 2, 4.
    trials
        Trials, at least 3, which is the default.
    ttft_lower
        Percent by which TTFT p50 must be below the baseline's. Default: 25.
    throughput_higher
        Percent by which output tokens per second must be above the baseline's. Default: 29.
    min_cached
        Percent of prompt tokens that must come from the cache. Default: 90.
    max_ttft
        Most seconds of the TTFT p99; also what a session needs to count for goodput.
    max_tpot_ms
        Most milliseconds of the TPOT p99; likewise.
    hours
        Of load, fractions too. Default: 72; short: 0.03.
    remeasure_minutes
        Minutes between measurements. Default: 60; short: 0.5.
    max_drop
        Percent that a measurement may lie below the median of all. Default: 20.
    model
        Name of the model at --url; else directory of a transformers model. Default: the demo's SmolLM2.
    dtype
        Precision of the model in process. Default: float32.
    url
        An OpenAI-compatible server whose cache is in DIRECTORY. Default: a model in this process.
    api
        Which API of the server; chat takes text alone. Default: completions.
    prompt
        Prompts of token ids, the default, or of words.
    vocabulary
        Token ids are below this. Default: 16000; of a model in process, what it has.
    restart_command
        Restarts the server, or clears its caches; run by the shell, must end.
    clear_post
        Path to POST to instead, such as /reset_prefix_cache.
    pause
        Wait for Enter while you restart it.
    settle
        Seconds between storing and the restart, for late writes. Default: 5; short: 1.
    """
    given = {
        "capacity": None if capacity is None else parse_size(capacity, "--capacity"),
        "health_bytes": None if health is None else parse_size(health, "--health"),
        "gib": gib, "chunk_mib": chunk_mib, "rounds": rounds, "mixed_seconds": mixed_seconds,
        "tokens": tokens, "output_tokens": output_tokens, "concurrency": concurrency or None,
        "trials": trials,
        "hours": hours, "remeasure_minutes": remeasure_minutes, "seed": seed, "model": model, "dtype": dtype,
        "url": url, "api": api, "prompt": prompt, "vocabulary": vocabulary, "settle": settle,
        "restart_command": restart_command, "clear_post": clear_post, "pause": pause,
        "baseline": _digest(baseline),
    }  # fmt: skip
    limits = {
        "stated_read_gb_s": None if stated_read is None else parse_rate(stated_read, "--stated-read"),
        "stated_write_gb_s": None if stated_write is None else parse_rate(stated_write, "--stated-write"),
        "tolerance": tolerance, "must_reserve": must_reserve, "alignment": alignment,
        "read_gb_s": None if min_read is None else parse_rate(min_read, "--min-read"),
        "write_gb_s": None if min_write is None else parse_rate(min_write, "--min-write"),
        "read_p99_ms": max_read_p99_ms, "p99_ratio": max_p99_ratio, "prefill_tokens_s": min_prefill,
        "baseline_tolerance": baseline_tolerance, "ttft_lower": ttft_lower,
        "throughput_higher": throughput_higher, "cached": min_cached, "ttft_s": max_ttft,
        "tpot_ms": max_tpot_ms, "bandwidth_drop": max_drop,
    }  # fmt: skip
    plan = (Plan.short() if short else Plan()).with_(given, limits)
    return run_plan(plan, directory, report, name or str(directory), baseline, keep_going=keep_going)


def run_plan(plan: Plan, directory: Path, report: Path, name: str, baseline: str, *, keep_going: bool) -> int:
    """`accept` with everything parsed."""
    directory, report = directory.resolve(), report.resolve()
    if not directory.is_dir():
        raise InvalidRequest(f"{directory} is no directory: make it, on the storage to judge")
    if report.is_relative_to(directory):
        raise InvalidRequest(
            f"--report {report} lies on what is judged, and may end with it: put it elsewhere"
        )
    clearing = Clearing(plan.restart_command, plan.clear_post, plan.pause)
    if plan.url is not None:
        clearing.check()
        if plan.model is None:
            raise InvalidRequest("--url needs --model, the name that the server has for it")
    earlier = None if baseline == "recompute" else load_baseline(Path(baseline), plan)
    console = Console(stderr=True)
    config = {"directory": str(directory), "name": name, "kvtier": kvtier.__version__, **plan.config()}
    with State(report, config) as state, Messages() as messages, console.status("") as status:
        state.begin(
            {"started": now(), "command": shlex.join(["kvtier", *sys.argv[1:]]), **describe(directory)}
        )
        if state.is_resumed:
            console.print(f"going on with the run in {report}", style="dim", highlight=False, soft_wrap=True)
        context = Context(
            plan, directory, state, lambda: _target(plan, clearing, directory / WORK / "model"),
            lambda text: status.update(text), earlier,
        )  # fmt: skip
        reports: list[dict[str, Any]] = []

        def on_gates(gates: Sequence[Gate]) -> None:
            show_gate(Console(), gates[-1])
            reports.append(report_data(name, state, config, gates, messages.lines()))
            write_whole(report / "report.json", json.dumps(reports[-1], indent=1) + "\n")
            write_whole(report / "report.html", page(reports[-1]))

        try:
            run_gates(context, on_gates, keep_going=keep_going)
        except KeyboardInterrupt:
            console.print("stopped: the same command goes on with it", highlight=False)
            raise
        finally:
            context.release()
    passed = bool(reports[-1]["passed"])
    verdict = "[green]accepted[/]" if passed else "[red]not accepted[/]"
    Console().print(f"[bold]{verdict}[/]  {report / 'report.html'}", highlight=False, soft_wrap=True)
    return 0 if passed else 1


def _digest(baseline: str) -> str:
    """What tells one baseline from another, wherever its file lies."""
    if baseline == "recompute":
        return baseline
    try:
        return "sha256 " + hashlib.sha256(Path(baseline).read_bytes()).hexdigest()
    except OSError as error:
        raise InvalidRequest(
            f"--baseline {baseline} cannot be read ({error.strerror}): give the report.json of an earlier "
            "`kvtier accept`, or recompute"
        ) from error


def _target(plan: Plan, clearing: Clearing, folder: Path) -> Target:
    """The server, or the model in this process, its store in `folder`."""
    if plan.url is not None:
        from kvtier.cli.accept.remote import RemoteModel

        return RemoteModel(plan, clearing, folder.parent.parent)
    from kvtier.cli._demo.model import find_model
    from kvtier.cli.accept.local import LocalModel

    found = find_model(None if plan.model is None else Path(plan.model), Console(stderr=True).print)
    return LocalModel(
        found, plan.dtype, folder, tokens=plan.tokens, output_tokens=plan.output_tokens,
        sessions=sum(plan.concurrency) + _SPARE_SESSIONS,
    )  # fmt: skip
