"""`vllm serve` as a process, in each configuration that `vllm_cold_recovery.py` compares, and its models."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import tomllib
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvtier.cli._demo.model import find_model
from kvtier.cli.bench.recovery.client import Endpoint, EndpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

ROOT = Path(__file__).resolve().parents[1]
NAME = "model"
"""What every server calls its model."""
CONFIGURATIONS = ("recompute", "fs", "lmcache", "kvtier-tier", "kvtier-connector")
STORING = CONFIGURATIONS[1:]
TIERS = ("fs", "kvtier-tier")
"""vLLM gives each of its tiers every chunk, so that one run stores for all."""
_START_S, _STOP_S = 300.0, 90.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a server needs room for, in bytes; `context` in tokens."""

    kv: int
    """vLLM's KV cache: all sessions of a trial."""
    pool: int
    """vLLM's DRAM pool, or LMCache's, above a tier: the largest wave."""
    capacity: int
    """On disk."""
    context: int
    block: int = 128


@dataclass(slots=True)
class Server:
    """A context manager: a vLLM of its own process group, ready when it is entered, ended when left."""

    python: Path
    model: Path
    stores: dict[str, Path]
    """Its configuration, with its directory; several of vLLM's tiers may be had at once."""
    sizes: Sizes
    scratch: Path
    """Where its log is written; kept."""
    dtype: str = "bfloat16"
    connector_settings: dict[str, Any] = field(default_factory=dict)
    nice: int | None = None
    endpoint: Endpoint = field(init=False)
    _process: subprocess.Popen[bytes] = field(init=False)
    _log: Path = field(init=False)
    _engine: str = field(init=False)

    def __enter__(self) -> Self:
        for store in self.stores.values():
            store.mkdir(parents=True, exist_ok=True)
        port = _free_port()
        self._engine = f"cold-recovery-{uuid.uuid4()}"
        self._log = self.scratch / f"{'+'.join(self.stores)}.log"
        transfer = transfer_config(self.stores, self.sizes, self.connector_settings)
        if transfer is not None:
            transfer["engine_id"] = self._engine
        command = [
            str(self.python), "-m", "vllm.entrypoints.cli.main", "serve", str(self.model),
            "--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port),
            "--dtype", self.dtype, "--enforce-eager",
            "--max-model-len", str(self.sizes.context), "--block-size", str(self.sizes.block),
            "--kv-cache-memory-bytes", str(self.sizes.kv), "--enable-prompt-tokens-details",
            "--enable-prefix-caching", *(["--kv-transfer-config", json.dumps(transfer)] if transfer else []),
        ]  # fmt: skip
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=self._environment(), cwd=self.scratch, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.endpoint = Endpoint(f"http://127.0.0.1:{port}", NAME)
        try:
            if self.nice is not None:
                self._set_priority(self.nice)
            self._wait()
        except BaseException:
            self._end(0.0)
            raise
        return self

    def _set_priority(self, nice: int) -> None:
        os.setpriority(os.PRIO_PGRP, self._process.pid, nice)
        with contextlib.suppress(OSError):  # where sessions are scheduled as groups, that alone does nothing
            Path(f"/proc/{self._process.pid}/autogroup").write_text(f"{nice}\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(_STOP_S)

    def _environment(self) -> dict[str, str]:
        paths = [
            site(self.scratch, self.python),
            ROOT,
            ROOT / "tests/support",
            os.environ.get("PYTHONPATH", ""),
        ]
        given = {
            "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
            "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        }  # fmt: skip
        if "lmcache" in self.stores:
            given |= {
                "LMCACHE_LOCAL_CPU": "True",
                "LMCACHE_MAX_LOCAL_CPU_SIZE": str(self.sizes.pool / 2**30),
                "LMCACHE_LOCAL_DISK": f"file://{self.stores['lmcache']}",
                "LMCACHE_CHUNK_SIZE": str(self.sizes.block),
                "LMCACHE_MAX_LOCAL_DISK_SIZE": str(self.sizes.capacity / 2**30), "PYTHONHASHSEED": "0",
            }  # fmt: skip
        return {**os.environ, **given}

    def _wait(self) -> None:
        end = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(EndpointError):
                self.endpoint.check_model()
                break
            if self._process.poll() is not None or time.monotonic() > end:
                raise EndpointError(f"vLLM does not start as {', '.join(self.stores)}: {self._last_error()}")
            time.sleep(0.5)
        if "lmcache" in self.stores and "initialization failure" in self._log.read_text(errors="replace"):
            raise EndpointError(f"LMCache does not start, so vLLM goes on without it: {self._last_error()}")

    def _last_error(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        errors = [
            line for line in lines if re.search(r"\w(Error|Exception): ", line) and "WARNING" not in line
        ]
        said = (errors or lines[-1:] or ["it said nothing"])[0].strip()[-300:]
        return f"{said} (all of it: {self._log})"

    def _end(self, patience: float) -> None:
        """Ask it to end, so that what it holds gets to disk; then kill its whole group."""
        self._process.send_signal(signal.SIGTERM)
        end = time.monotonic() + patience
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < end:  # its engine goes on for a while
                os.killpg(self._process.pid, 0)
                time.sleep(0.1)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        # A pool in memory that outlives its engine, if that was killed.
        for pool in Path("/dev/shm").glob(f"vllm_offload_{self._engine}*"):
            pool.unlink(missing_ok=True)


def transfer_config(
    stores: dict[str, Path], sizes: Sizes, connector_settings: dict[str, Any]
) -> dict[str, Any] | None:
    """vLLM's --kv-transfer-config for a configuration, or several tiers; None for no connector."""
    common = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    if "recompute" in stores:
        return None
    if "lmcache" in stores:
        return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    if "kvtier-connector" in stores:
        extra = {"paths": str(stores["kvtier-connector"]), "capacity": sizes.capacity, **connector_settings}
        return {"kv_connector": "KvtierConnector", "kv_connector_extra_config": extra, **common}
    tiers = {
        "fs": lambda store: {"type": "fs", "root_dir": store},
        "kvtier-tier": lambda store: {"type": "kvtier", "paths": store, "capacity": sizes.capacity},
    }
    return {
        "kv_connector": "OffloadingConnector",
        **common,
        "kv_connector_extra_config": {
            # vLLM's own spec refuses the CPU platform; this one differs in the copies to the KV cache alone.
            "spec_name": "CPUTieringSpec",
            "spec_module_path": "vllm_cpu_spec",
            "cpu_bytes_to_use": sizes.pool,
            "secondary_tiers": [tiers[name](str(store)) for name, store in stores.items()],
        },
    }


def obstacles(python: Path, configurations: Sequence[str]) -> dict[str, str]:
    """Why each of some configurations cannot be had in that environment."""
    modules = {"lmcache": "lmcache", "kvtier-connector": "kvtier.integrations.vllm.connector"}
    wanted = {name: modules.get(name, "vllm") for name in configurations}
    code = (
        f"import importlib.util, json; print(json.dumps([n for n in {sorted(set(wanted.values()))!r} if "
        + ("importlib.util.find_spec(n) is None]))")
    )
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    tried = subprocess.run([python, "-c", code], env=env, capture_output=True, text=True, check=True)
    missing = json.loads(tried.stdout)
    return {name: f"{python} has no module {module}" for name, module in wanted.items() if module in missing}


def site(scratch: Path, python: Path) -> Path:
    """A directory that makes kvtier's entry points known without an install, and vLLM's name, too.

    `vllm serve` looks up the version of a package `vllm`, but the build for CPUs is called `vllm-cpu`.
    """
    path = scratch / "site"
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [
        line
        for group, entries in points.items()
        for line in (f"[{group}]", *(f"{name} = {target}" for name, target in entries.items()))
    ]
    _metadata(path, "kvtier", "0", "\n".join(lines) + "\n")
    code = (
        "from importlib.metadata import distributions as d\n"
        "v = {x.name: x.version for x in d()}\n"
        "print('' if 'vllm' in v else v.get('vllm-cpu', ''))"
    )
    version = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    if version:
        _metadata(path, "vllm", f"{version}+cpu", "")
    return path


def _metadata(path: Path, name: str, version: str, entry_points: str) -> None:
    info = path / f"{name}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def prepare_model(name: str, work: Path, python: Path, say: Callable[[str], None]) -> Path:
    """Directory of a model that vLLM loads: SmolLM2-135M, a random one with more KV per token, or a path."""
    if name == "smollm2":
        return find_model(None, say)
    if name != "random":
        return find_model(Path(name), say)
    path = work / "random-model"
    if not (path / "config.json").exists():
        say("making a model with random weights (once)")
        subprocess.run([python, "-c", _RANDOM, str(path)], check=True)
        for file in find_model(None, say).glob("tokenizer*"):  # vLLM wants one, and nobody uses it
            shutil.copy(file, path)
    return path


def kv_bytes_per_token(model: Path, dtype: str) -> int:
    """Bytes of keys and values of a token, by the model's configuration."""
    config = json.loads((model / "config.json").read_text())
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * heads * width * (4 if dtype == "float32" else 2))


_RANDOM = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=49152, hidden_size=512, intermediate_size=1024, num_hidden_layers=16, num_attention_heads=16,
    num_key_value_heads=16, head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True,
    bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.1)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
"""
