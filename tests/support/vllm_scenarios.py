"""Scenarios on a real vLLM: `python vllm_scenarios.py WORK_DIR NAME...` prints a line of JSON for each.

One process runs many, as importing vLLM takes longer than any of them.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

from kvtier.testing.emulated import EmulatedDevice
from kvtier.testing.faults import Fault
from vllm_engine import (
    Engine,
    add_requests,
    finish_requests,
    greedy,
    run_scenarios,
    several_processes,
    step_until,
    with_one_failure,
    with_salts,
)  # fmt: skip
from vllm_models import prompt

PROMPTS = [prompt(number, 700 + 64 * number) for number in range(3)]
SHARED = PROMPTS[0][:512]


def plain(work: Path) -> dict[str, Any]:
    """What the model says without kvtier."""
    with Engine(work / "model") as engine:
        found = engine.generate(PROMPTS)
        found["shared"] = engine.generate(_shared())["tokens"]
        return found


def _shared() -> list[list[int]]:
    return [SHARED + prompt(100 + i, 100) for i in range(16)]


def cold(work: Path) -> dict[str, Any]:
    """An empty store; then from disk, in the same engine."""
    with Engine(work / "model", paths=str(work / "store"), keep_after_reset=True) as engine:
        first = engine.generate(PROMPTS)
        engine.forget()
        second = engine.generate(PROMPTS)
        engine.settle()
        time.sleep(1.1)  # until the store's counters are looked at again
        engine.generate([[7] * 8])
        found = {"first": first, "second": second, "stats": engine.stats(), "metrics": engine.metrics()}
        found["leaks"] = engine.leaks()
        pool = Path(engine.manager.primary_tier._mmap_region.mmap_path)
        assert pool.exists()
    found["threads"] = _threads()
    found["pool"] = pool.exists()
    return found


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvtier")]


def shared(work: Path) -> dict[str, Any]:
    """16 requests at once with a common prefix, from an empty store and then from disk; small pool."""
    with Engine(work / "model", pool=5 << 20, paths=str(work / "shared"), keep_after_reset=True) as engine:
        first = engine.generate(_shared())
        engine.forget()
        second = engine.generate(_shared())
        engine.settle()
        found = {"first": first, "second": second, "shed": engine.tier._shed}
        return {**found, "leaks": engine.leaks()}


def chunks_of_four(work: Path) -> dict[str, Any]:
    """Four blocks per chunk."""
    paths = str(work / "four")
    with Engine(
        work / "model", offload={"blocks_per_chunk": 4}, paths=paths, keep_after_reset=True
    ) as engine:
        first = engine.generate(PROMPTS)
        engine.forget()
        return {"first": first, "second": engine.generate(PROMPTS)}


def preempted(work: Path) -> dict[str, Any]:
    """A KV cache of 78 blocks for eight requests of 14 to 22 blocks, with and without the tier."""
    prompts = [prompt(200 + i, 400 + 32 * i) for i in range(8)]
    small: dict[str, Any] = {"kv_bytes": 78 * 65536}
    with Engine(work / "model", **small) as engine:
        expected = engine.generate(prompts, tokens=72)["tokens"]
    with Engine(work / "model", paths=str(work / "preempted"), keep_after_reset=True, **small) as engine:
        first = engine.generate(prompts, tokens=72)
        engine.forget()
        second = engine.generate(prompts, tokens=72)
        engine.settle()
        found = {"expected": expected, "first": first, "second": second, "leaks": engine.leaks()}
        found["preemptions"] = engine.metrics()["vllm:num_preemptions"]
        return found


def ranks(work: Path) -> dict[str, Any]:
    """An engine of three processes: the scheduler's with the tier, and two tensor-parallel workers."""
    with (
        several_processes(),
        Engine(work / "model", ranks=2, paths=str(work / "ranks"), keep_after_reset=True) as engine,
    ):
        first = engine.generate(PROMPTS)
        for _ in range(3):  # until the last blocks have left the workers
            engine.generate([[5] * 8])
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        return {"first": first, "second": engine.generate(PROMPTS), "metrics": engine.metrics()}


def mixed_attention(work: Path) -> dict[str, Any]:
    """A model whose layers form two KV cache groups."""
    with Engine(work / "gemma") as engine:
        expected = engine.generate(PROMPTS)["tokens"]
    with Engine(work / "gemma", paths=str(work / "mixed"), keep_after_reset=True) as engine:
        first = engine.generate(PROMPTS)
        engine.forget()
        found = {"expected": expected, "first": first, "second": engine.generate(PROMPTS)}
        engine.settle()
        groups = len(engine.tier._offloading_spec.config.groups)
        return {**found, "groups": groups, "leaks": engine.leaks()}


def reset_forgets(work: Path) -> dict[str, Any]:
    """After a reset that may mean new weights, nothing older is used, nor what is stored then left behind."""
    with Engine(work / "model", paths=str(work / "reset")) as engine:
        first = engine.generate(PROMPTS)
        engine.forget()
        second = engine.generate(PROMPTS)
        engine.settle()
        return {"first": first, "second": second, "chunks": engine.stats().get("disk.chunks", 0)}


def salted(work: Path) -> dict[str, Any]:
    """A tenant with a salt, beside one without."""
    with Engine(work / "model", paths=str(work / "salted"), keep_after_reset=True) as engine:
        return with_salts(engine, PROMPTS)


def failing(work: Path) -> dict[str, Any]:
    """The first load fails."""
    with (
        EmulatedDevice(size="64MiB") as device,
        Engine(work / "model", paths=str(device.paths[0]), keep_after_reset=True) as engine,
    ):
        return with_one_failure(engine, device, PROMPTS)


def dying(work: Path) -> dict[str, Any]:
    """The disk goes away while loads are under way."""
    with (
        EmulatedDevice(size="64MiB") as device,
        Engine(
            work / "model", paths=str(device.paths[0]), keep_after_reset=True, close_timeout=5.0
        ) as engine,
    ):
        first = engine.generate(PROMPTS)
        engine.forget()
        device.inject(Fault(op="read", hang=True, file="slab*"))
        add_requests(engine, "dying", PROMPTS)
        step_until(engine, lambda: device.stats()[0].hanging > 0)
        device.clear_faults()
        device.inject(Fault.gone())
        second = finish_requests(engine, "dying", len(PROMPTS))
        third = engine.generate(PROMPTS)
        return {"first": first, "second": {"tokens": second}, "third": third, "leaks": _jobs(engine)}


def hanging(work: Path) -> dict[str, Any]:
    """The disk hangs for good, and its reads are not loans: requests are recomputed at the deadline."""
    with (
        EmulatedDevice(size="64MiB") as device,
        Engine(
            work / "model", paths=str(device.paths[0]), keep_after_reset=True, lend=False, get_timeout=1.0,
            close_timeout=1.0,
        ) as engine,
    ):  # fmt: skip
        first = engine.generate(PROMPTS)
        engine.forget()
        device.inject(Fault(op="read", hang=True, file="slab*"))
        second = engine.generate(PROMPTS)
        device.clear_faults()
        return {"first": first, "second": second}


def aborted(work: Path) -> dict[str, Any]:
    """Requests are aborted while the kernel holds their rows."""
    with (
        EmulatedDevice(size="64MiB") as device,
        Engine(work / "model", paths=str(device.paths[0]), keep_after_reset=True) as engine,
    ):
        first = engine.generate(PROMPTS)
        engine.forget()
        device.inject(Fault(op="read", hang=True, file="slab*"))
        names = add_requests(engine, "aborted", PROMPTS)
        step_until(engine, lambda: device.stats()[0].hanging > 0)
        engine.llm.llm_engine.abort_request(names)
        for _ in range(5):
            engine.llm.llm_engine.step()
        device.clear_faults()
        while engine.llm.llm_engine.has_unfinished_requests():
            engine.llm.llm_engine.step()
        engine.settle()
        leaks = engine.leaks()
        return {"first": first, "leaks": leaks, "second": engine.generate(PROMPTS)}


def restart(work: Path) -> dict[str, Any]:
    """A new process on the store that `cold` has left."""
    with Engine(work / "model", paths=str(work / "store")) as engine:
        return {"first": engine.generate(PROMPTS), "stats": engine.stats()}


def corrupted(work: Path) -> dict[str, Any]:
    """The same, but one page in seventy of the disk has a flipped bit."""
    path = work / "corrupted"
    shutil.copytree(work / "store", path)
    with open(next(path.glob("slab*")), "r+b") as slab:
        for page in range(40, os.fstat(slab.fileno()).st_size // 4096, 70):
            slab.seek(page * 4096)
            byte = slab.read(1)[0]
            slab.seek(page * 4096)
            slab.write(bytes([byte ^ 1]))
    with Engine(work / "model", paths=str(path)) as engine:
        return {"first": engine.generate(PROMPTS), "stats": engine.stats()}


def other_weights(work: Path) -> dict[str, Any]:
    """The same store under a model with the same shape and other weights."""
    with Engine(work / "other model", paths=str(work / "store")) as engine:
        return engine.generate(PROMPTS)


def moved(work: Path) -> dict[str, Any]:
    """The same model in another directory."""
    shutil.copytree(work / "model", work / "moved model")
    with Engine(work / "moved model", paths=str(work / "store")) as engine:
        return engine.generate(PROMPTS)


def _jobs(engine: Engine) -> list[str]:
    """Jobs left when those under way had time to end."""
    end = time.monotonic() + 30
    while engine.manager.has_pending_work() and time.monotonic() < end:
        engine.llm.generate([{"prompt_token_ids": [5] * 8}], greedy(), use_tqdm=False)
    return [f"job {job}" for job in engine.manager._jobs]


if __name__ == "__main__":
    run_scenarios(globals())
