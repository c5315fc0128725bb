"""A model behind an OpenAI-compatible endpoint, whose cache is in the directory that is judged."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvtier.cli.bench.recovery.client import Endpoint
from kvtier.cli.bench.recovery.counters import DeviceReads, drop_page_cache
from kvtier.cli.bench.recovery.sessions import make_prompts
from kvtier.cli.bench.recovery.wave import run_wave

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from kvtier.cli.accept.plan import Plan
    from kvtier.cli.bench.recovery.clearing import Clearing
    from kvtier.cli.bench.recovery.client import Prompt
    from kvtier.cli.bench.recovery.wave import Wave

_READY_TIMEOUT = 600.0
_PROBE_TOKENS = 16


class RemoteModel:
    """The endpoint of a plan. Raises EndpointError unless it answers."""

    def __init__(self, plan: Plan, clearing: Clearing, directory: Path) -> None:
        assert plan.url is not None
        assert plan.model is not None
        self._plan, self._clearing, self._directory = plan, clearing, directory
        self.vocabulary = plan.vocabulary
        self._endpoint = Endpoint(plan.url, plan.model, api=plan.api)
        self._endpoint.check_model()
        self._warm_up = make_prompts(
            1, _PROBE_TOKENS, plan.prompt, vocabulary=plan.vocabulary, seed=plan.seed + 2
        )[0]
        self._endpoint.probe(self._warm_up)
        self.reads = DeviceReads([directory])

    def describe(self) -> dict[str, Any]:
        """The model's name, where it is, and what it may be asked beyond the standard."""
        return {
            "model": self._plan.model,
            "precision": "the server's own",
            "url": self._plan.url,
            "api": self._plan.api,
            "extensions": sorted(self._endpoint.extensions),
        }

    def ask(self, prompts: Mapping[int, Prompt], *, on_answer: Callable[[], object]) -> Wave:
        """All at once, each on a connection of its own."""
        return run_wave(self._endpoint, prompts, self._plan.output_tokens, on_answer)

    def forget(self) -> str:
        """Have it restarted or cleared, as was asked for, and the page cache dropped."""
        time.sleep(self._plan.settle)
        done = self._clearing.clear(self._endpoint, _READY_TIMEOUT)
        dropped = drop_page_cache([self._directory])
        self._endpoint.probe(self._warm_up)
        return f"{done}; {dropped}"

    def close(self) -> None:
        """Nothing is held."""
