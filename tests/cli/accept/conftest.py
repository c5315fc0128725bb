"""Whole runs on two emulated devices, a fast and a slow one, with a tiny model whose KV is large."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.cli import app
from kvtier.errors import TierUnavailable
from kvtier.testing.emulated import EmulatedDevice
from kvtier.testing.profiles import DeviceProfile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MB, MIB = 1_000_000, 1 << 20
SLOW = DeviceProfile(name="slow", read_bandwidth=15 * MB, write_bandwidth=300 * MB)
FAST = DeviceProfile(name="fast", read_bandwidth=400 * MB, write_bandwidth=300 * MB)
CAPACITY = 600 * MIB
SECONDS = 5
# Two threads that wait for each other come to nothing on a loaded machine, nor does memory to populate.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "KVTIER_LANDING": "4MiB"}
# What a loaded machine decides, not the device, is let be.
SMALL = {
    "capacity": "600MiB", "health": "8MiB", "gib": 0.004, "chunk-mib": 0.5, "rounds": 1,
    "mixed-seconds": 0.2, "tokens": 128, "output-tokens": 2, "concurrency": [2], "hours": SECONDS / 3600,
    "remeasure-minutes": 0.1, "max-drop": 100, "baseline-tolerance": 0.95, "max-read-p99-ms": 1e6,
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A run that is over, or was stopped."""

    code: int
    folder: Path

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "report.json").read_text())
        return found

    @property
    def outcomes(self) -> list[str]:
        return [gate["outcome"] for gate in self.report["gates"]]

    def failing(self, gate: int) -> set[str]:
        """Names of the values of gate G`gate` that are beyond their limits."""
        return {check["name"] for check in self.report["gates"][gate - 1]["checks"] if check["ok"] is False}

    def without(self, gate: str, folder: Path, **config: Any) -> Path:
        """A copy of the report in `folder`, as if the run had been stopped before that gate, with other
        settings if they are given.
        """
        folder.mkdir()
        state = json.loads((self.folder / "state.json").read_text())
        state["steps"] = {name: value for name, value in state["steps"].items() if not name.startswith(gate)}
        state["config"] |= config
        (folder / "state.json").write_text(json.dumps(state))
        return folder


def arguments(device: EmulatedDevice, folder: Path, model: Path, **options: Any) -> list[str]:
    """What to type."""
    found = ["accept", str(device.paths[0]), "--report", str(folder), "--model", str(model), "--short"]
    for name, value in {**SMALL, **{key.replace("_", "-"): value for key, value in options.items()}}.items():
        for one in value if isinstance(value, list) else [value]:
            found += [f"--{name}"] if one is True else [f"--{name}", str(one)]
    return found


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 KB of KV a token, for next to no work."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from hf_models import tiny

    folder = tmp_path_factory.mktemp("model")
    tiny(num_hidden_layers=8, num_key_value_heads=8, head_dim=128, hidden_size=64).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def accept(model: Path) -> Callable[..., Run]:
    """`accept(device, folder, **options)`."""
    import torch

    def run(device: EmulatedDevice, folder: Path, **options: Any) -> Run:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("KVTIER_LANDING", ENVIRONMENT["KVTIER_LANDING"])
                with pytest.raises(SystemExit) as ended:
                    app(arguments(device, folder, model, **options))
        finally:
            torch.set_num_threads(threads)
        assert isinstance(ended.value.code, int)
        return Run(ended.value.code, folder)

    return run


@pytest.fixture(scope="session")
def mount() -> Iterator[Callable[..., EmulatedDevice]]:
    """`mount(profile)`: a device, with room for the capacity and a little more."""
    made: list[EmulatedDevice] = []

    def make(profile: DeviceProfile, size: int = CAPACITY + 100 * MIB) -> EmulatedDevice:
        try:
            made.append(EmulatedDevice(profile, size=size))
        except TierUnavailable as error:
            pytest.skip(str(error))
        return made[-1]

    yield make
    for device in made:
        device.close()


@pytest.fixture(scope="session")
def slow_run(accept: Callable[..., Run], mount: Callable[..., EmulatedDevice], tmp_path_factory: Any) -> Run:
    """The slower device, against prefill and a limit that nothing reaches: it is not worth a soak."""
    found = accept(mount(SLOW), tmp_path_factory.mktemp("slow"), name="slow", ttft_lower=101)
    assert found.outcomes == ["passed", "passed", "failed", "not run"]
    return found


@pytest.fixture(scope="session")
def fast_device(mount: Callable[..., EmulatedDevice]) -> EmulatedDevice:
    return mount(FAST)


@pytest.fixture(scope="session")
def fast_run(
    accept: Callable[..., Run], slow_run: Run, fast_device: EmulatedDevice, tmp_path_factory: Any
) -> Run:
    """The faster device, against the slower one."""
    baseline = slow_run.folder / "report.json"
    return accept(fast_device, tmp_path_factory.mktemp("fast"), name="fast", baseline=baseline)


@pytest.fixture
def fast(fast_device: EmulatedDevice) -> Iterator[EmulatedDevice]:
    """The faster device, without faults, and empty again afterwards."""
    yield fast_device
    fast_device.clear_faults()
    for path in fast_device.paths[0].iterdir():
        shutil.rmtree(path)
