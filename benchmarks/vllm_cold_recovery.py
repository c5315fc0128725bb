"""Cold recovery of a real `vllm serve`, with each way of keeping KV on disk: what a restart costs.

    python benchmarks/vllm_cold_recovery.py --work DIR --python ENVIRONMENT/bin/python [--device NAME ...]

For each configuration vLLM is started, sessions are stored in waves, and vLLM is stopped. Then, trial by
trial and in an order drawn anew each time, a configuration is started again on what it stored, with the files
out of the page cache, and gets the same waves, each session once. `recompute` has no connector. Every wave is
sent a second time, when all is in vLLM's own cache: what the first took on top is `load share`. What was done
is kept in the work directory: an ended run goes on where it was; another --work starts anew.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_serve import (
    CONFIGURATIONS,
    STORING,
    TIERS,
    Server,
    Sizes,
    kv_bytes_per_token,
    obstacles,
    prepare_model,
)

from kvtier.cli.bench import report
from kvtier.cli.bench.recovery.client import Answer, EndpointError
from kvtier.cli.bench.recovery.counters import DeviceReads, drop_files
from kvtier.cli.bench.recovery.course import plan_waves
from kvtier.cli.bench.recovery.sessions import make_prompts
from kvtier.cli.bench.recovery.summary import summarize
from kvtier.cli.bench.recovery.wave import run_wave
from kvtier.testing.emulated import EmulatedDevice
from kvtier.testing.profiles import PROFILES, DeviceProfile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MIB, MB = 1 << 20, 1_000_000
DISK = "disk"
# A local disk and an array as published, 6.78 and 10.2 GB/s, at a hundredth: the model is small, too.
DEVICES = {
    name: DeviceProfile(name=name, read_latency=200e-6, read_bandwidth=bandwidth)
    for name, bandwidth in (("local-6.78", round(67.8 * MB)), ("array-10.2", 102 * MB))
} | PROFILES
COLUMNS = {
    "ttft_p50_s": "TTFT p50 s", "ttft_p99_s": "p99 s", "recompute_times_p50": "recompute/p50",
    "recompute_times_p99": "recompute/p99", "fs_times": "fs/this", "load_share": "load share",
    "tpot_ms": "TPOT ms", "tokens_per_s": "out tok/s", "cached_fraction": "cached", "read_gb": "read GB",
    "other_output": "other output", "trials": "trials",
}  # fmt: skip


class Benchmark:
    """One model's sessions, stores and trials, all below `folder`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.python = args.python.absolute()
        self.folder = args.work.absolute() / args.model.replace("/", "_")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.waves = plan_waves(args.concurrency)
        count = sum(args.concurrency)
        self.model = prepare_model(args.model, args.work.absolute(), self.python, say)
        token = kv_bytes_per_token(self.model, args.dtype)
        session = (args.tokens + args.output_tokens + 256) * token
        self.sizes = Sizes(
            kv=(count + 1) * session,
            pool=2 * max(args.concurrency) * session,
            capacity=count * session * 5 // 4 + 512 * MIB,
            context=args.tokens + args.output_tokens + 128,
        )
        vocabulary = json.loads((self.model / "config.json").read_text())["vocab_size"]
        self.prompts = make_prompts(count, args.tokens, "ids", vocabulary=vocabulary, seed=args.seed)
        self.warm_up = make_prompts(1, 16, "ids", vocabulary=vocabulary, seed=args.seed + 1)[0]
        self.settings = {
            "model": args.model, "dtype": args.dtype, "kv_bytes_per_token": token, "tokens": args.tokens,
            "output_tokens": args.output_tokens, "concurrency": list(args.concurrency), "seed": args.seed,
        }  # fmt: skip
        self.done: dict[str, Any] = {"settings": self.settings, "stored": {}, "trials": {}}
        if (self.folder / "done.json").exists():
            self.done = json.loads((self.folder / "done.json").read_text())
            if self.done["settings"] != self.settings:
                sys.exit(f"{self.folder} holds a run with other settings: {self.done['settings']}")

    def keep(self) -> None:
        (self.folder / "done.json").write_text(json.dumps(self.done, indent=1))

    def server(self, stores: dict[str, Path]) -> Server:
        args = self.args
        settings = json.loads(args.connector_settings)
        return Server(
            self.python, self.model, stores, self.sizes, self.folder, args.dtype, settings, args.nice
        )  # fmt: skip

    def store(self, configuration: str) -> Path:
        return self.folder / configuration

    def populate(self, configurations: Sequence[str]) -> None:
        """Have them store all sessions, in one server."""
        names = ", ".join(configurations)
        for configuration in configurations:
            shutil.rmtree(self.store(configuration), ignore_errors=True)
        found: dict[str, Any] = {"rows": {}, "answers": {}}
        with self.server({name: self.store(name) for name in configurations}) as server:
            server.endpoint.probe(self.warm_up)
            for wave in self.waves:
                say(f"{names}: storing {len(wave)} sessions of {self.args.tokens} tokens")
                ran = run_wave(server.endpoint, {i: self.prompts[i] for i in wave}, self.args.output_tokens)
                if ran.failures:
                    raise EndpointError(f"{names} failed while storing: {ran.failures}")
                found["rows"][str(len(wave))] = summarize(names, ran, read_bytes=None)
                found["answers"] |= {str(i): asdict(answer) for i, answer in ran.answers.items()}
            for _ in range(5):  # vLLM moves the last blocks out of its pool when it has steps to do
                time.sleep(self.args.settle / 5)
                server.endpoint.probe(self.warm_up)
        self.done["stored"] |= dict.fromkeys(configurations, found)
        self.keep()

    def reference(self, configuration: str) -> dict[int, Answer] | None:
        """What the sessions were answered when stored: by this configuration, or else by any."""
        stored = self.done["stored"]
        found = stored.get(configuration) or next(iter(stored.values()), None)
        if found is None:
            return None
        return {
            int(i): Answer(**{**answer, "token_ids": tuple(answer["token_ids"] or ()) or None})
            for i, answer in found["answers"].items()
        }

    @contextmanager
    def placed(self, configuration: str, place: str) -> Iterator[Path]:
        """The directory of the store: where it is, or copied to an emulated device."""
        if place == DISK or configuration == "recompute":
            yield self.store(configuration)
            return
        source = self.store(configuration)
        held = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
        with EmulatedDevice(DEVICES[place], size=held + 256 * MIB) as device:
            copied = device.backing_path(0) / "store"
            subprocess.run(["cp", "-r", "--sparse=always", source, copied], check=True)
            yield device.paths[0] / "store"

    def trial(self, configuration: str, place: str, number: int) -> None:
        """A start on what is stored, and its waves."""
        name = f"{place}/{configuration}/{number}"
        if name in self.done["trials"]:
            return
        rows: dict[str, Any] = {}
        reference = self.reference(configuration)
        with self.placed(configuration, place) as store:
            store.mkdir(parents=True, exist_ok=True)
            drop_files([store])
            reads = DeviceReads([store])
            with self.server({configuration: store}) as server:
                server.endpoint.probe(self.warm_up)
                for wave in self.waves:
                    prompts = {i: self.prompts[i] for i in wave}
                    before = reads.read() or 0
                    cold = run_wave(server.endpoint, prompts, self.args.output_tokens)
                    nbytes = None if reads.why_not else (reads.read() or 0) - before
                    warm = run_wave(server.endpoint, prompts, self.args.output_tokens)
                    row = summarize(configuration, cold, read_bytes=nbytes, reference=reference)
                    again = summarize(configuration, warm, read_bytes=None)
                    row["warm_ttft_p50_s"], row["warm_ttft_p99_s"] = again["ttft_p50_s"], again["ttft_p99_s"]
                    if row["ttft_p50_s"] and again["ttft_p50_s"]:
                        row["load_share"] = 1 - again["ttft_p50_s"] / row["ttft_p50_s"]
                    rows[str(len(wave))] = row
                    say(
                        f"{place}, trial {number + 1}, {configuration}, {len(wave)} at once: TTFT p50 "
                        f"{row['ttft_p50_s'] or 0:.2f} s, cached {row['cached_fraction'] or 0:.3f}"
                    )
        self.done["trials"][name] = rows
        self.keep()

    def rows_of(self, place: str, configuration: str, concurrency: int) -> list[dict[str, Any]]:
        """Of each trial so far, in order; recompute is the same everywhere."""
        place = DISK if configuration == "recompute" else place
        numbers = range(max(self.args.trials, self.args.recompute_trials))
        found = (self.done["trials"].get(f"{place}/{configuration}/{number}") for number in numbers)
        return [trial[str(concurrency)] for trial in found if trial]

    def summary(self, place: str, configurations: list[str]) -> list[dict[str, Any]]:
        """Medians over the trials; ratios to recompute of medians, to fs medians of each trial's."""
        rows = []
        for concurrency in self.args.concurrency:
            base = self.rows_of(place, "recompute", concurrency)
            others = self.rows_of(place, "fs", concurrency)
            for configuration in configurations:
                own = self.rows_of(place, configuration, concurrency)
                if own:
                    row = _median_row(f"{configuration}, {concurrency} at once", own)
                    for percent in ("p50", "p99"):
                        if base and row[f"ttft_{percent}_s"]:
                            recompute = statistics.median(each[f"ttft_{percent}_s"] for each in base)
                            row[f"recompute_times_{percent}"] = recompute / row[f"ttft_{percent}_s"]
                    pairs = zip(others, own, strict=False)
                    ratios = [fs["ttft_p50_s"] / each["ttft_p50_s"] for fs, each in pairs]
                    row["fs_times"] = (
                        statistics.median(ratios) if ratios and configuration in STORING else None
                    )
                    rows.append(row)
        return rows


def _median_row(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    figures = (
        "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "ttft_mean_s", "tpot_ms", "tokens_per_s", "cached_fraction",
        "read_gb", "load_share", "warm_ttft_p50_s",
    )  # fmt: skip
    row: dict[str, Any] = {"name": name, "trials": len(rows)}
    for figure in figures:
        values = [each[figure] for each in rows if each.get(figure) is not None]
        row[figure] = statistics.median(values) if values else None
    same = [each["same_tokens"] for each in rows]
    if None not in same:
        other = sum(len(each["different"]) for each in rows)
        row["other_output"] = f"{other} of {sum(each['sessions'] for each in rows)}"
    row["failed"] = sum(each["failed"] for each in rows)
    row["ttft_p50_s_of_trials"] = [each["ttft_p50_s"] for each in rows]
    return row


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def main() -> None:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a server ends, too
    benchmark = Benchmark(args)
    absent = obstacles(benchmark.python, args.configuration)
    for name, why in absent.items():
        say(f"{name} is left out: {why}")
    usable = [name for name in args.configuration if name not in absent]
    missing = [name for name in usable if name in STORING and name not in benchmark.done["stored"]]
    for group in (TIERS, *((name,) for name in STORING if name not in TIERS)):
        if names := [name for name in group if name in missing]:
            try:
                benchmark.populate(names)
            except EndpointError as error:
                absent |= dict.fromkeys(names, str(error))
                say(f"{', '.join(names)} is left out: {error}")
    usable = [name for name in usable if name not in absent]
    places = args.device or [DISK]
    for number in range(max(args.trials, args.recompute_trials)):
        turns = [
            (place, name)
            for place in places
            for name in usable
            if name != "recompute" and number < args.trials
        ]
        if "recompute" in usable and number < args.recompute_trials:
            turns.append((DISK, "recompute"))
        random.Random(f"{args.seed} {number}").shuffle(turns)
        for place, name in turns:
            benchmark.trial(name, place, number)
    reports = {place: benchmark.summary(place, usable) for place in places}
    for place, rows in reports.items():
        where = place if place == DISK else f"emulated {place}"
        report.show(f"cold recovery of vLLM, {args.model}, {where}", rows, COLUMNS, absent)
        figures = {"bench": "vllm_cold_recovery", **benchmark.settings, "rows": rows, "absent": absent}
        if args.json:
            file = args.json.with_name(f"{args.json.stem}-{place}{args.json.suffix or '.json'}")
            report.write_json(
                file, where, {**figures, "command": f"python benchmarks/vllm_cold_recovery.py {_typed()}"}
            )
        if args.plot:
            _draw(args, place, where, benchmark, usable)


def _draw(args: argparse.Namespace, place: str, where: str, benchmark: Benchmark, usable: list[str]) -> None:
    from kvtier.cli.bench.recovery.matplotlib import draw

    series = {
        name: {
            c: _median_row(name, rows)
            for c in args.concurrency
            if (rows := benchmark.rows_of(place, name, c))
        }
        for name in usable
    }
    file = args.plot.with_name(f"{args.plot.stem}-{place}{args.plot.suffix or '.png'}")
    draw(file, f"cold recovery of vLLM, {args.model}, {args.tokens} tokens, {where}", series)


def _typed() -> str:
    """The command's options without its directories."""
    left_out = ("--work", "--python", "--json", "--plot")
    words, skip = [], False
    for word in sys.argv[1:]:
        if not skip and word not in left_out:
            words.append(word)
        skip = word in left_out
    return " ".join(words)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="directory on the disk to measure; kept")
    parser.add_argument(
        "--python", type=Path, default=Path(sys.executable), help="of an environment with vLLM"
    )
    parser.add_argument("--model", default="smollm2", help="smollm2, random, or a model's directory")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--configuration", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    parser.add_argument("--connector-settings", default="{}", help="JSON: more settings of kvtier-connector")
    parser.add_argument("--device", nargs="+", choices=[DISK, *DEVICES], help="disk, or emulated devices")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--recompute-trials", type=int, default=3)
    parser.add_argument("--settle", type=float, default=5.0, help="seconds for late writes before a stop")
    parser.add_argument("--nice", type=int, help="priority of the servers, on a machine that others use, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
