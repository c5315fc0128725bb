"""Scenarios of `KvtierConnector` on a real vLLM: `python vllm_connector_scenarios.py WORK_DIR NAME...`.

As `vllm_scenarios`, whose file this one does not share as its engines keep KV in other places.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from typing import TYPE_CHECKING, Any

from kvtier.testing.emulated import EmulatedDevice
from kvtier.testing.faults import Fault
from kvtier.testing.profiles import DeviceProfile
from vllm_engine import (
    ConnectorEngine,
    Engine,
    add_requests,
    finish_requests,
    run_scenarios,
    several_processes,
    step_until,
    with_one_failure,
    with_salts,
)  # fmt: skip
from vllm_models import prompt

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = [prompt(number, 700 + 64 * number) for number in range(3)]
SHARED = [PROMPTS[0][:512] + prompt(100 + i, 100) for i in range(16)]
FORKED = [*(PROMPTS[0][:600] + prompt(300 + i, 200) for i in range(2)), PROMPTS[0][:512]]
"""Two prompts that differ from token 600 on, and one of whole chunks, the head of both."""
MANY = [prompt(200 + i, 400 + 32 * i) for i in range(8)]
MIXED = [prompt(400 + i % 3, 200 + 64 * (i % 4)) + prompt(500 + i, 30 + 11 * i) for i in range(24)]
"""Prompts that share their first 200 tokens or more with others."""
FEW_BLOCKS: dict[str, Any] = {"kv_bytes": 78 * 65536}
"""A KV cache for three or four of these, which take 14 to 22 blocks each."""


def plain(work: Path) -> dict[str, Any]:
    """What the models say without kvtier."""
    with Engine(work / "model") as engine:
        found = engine.generate(PROMPTS)
        found["shared"] = engine.generate(SHARED)["tokens"]
        found["forked"] = engine.generate(FORKED)["tokens"]
    with Engine(work / "model", **FEW_BLOCKS) as engine:
        found["many"] = engine.generate(MANY, tokens=72)["tokens"]
        found["mixed"] = engine.generate(MIXED, tokens=24)["tokens"]
    with Engine(work / "gemma") as engine:
        found["windows"] = engine.generate(PROMPTS)["tokens"]
    return found


def cold(work: Path) -> dict[str, Any]:
    """An empty store; then from DRAM, in the same engine."""
    with ConnectorEngine(work / "model", paths=str(work / "store")) as engine:
        first = engine.generate(PROMPTS)
        engine.forget()
        second = engine.generate(PROMPTS)
        engine.settle()
        time.sleep(1.1)  # until the store's counters are looked at again
        engine.settle()
        found = {"first": first, "second": second, "stats": engine.stats(), "metrics": engine.metrics()}
        found["leaks"] = engine.leaks()
    threads = threading.enumerate()
    found["threads"] = [thread.name for thread in threads if thread.name.startswith("kvtier")]
    return found


def default_chunks(work: Path) -> dict[str, Any]:
    """Chunks of eight blocks. What one prompt shares with another ends in the middle of one."""
    with ConnectorEngine(work / "model", paths=str(work / "eight"), chunk_tokens=256, dram=0) as engine:
        first = engine.generate(FORKED[:1])
        local = engine.generate(FORKED[1:2])  # 576 tokens of it are in vLLM's own cache
        engine.forget()
        second = engine.generate(FORKED[:2])
        found = {"first": first, "local": local, "second": second}
        # Whole chunks, the last token of which has to be computed.
        engine.forget()
        found["whole"] = engine.generate(FORKED[2:])
        engine.settle()
        found["leaks"] = engine.leaks()
    return found


def shared(work: Path) -> dict[str, Any]:
    """16 requests at once with a common prefix, from an empty store and then from disk."""
    with ConnectorEngine(work / "model", paths=str(work / "shared"), dram=0) as engine:
        first = engine.generate(SHARED)
        engine.forget()
        second = engine.generate(SHARED)
        engine.settle()
        return {"first": first, "second": second, "stats": engine.stats(), "leaks": engine.leaks()}


def preempted(work: Path) -> dict[str, Any]:
    """A KV cache that is too small for all that run; what was generated is stored too."""
    with ConnectorEngine(work / "model", paths=str(work / "preempted"), **FEW_BLOCKS) as engine:
        first = engine.generate(MANY, tokens=72)
        engine.forget()
        second = engine.generate(MANY, tokens=72)
        engine.settle()
        found = {"first": first, "second": second, "leaks": engine.leaks()}
        found["preemptions"] = engine.metrics()["vllm:num_preemptions"]
        return found


def windows(work: Path) -> dict[str, Any]:
    """A model with sliding windows, which vLLM keeps in one group for a connector like this."""
    with ConnectorEngine(work / "gemma", paths=str(work / "windows")) as engine:
        first = engine.generate(PROMPTS)
        engine.forget()
        found = {"first": first, "second": engine.generate(PROMPTS)}
        engine.settle()
        return {**found, "leaks": engine.leaks()}


def reset(work: Path) -> dict[str, Any]:
    """After a reset that may mean new weights, nothing older is used, nor what follows after the end."""
    with ConnectorEngine(work / "model", paths=str(work / "reset")) as engine:
        found = {"first": engine.generate(PROMPTS)}
        engine.settle()
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        found["second"] = engine.generate(PROMPTS)
        engine.forget()
        found["third"] = engine.generate(PROMPTS)
        engine.settle()
        found["leaks"] = engine.leaks()
    with ConnectorEngine(work / "model", paths=str(work / "reset"), keep_after_reset=True) as engine:
        found["restarted"] = engine.generate(PROMPTS[:1])
        engine.settle()
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        found["kept"] = engine.generate(PROMPTS[:1])
    return found


def salted(work: Path) -> dict[str, Any]:
    """A tenant with a salt, beside one without."""
    with ConnectorEngine(work / "model", paths=str(work / "salted")) as engine:
        return with_salts(engine, PROMPTS)


def failing(work: Path) -> dict[str, Any]:
    """The first load fails."""
    with (
        EmulatedDevice(size="64MiB") as device,
        ConnectorEngine(work / "model", paths=str(device.paths[0]), dram=0) as engine,
    ):
        return with_one_failure(engine, device, PROMPTS)


def dying(work: Path) -> dict[str, Any]:
    """The disk goes away while loads are under way, and saves go on."""
    with (
        EmulatedDevice(size="64MiB") as device,
        ConnectorEngine(
            work / "model", paths=str(device.paths[0]), dram=0, close_timeout=5.0, put_timeout=5.0
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
        assert engine.llm.reset_prefix_cache()
        third = engine.generate(PROMPTS)
        fourth = engine.generate(SHARED[:2])["tokens"]
        engine.rest()
        leaks = engine.leaks()
        return {"first": first, "second": second, "third": third, "fourth": fourth, "leaks": leaks}


def hanging(work: Path) -> dict[str, Any]:
    """The disk hangs for good: requests are computed at the deadline."""
    settings: dict[str, Any] = {"dram": 0, "get_timeout": 1.0, "close_timeout": 1.0, "put_timeout": 1.0}
    with (
        EmulatedDevice(size="64MiB") as device,
        ConnectorEngine(work / "model", paths=str(device.paths[0]), **settings) as engine,
    ):
        first = engine.generate(PROMPTS)
        engine.forget()
        device.inject(Fault(op="read", hang=True, file="slab*"))
        second = engine.generate(PROMPTS)
        device.clear_faults()
        engine.rest()
        return {"first": first, "second": second, "leaks": engine.leaks()}


def aborted(work: Path) -> dict[str, Any]:
    """Requests are aborted in the middle of their load, while the disk hangs, and of their computation."""
    with (
        EmulatedDevice(size="64MiB") as device,
        ConnectorEngine(work / "model", paths=str(device.paths[0]), dram=0) as engine,
    ):
        first = engine.generate(PROMPTS)
        engine.forget()
        device.inject(Fault(op="read", hang=True, file="slab*"))
        names = add_requests(engine, "loading", PROMPTS)
        step_until(engine, lambda: device.stats()[0].hanging > 0)
        engine.llm.llm_engine.abort_request(names)
        end = time.monotonic() + 30
        while engine.unfinished():  # while the disk hangs
            engine.llm.llm_engine.step()
            assert time.monotonic() < end, "the aborted requests do not end"
        device.clear_faults()
        computing = add_requests(engine, "computing", MANY)
        for _ in range(3):
            engine.llm.llm_engine.step()
        engine.llm.llm_engine.abort_request(computing)
        engine.rest()
        engine.settle()
        leaks = engine.leaks()
        return {"first": first, "leaks": leaks, "second": engine.generate(PROMPTS)}


def slow(work: Path) -> dict[str, Any]:
    """A disk that is slower than the model: after one load, it computes."""
    profile = DeviceProfile(name="slow", read_bandwidth=200_000)
    settings: dict[str, Any] = {"dram": 0, "recompute_if_faster": True}
    with (
        EmulatedDevice(profile, size="64MiB") as device,
        ConnectorEngine(work / "model", paths=str(device.paths[0]), **settings) as engine,
    ):
        found = [engine.generate(PROMPTS[:1])]
        for _ in range(2):
            engine.forget()
            found.append(engine.generate(PROMPTS[:1]))
        time.sleep(1.1)
        engine.settle()
        decisions = engine.scheduler._economy.stats()
        return {"found": found, "decisions": decisions, "metrics": engine.metrics(), "leaks": engine.leaks()}


def mixed(work: Path) -> dict[str, Any]:
    """All at once: a small KV cache and a small store, requests that are aborted, and reads that fail."""
    chance = random.Random(1)
    settings: dict[str, Any] = {"dram": "1MiB", "capacity": "8MiB", "landing": "2MiB", "chunk_tokens": 64}
    tokens: list[dict[str, list[int]]] = []
    with (
        EmulatedDevice(size="64MiB") as device,
        ConnectorEngine(work / "model", paths=str(device.paths[0]), **settings, **FEW_BLOCKS) as engine,
    ):
        for wave in range(4):
            device.inject(Fault(op="read", errno=5, probability=0.1, file="slab*"))
            names = add_requests(engine, f"wave {wave}", MIXED, tokens=24)
            ended: dict[str, list[int]] = {}
            steps = 0
            while engine.unfinished():
                outputs = engine.llm.llm_engine.step()
                steps += 1
                # Few steps but the first have outputs while loads go on, and of empty ones there may be many.
                if steps in (1, 2, 4) or (outputs and chance.random() < 0.05):
                    engine.llm.llm_engine.abort_request([chance.choice(names)])
                for output in outputs:
                    if output.finished and output.outputs[0].finish_reason != "abort":
                        ended[output.request_id] = list(output.outputs[0].token_ids)
            tokens.append({str(names.index(name)): ids for name, ids in ended.items()})
            device.clear_faults()
            engine.forget()
        engine.settle()
        return {"waves": tokens, "stats": engine.stats(), "leaks": engine.leaks()}


def full(work: Path) -> dict[str, Any]:
    """A store that holds one prompt and a half, in DRAM and on disk."""
    settings: dict[str, Any] = {"capacity": "3MiB", "dram": "1MiB", "landing": "2MiB"}
    with ConnectorEngine(work / "model", paths=str(work / "full"), **settings) as engine:
        found = [engine.generate(PROMPTS)]
        for _ in range(2):
            engine.forget()
            found.append(engine.generate(PROMPTS))
        engine.settle()
        return {"found": found, "stats": engine.stats(), "leaks": engine.leaks()}


def restart(work: Path) -> dict[str, Any]:
    """A new process on the store that `cold` has left: the first request of all is loaded from disk."""
    with ConnectorEngine(work / "model", paths=str(work / "store")) as engine:
        first = [engine.generate([ids]) for ids in PROMPTS]
        return {"first": first, "stats": engine.stats()}


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
    with ConnectorEngine(work / "model", paths=str(path)) as engine:
        first = engine.generate(PROMPTS)
        engine.settle()
        return {"first": first, "stats": engine.stats(), "leaks": engine.leaks()}


def other_weights(work: Path) -> dict[str, Any]:
    """The same store under a model with the same shape and other weights."""
    with ConnectorEngine(work / "other model", paths=str(work / "store")) as engine:
        return engine.generate(PROMPTS)


def processes(work: Path) -> dict[str, Any]:
    """The same store in an engine that is a process of its own."""
    with several_processes(), ConnectorEngine(work / "model", paths=str(work / "store")) as engine:
        return {"first": engine.generate(PROMPTS), "metrics": engine.metrics()}


def ranks(work: Path) -> dict[str, Any]:
    """Two engines, one after the other, of three processes each: the scheduler's and two workers."""
    found: dict[str, Any] = {}
    with several_processes():
        for life in ("first", "second"):
            with ConnectorEngine(work / "model", ranks=2, paths=str(work / "ranks")) as engine:
                found[life] = engine.generate(PROMPTS[:1])
                time.sleep(1.0)  # the workers tell what they have stored, without another request
                assert engine.llm.reset_prefix_cache()
                found[f"{life} again"] = engine.generate(PROMPTS)
                found[f"{life} metrics"] = engine.metrics()
    found["directories"] = sorted(path.name for path in (work / "ranks").iterdir())
    return found


if __name__ == "__main__":
    run_scenarios(globals())
