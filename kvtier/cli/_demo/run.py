"""The demo from beginning to end, in the order the user sees it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvtier.cli._demo.model import (
    TEXT,
    DemoError,
    cache_dir,
    find_model,
    load_model,
    load_tokenizer,
    prompt_ids,
)
from kvtier.cli._demo.report import Report
from kvtier.cli._demo.steps import (
    CHUNK_TOKENS,
    NEW_TOKENS,
    Job,
    Start,
    drop_page_cache,
    first_token,
    go_on,
    kv_digests,
    warm_up,
)
from kvtier.integrations.hf import PrefixCache, kv_layout, weights_digest

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt
    from rich.console import Console
    from transformers import DynamicCache

    from kvtier.config import EngineName


def run(
    console: Console,
    model: Path | None,
    text: Path | None,
    tokens: int,
    dtype: str,
    path: Path | None,
    engine: EngineName,
    json_file: Path | None,
) -> int:
    """`kvtier demo` without its error messages; see there. Returns 0, or 1 if anything differs."""
    if tokens < CHUNK_TOKENS:
        raise DemoError(f"--tokens is {tokens}, needs at least one chunk of {CHUNK_TOKENS}")
    source = (text or TEXT).read_text(encoding="utf-8")
    with contextlib.ExitStack() as stack:
        steps = Steps(console)
        folder = find_model(model, steps.say)
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=cache_dir(), prefix="demo-")))
        store = path or work / "store"
        store.mkdir(parents=True, exist_ok=True)
        demo = Demo(steps, folder, dtype, work)
        demo.load(source, tokens)
        demo.job = Job(
            model=str(folder),
            dtype=dtype,
            threads=torch.get_num_threads(),
            folder=str(work),
            store=str(store),
            chunk_bytes=demo.chunk_bytes,
            chunks=tokens // CHUNK_TOKENS,
            engine=engine,
        )
        report = demo.play()
        report.show(console)
        if json_file is not None:
            json_file.write_text(json.dumps(report.figures(), indent=2) + "\n", encoding="utf-8")
        return 0 if report.tokens_equal and report.bytes_equal else 1


class Steps:
    """Shows what is going on, and what has been done in how many seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, line: str) -> None:
        """A line that stays."""
        self._console.print(f"[dim]·[/] {line}", highlight=False)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[Any]:
        """A spinner while the block runs, then a line with the time it took. Yields the spinner."""
        began = time.perf_counter()
        # Four frames a second: a spinner should not compete with what it waits for.
        with self._console.status(f"{name} ...", refresh_per_second=4) as status:
            yield status
        seconds = time.perf_counter() - began
        self._console.print(f"[green]✓[/] {name} [dim]{seconds:.2f} s[/]", highlight=False)


class Demo:
    """The demo's state between its steps."""

    def __init__(self, steps: Steps, folder: Path, dtype: str, work: Path) -> None:
        self._steps = steps
        self._folder = folder
        self._dtype = dtype
        self._work = work
        self.job: Job

    def load(self, text: str, tokens: int) -> None:
        """Model, digest of its weights, and the prompt's ids."""
        with self._steps.step(f"load the model, {self._dtype}"):
            began = time.perf_counter()
            self._tokenizer = load_tokenizer(self._folder)
            self._model = load_model(self._folder, self._dtype)
            weights_digest(self._model)
            self._load_seconds = time.perf_counter() - began
        longest = getattr(self._model.config, "max_position_embeddings", tokens + NEW_TOKENS)
        if tokens + NEW_TOKENS > longest:
            raise DemoError(f"--tokens is {tokens}, but the model reads at most {longest - NEW_TOKENS}")
        self._ids = torch.tensor([prompt_ids(self._tokenizer, text, tokens)])

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk of the model's KV."""
        return kv_layout(self._model, chunk_tokens=CHUNK_TOKENS).chunk_bytes

    def play(self) -> Report:
        """Compute, store, restore here, restore in a new process, compare."""
        model, ids, job = self._model, self._ids, self.job
        np.save(self._work / "ids.npy", ids[0].numpy())
        with job.open_store() as store:
            prefix_cache = PrefixCache(model, store, chunk_tokens=CHUNK_TOKENS)
            store.delete(prefix_cache.keys(ids)[0]).result()
            warm_up(model)
            with self._steps.step(f"prefill {ids.shape[1]} tokens from nothing"):
                recompute, reference, logits = first_token(
                    model, prefix_cache, ids, time.perf_counter(), restore=False
                )
            with self._steps.step(f"store {job.chunks} chunks on disk, and sync"):
                began = time.perf_counter()
                saved = prefix_cache.save(ids, reference, until="disk").result()
                store.flush().result()
                save_seconds = time.perf_counter() - began
            if not saved.ok:
                raise DemoError("the store did not take every chunk; `kvtier doctor` may know why")
            expected = go_on(model, reference, recompute, logits)
            with self._steps.step("restore from DRAM, and continue"):
                dram, cache, logits = first_token(model, prefix_cache, ids, time.perf_counter(), restore=True)
            differences = [difference(expected, go_on(model, cache, dram, logits))]
            del cache
        drop_page_cache(Path(job.store))
        disk, result = self._new_process()
        differences.append(difference(expected, np.load(self._work / "logits.npy")))
        return Report(
            model=f"{type(model).__name__} {self._folder.name}",
            dtype=self._dtype,
            prompt_tokens=ids.shape[1],
            chunk_tokens=CHUNK_TOKENS,
            kv_bytes=job.chunks * job.chunk_bytes,
            threads=job.threads,
            recompute=recompute,
            dram=dram,
            disk=disk,
            load_seconds=self._load_seconds,
            save_seconds=save_seconds,
            bytes_equal=same_bytes(reference, dram) and same_bytes(reference, disk),
            logit_difference=max(differences),
            device_bytes=result["device_bytes"],
            stats=result["stats"],
            answer=self._tokenizer.decode(recompute.tokens, skip_special_tokens=True),
        )

    def _new_process(self) -> tuple[Start, dict[str, Any]]:
        command = [sys.executable, "-P", "-m", "kvtier.cli._demo.worker", str(self.job.write())]
        errors = self._work / "errors.txt"
        with (
            self._steps.step("restart: restore from disk in a new process, and continue") as status,
            errors.open("wb") as stderr,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                status.update(f"new process {process.pid}: {line.strip()} ...")
        if process.returncode:
            lines = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            why = lines[-1] if lines else f"exit code {process.returncode}"
            raise DemoError(f"the new process could not restore: {why}")
        result = json.loads((self._work / "result.json").read_text(encoding="utf-8"))
        return Start(**result["start"]), result


def same_bytes(reference: DynamicCache, start: Start) -> bool:
    """Whether what `start` restored is, byte for byte, what `reference` holds."""
    return start.restored > 0 and start.digests == kv_digests(reference, start.restored)


def difference(expected: npt.NDArray[np.float32], got: npt.NDArray[np.float32]) -> float:
    """Largest absolute difference of logits, over all steps and the whole vocabulary."""
    return float(np.abs(expected - got).max())
