"""A real vLLM engine in this process, with or without kvtier's tier, and a look inside."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

from kvtier.testing.faults import Fault
from vllm_models import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from kvtier.testing.emulated import EmulatedDevice

CAPACITY = 32 << 20


def greedy(tokens: int = 8) -> SamplingParams:
    """As many tokens, the most likely ones."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def _start(model: Path, transfer: KVTransferConfig | None, ranks: int, kv_bytes: int, **more: Any) -> LLM:
    """An engine of a tiny model: chunked prefill of 512 tokens, eight sequences at a time."""
    return LLM(
        model=str(model), dtype="float32", enforce_eager=True, max_model_len=2048, max_num_seqs=8,
        max_num_batched_tokens=512, block_size=BLOCK, kv_cache_memory_bytes=kv_bytes, seed=0,
        enable_prefix_caching=True, skip_tokenizer_init=True, disable_log_stats=False,
        kv_transfer_config=transfer, tensor_parallel_size=ranks, **more,
    )  # fmt: skip


class Engine:
    """A context manager. `tier` are the settings of a `kvtier` tier; without any there is no connector."""

    llm: LLM

    def __init__(
        self,
        model: Path,
        pool: int = 32 << 20,
        ranks: int = 1,
        offload: dict[str, Any] | None = None,
        kv_bytes: int = 64 << 20,
        **tier: Any,
    ) -> None:
        """`pool`: bytes of vLLM's DRAM pool; `ranks`: tensor-parallel workers.

        `offload`: more of the connector's configuration; `kv_bytes`: size of the KV cache.
        """
        transfer = None
        if tier:
            transfer = KVTransferConfig(
                kv_connector="OffloadingConnector",
                kv_role="kv_both",
                kv_connector_extra_config={
                    "spec_name": "CPUTieringSpec",
                    "spec_module_path": "vllm_cpu_spec",
                    "cpu_bytes_to_use": pool,
                    "secondary_tiers": [{"type": "kvtier", "capacity": CAPACITY, **tier}],
                    **(offload or {}),
                },
            )
        self.llm = _start(model, transfer, ranks, kv_bytes)

    @property
    def manager(self) -> Any:
        """vLLM's TieringOffloadingManager."""
        core = self.llm.llm_engine.engine_core.engine_core
        return core.scheduler.connector.connector_scheduler.manager

    @property
    def tier(self) -> Any:
        """The KvtierTier."""
        return self.manager.secondary_tiers[0]

    def stats(self) -> dict[str, Any]:
        """The store's counters and gauges that are not zero."""
        return {name: value for name, value in self.tier._store.stats().items() if value}

    def generate(self, prompts: list[list[int]], salt: str | None = None, tokens: int = 8) -> dict[str, Any]:
        """Greedy tokens, and how many of each prompt's tokens vLLM did not compute."""
        more = {} if salt is None else {"cache_salt": salt}
        inputs = [{"prompt_token_ids": ids, **more} for ids in prompts]
        outputs = self.llm.generate(inputs, greedy(tokens), use_tqdm=False)
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
        }

    def settle(self) -> None:
        """Step until the tier is idle, and have everything on disk."""
        end = time.monotonic() + 60
        while True:
            self.llm.generate([{"prompt_token_ids": [5] * 8}], greedy(), use_tqdm=False)
            if not self.manager.has_pending_work():
                break
            assert time.monotonic() < end, "the tier does not come to rest"
        self.tier._store.flush().result(30)

    def forget(self) -> None:
        """Empty the KV cache and the pool: what is found after it comes from disk."""
        self.settle()
        assert self.llm.reset_prefix_cache(reset_connector=True)

    def metrics(self) -> dict[str, float]:
        """vLLM's counters and gauges, added up over labels."""
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if (value := getattr(metric, "value", None)) is not None:
                found[metric.name] = found.get(metric.name, 0) + value
        return found

    def leaks(self) -> list[str]:
        """What is still held although nothing is going on."""
        return settled(self._held)

    def _held(self) -> list[str]:
        held = [f"{name}={value}" for name, value in self.stats().items() if "pinned" in name and value]
        manager = self.manager
        held += [f"job {job}" for job in manager._jobs]
        # vLLM lets go of the request that ended last at its next step.
        held += [f"request {name}: {state}" for name, state in manager._req_state.items()][1:]
        primary = manager.primary_tier
        held += [
            f"row of {key.hex()} with ref_cnt {chunk.ref_cnt}"
            for key, chunk in getattr(primary._policy, "blocks", {}).items()
            if chunk.ref_cnt
        ]
        return held

    def close(self) -> None:
        """Shut the engine down, as vLLM does at its end."""
        self.llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ConnectorEngine(Engine):
    """The same with `KvtierConnector`; `settings` are its own."""

    def __init__(
        self, model: Path, ranks: int = 1, kv_bytes: int = 64 << 20, more: Any = None, **settings: Any
    ) -> None:
        """`more`: of vLLM's own arguments."""
        transfer = KVTransferConfig(
            kv_connector="KvtierConnector", kv_role="kv_both", kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "capacity": CAPACITY, "chunk_tokens": BLOCK, "recompute_if_faster": False, **settings,
            },
        )  # fmt: skip
        self.llm = _start(model, transfer, ranks, kv_bytes, **(more or {}))

    @property
    def scheduler(self) -> Any:
        """The connector's scheduler side."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler

    @property
    def worker(self) -> Any:
        """The connector's worker side."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker

    @property
    def store(self) -> Any:
        """The worker's store."""
        return self.worker.connector._store

    def stats(self) -> dict[str, Any]:
        """Counters and gauges of store and connector that are not zero."""
        numbers = {**self.store.stats(), **self.worker.connector.stats()}
        return {name: value for name, value in numbers.items() if value}

    def unfinished(self) -> list[str]:
        """Requests that vLLM's scheduler still has, also those that it only waits for the connector with."""
        return list(self.llm.llm_engine.engine_core.engine_core.scheduler.requests)

    def rest(self) -> None:
        """Wait until no transfer is under way, and step once more."""
        end = time.monotonic() + 60
        while self.worker.connector.stats()["active"]:
            assert time.monotonic() < end, "the connector does not come to rest"
            time.sleep(0.005)
        self.llm.generate([{"prompt_token_ids": [5] * 8}], greedy(), use_tqdm=False)

    def settle(self) -> None:
        """Rest with everything on disk, and the scheduler knowing of it."""
        self.rest()
        self.store.flush().result(30)
        self.rest()

    def forget(self) -> None:
        """Empty the KV cache: what is found after it comes from the store."""
        self.settle()
        assert self.llm.reset_prefix_cache()

    def leaks(self) -> list[str]:
        """What is still held although nothing is going on."""
        return settled(self._held)

    def _held(self) -> list[str]:
        held = [f"{name}={value}" for name, value in self.stats().items() if "pinned" in name]
        worker, scheduler = self.worker, self.scheduler
        # vLLM tells the worker that a request has ended at its next step.
        held += [f"request {name}" for name in worker._requests][1:]
        held += [f"load {name}" for name in worker._loads]
        held += [f"tracked {name}" for name in scheduler._tracked]
        held += [f"{number} transfers" for number in [worker.connector.stats()["active"]] if number]
        held += [f"vLLM has {name}" for name in self.unfinished()]
        return held


def settled(held: Callable[[], list[str]]) -> list[str]:
    """What stays held: a device that hung has a while to answer what it was asked then."""
    end = time.monotonic() + 20
    while (found := held()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def with_salts(engine: Engine, prompts: list[list[int]]) -> dict[str, Any]:
    """What is said, and found in the cache, without a salt, with one twice, and with another."""
    found = {"open": engine.generate(prompts)}
    for name, salt in (("mine", "tenant"), ("again", "tenant"), ("other", "someone else")):
        engine.forget()
        found[name] = engine.generate(prompts, salt)
    return found


def with_one_failure(engine: Engine, device: EmulatedDevice, prompts: list[list[int]]) -> dict[str, Any]:
    """The same from an empty store, while the first read from it fails, and after that."""
    first = engine.generate(prompts)
    engine.forget()
    fault = device.inject(Fault(op="read", errno=5, count=1, file="slab*"))
    second = engine.generate(prompts)
    hits = fault.hits
    engine.forget()
    third = engine.generate(prompts)
    engine.settle()
    return {"first": first, "second": second, "third": third, "struck": hits, "leaks": engine.leaks()}


@contextlib.contextmanager
def several_processes() -> Iterator[None]:
    """Engines that are started inside are processes of their own, and so are their workers."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CPU_OMP_THREADS_BIND="0|1")
    before = set(Path("/dev/shm").glob("vllm_dist_*"))
    try:
        yield
    finally:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        del os.environ["VLLM_CPU_OMP_THREADS_BIND"]
        for left in set(Path("/dev/shm").glob("vllm_dist_*")) - before:  # vLLM's workers leave it there
            left.unlink(missing_ok=True)


def add_requests(engine: Engine, name: str, prompts: list[list[int]], tokens: int = 8) -> list[str]:
    """Add requests without a step; their names."""
    names = [f"{name}-{i}" for i in range(len(prompts))]
    for request, ids in zip(names, prompts, strict=True):
        engine.llm.llm_engine.add_request(request, {"prompt_token_ids": ids}, greedy(tokens))
    return names


def step_until(engine: Engine, condition: Callable[[], bool]) -> None:
    """Step until it holds."""
    end = time.monotonic() + 30
    while not condition():
        engine.llm.llm_engine.step()
        assert time.monotonic() < end, "that does not come about"


def finish_requests(engine: Engine, name: str, count: int) -> list[list[int]]:
    """Step until these requests have ended; their tokens."""
    tokens: dict[str, list[int]] = {}
    end = time.monotonic() + 60
    while len(tokens) < count:
        for output in engine.llm.llm_engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        assert time.monotonic() < end, "the requests do not end"
    return [tokens[f"{name}-{i}"] for i in range(count)]


def run_scenarios(scenarios: dict[str, Any]) -> None:
    """Main program of a file of them: `WORK_DIR NAME...`, a line of JSON for each. Does not return."""
    work = Path(sys.argv[1])
    for name in sys.argv[2:]:
        start = time.monotonic()
        try:
            found = {"scenario": name, **scenarios[name](work)}
        except BaseException:
            found = {"scenario": name, "error": traceback.format_exc()}
        found["seconds"] = round(time.monotonic() - start, 1)
        print("RESULT " + json.dumps(found), flush=True)
    os._exit(0)  # vLLM's threads may keep the interpreter
