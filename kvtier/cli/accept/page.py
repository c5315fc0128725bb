"""The report as one HTML page that needs nothing from elsewhere."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

from kvtier.cli.accept.charts import Bar, Line, bars, lines
from kvtier.cli.accept.report import duration, limit_text, value_text, verdict_text
from kvtier.cli.accept.verdict import Check, Gate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_RULES = [
    "Cold: every pass begins with the data out of the page cache; where the device counts its reads, the "
    "count shows it.",
    "Figures of passes are medians of rounds after one that is discarded. GB are 10^9 bytes, GiB 2^30.",
    "Main gate: sessions with distinct prompts are computed and stored, in waves; the server is restarted or "
    "the store closed, and the page cache dropped; each session is asked for again, once. Greedy, and all "
    "outputs as long. Every trial has prompts of its own, drawn from the seed.",
    "TTFT is from a request to its first token, TPOT the time per token after it. Throughput is output "
    "tokens over the time from a wave's first request to its last token.",
    "Goodput counts the sessions whose TTFT and TPOT are within what was asked for.",
    "Stability: every byte that the load reads is compared with what was put. The load is at rest while the "
    "bandwidth is measured again. The first request that fails ends it.",
]


def page(data: Mapping[str, Any]) -> str:
    """The page for a report's data."""
    gates = [Gate.of(gate) for gate in data["gates"]]
    verdict, kind = "accepted", "passed"
    if not data["passed"]:
        is_open = all(gate.outcome != "failed" for gate in gates)
        verdict, kind = ("not finished", "not-run") if is_open else ("not accepted", "failed")
    runs = data["runs"]
    template = Template(files("kvtier.cli.accept").joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(f"Storage acceptance: {data['name']}"),
        verdict=verdict,
        verdict_class=kind,
        subtitle=escape(
            f"kvtier {data['kvtier']}, begun {runs[0]['started']}, report version {data['version']}"
        ),
        strip="".join(map(_tile, gates)),
        gates="\n".join(map(_section, gates)),
        system=_pairs({name: runs[-1][name] for name in runs[-1] if name not in ("started", "command")}),
        runs=_items(
            f"{run['started']}: <code>{escape(run['command'])}</code>{_changes(run, runs[0])}" for run in runs
        ),
        rules=_items(map(escape, _RULES)),
        target=_pairs(data["target"]),
        settings=_pairs(data["settings"]),
        messages=_messages(data["messages"]),
    )


def _tile(gate: Gate) -> str:
    return f'<a href="#{gate.id}"><b>{gate.id} {escape(gate.title)}</b>{_badge(gate)}</a>'


def _badge(gate: Gate) -> str:
    return f'<span class="badge {gate.outcome.replace(" ", "-")}">{gate.outcome}</span>'


def _section(gate: Gate) -> str:
    time = f'<span class="soft">{duration(gate.seconds)}</span>' if gate.was_run else ""
    parts = [f'<div class="head"><h2>{gate.id} {escape(gate.title)}</h2>{_badge(gate)}{time}</div>']
    if gate.error:
        parts.append(f'<p class="error">Ended: {escape(gate.error)}</p>')
    if not gate.was_run:
        parts.append('<p class="soft">A gate before it has not passed, or is not over yet.</p>')
    if gate.figures:
        pictures = _PICTURES[gate.id](gate.figures, {check.name: check for check in gate.checks})
        parts.append(f'<div class="charts">{"".join(pictures)}</div>{_legend(gate)}')
    if gate.checks:
        parts.append(_table(gate.checks))
    return f'<section class="card" id="{gate.id}">{"".join(parts)}</section>'


def _legend(gate: Gate) -> str:
    if gate.id != "G3":
        return ""
    words = {
        "own": "this storage", "other": f"baseline: {gate.figures['baseline']}", "limit": "limit",
        "dot": "one trial; bars are medians",
    }  # fmt: skip
    items = "".join(f'<span><i class="{kind}"></i>{escape(text)}</span>' for kind, text in words.items())
    return f'<div class="legend">{items}</div>'


def _table(checks: Sequence[Check]) -> str:
    rows = "".join(
        f'<tr><td>{escape(check.name)}</td><td class="n">{escape(value_text(check))}</td>'
        f'<td class="n">{escape(limit_text(check))}</td>'
        f'<td class="{"ok" if check.ok else "no"}">{verdict_text(check)}</td>'
        f'<td class="note">{escape(check.note)}</td></tr>'
        for check in checks
    )
    head = '<tr><th></th><th class="n">measured</th><th class="n">limit</th><th></th><th></th></tr>'
    return f'<div class="scroll"><table>{head}{rows}</table></div>'


def _rates(checks: Mapping[str, Check], names: Mapping[str, str]) -> list[Bar]:
    return [
        Bar(label, check.value, limit=check.limit)
        for name, label in names.items()
        if (check := checks[name]).value is not None
    ]


def _arrival(figures: dict[str, Any], checks: Mapping[str, Check]) -> list[str]:
    return [bars("Bandwidth, without the store", "GB/s", _rates(checks, {"read": "read", "write": "write"}))]


def _single(figures: dict[str, Any], checks: Mapping[str, Check]) -> list[str]:
    rates = _rates(checks, {"cold reads": "cold reads", "synced writes": "synced writes"})
    alone, loaded = figures["mixed"]["rows"]
    latencies = [
        Bar("alone, p50", alone["p50_ms"], is_other=True),
        Bar("under writes, p50", loaded["p50_ms"]),
        Bar("alone, p99", alone["p99_ms"], is_other=True),
        Bar("under writes, p99", loaded["p99_ms"], limit=checks["p99 of reads under writes"].limit),
    ]
    return [
        bars("Bandwidth, through the store", "GB/s", rates),
        bars("Latency of paced reads", "ms", latencies),
    ]


def _recovery(figures: dict[str, Any], checks: Mapping[str, Check]) -> list[str]:
    others = {row["concurrency"]: row for row in figures["baseline_rows"]}

    def pairs(name: str, trials: str, check: str, sign: float) -> list[Bar]:
        found = []
        for row in figures["rows"]:
            count, other = row["concurrency"], others[row["concurrency"]]
            limit = checks[f"{check}, {count} at once"].limit
            for one, is_other in ((row, False), (other, True)):
                if one[name] is not None:
                    found.append(
                        Bar(
                            "" if is_other else f"{count} at once",
                            one[name],
                            [value for value in one[trials] if value is not None],
                            None if is_other or limit is None or not other[name]
                            else other[name] * (1 + sign * limit / 100),
                            is_other,
                        )
                    )  # fmt: skip
        return found

    return [
        bars("TTFT p50", "s", pairs("ttft_p50_s", "ttft_of_trials", "TTFT lower", -1)),
        bars("Throughput", "output tokens/s",
             pairs("tokens_per_s", "tokens_per_s_of_trials", "throughput higher", 1)),
    ]  # fmt: skip


def _stability(figures: dict[str, Any], checks: Mapping[str, Check]) -> list[str]:
    samples: list[dict[str, Any]] = []
    marks: list[float] = []
    run = None
    most = max(figures["seconds"], 1.0)
    unit, per = ("h", 3600.0) if most >= 7200 else ("min", 60.0) if most >= 300 else ("s", 1.0)
    for stretch in figures["stretches"]:
        if run not in (None, stretch["run"]) and stretch["samples"]:
            marks.append(stretch["samples"][0]["seconds"] / per)
        run = stretch["run"]
        samples += stretch["samples"]
    found = []
    if samples:
        memory = [(sample["seconds"] / per, sample["rss"] / 2**20) for sample in samples]
        counts = [
            Line(name, [(sample["seconds"] / per, sample[name]) for sample in samples], name == "threads")
            for name in ("descriptors", "threads")
        ]
        found += [
            lines("Memory of the process", "MiB", [Line("memory", memory)], marks, unit),
            lines("Descriptors and threads", "", counts, marks, unit),
        ]
    if figures["measured"]:
        rates = [
            Line(
                name,
                [(one["seconds"] / per, one[f"{name}_gb_s"]) for one in figures["measured"]],
                name == "write",
            )
            for name in ("read", "write")
        ]
        found.append(lines("Bandwidth, measured again", "GB/s", rates, marks, unit))
    return found


_PICTURES: dict[str, Callable[[dict[str, Any], Mapping[str, Check]], list[str]]] = {
    "G1": _arrival,
    "G2": _single,
    "G3": _recovery,
    "G4": _stability,
}


def _pairs(values: Mapping[str, Any]) -> str:
    """Names and values; those of values that have names themselves follow theirs."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= {f"{name}, {inner}": one for inner, one in value.items()}
        elif value is not None:
            flat[name] = value
    rows = (
        f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(_shown(value))}</dd>"
        for name, value in flat.items()
    )
    return f"<dl>{''.join(rows)}</dl>"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _changes(run: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """What of the machine is not as it was for the first process."""
    names = [
        name
        for name in run
        if name not in ("started", "command", "file_system") and run[name] != first.get(name)
    ]
    return f" <span class='error'>on another {escape(', '.join(names))}</span>" if names else ""


def _items(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>"


def _messages(messages: Sequence[str]) -> str:
    return f"<h3>Messages of the store</h3>{_items(map(escape, messages))}" if messages else ""
