"""What the gates work with."""

from __future__ import annotations

import gc
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvtier.cli.accept.baseline import Baseline
    from kvtier.cli.accept.plan import Plan
    from kvtier.cli.accept.state import State
    from kvtier.cli.accept.target import Target

WORK = "kvtier-accept"
"""What a run makes in the directory that it judges; nothing else there is touched."""


@dataclass(slots=True)
class Context:
    """A run, for its gates."""

    plan: Plan
    directory: Path
    state: State
    open_target: Callable[[], Target]
    """Loads or reaches the model that is asked."""
    say: Callable[[str], None]
    """Told what is going on."""
    baseline: Baseline | None = None
    patience: float = 30.0
    """Seconds without any progress after which a request counts as hung."""
    _target: Target | None = None

    @property
    def work(self) -> Path:
        """The run's own place in the directory."""
        return self.directory / WORK

    def folder(self, name: str) -> Path:
        """An empty directory there, for one step."""
        folder = self.work / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    @property
    def seed(self) -> int:
        """The plan's, and another for every process: a server may know what a stopped one has asked."""
        return self.plan.seed + 1000 * (len(self.state.runs) - 1)

    def target(self) -> Target:
        """The model that is asked, from when a gate first needs it."""
        if self._target is None:
            self.say("loading the model" if self.plan.url is None else "reaching the model")
            # What a stopped process stored would be hits where prefill is measured.
            shutil.rmtree(self.work / "model", ignore_errors=True)
            self._target = self.open_target()
            self.state.put("target", self._target.describe())
        return self._target

    def target_description(self) -> dict[str, Any]:
        """What it says of itself, also if an earlier process asked it."""
        found: dict[str, Any] = self.state.get("target") or {}
        return found

    def release(self) -> None:
        """Let go of the model and its store."""
        if self._target is not None:
            self._target.close()
            self._target = None
        gc.collect()
        shutil.rmtree(self.work / "model", ignore_errors=True)
