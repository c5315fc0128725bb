"""The model that is asked, in this process or served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtier.cli.bench.recovery.client import Prompt
    from kvtier.cli.bench.recovery.counters import DeviceReads
    from kvtier.cli.bench.recovery.wave import Wave


class Target(Protocol):
    """Something that answers prompts, keeps their KV, and can lose its memory."""

    vocabulary: int
    """Token ids are below this."""

    @property
    def reads(self) -> DeviceReads:
        """What the devices below its cache delivered."""

    def describe(self) -> dict[str, Any]:
        """What it is: model, precision, bytes of KV per token where that is known."""

    def ask(self, prompts: Mapping[int, Prompt], *, on_answer: Callable[[], object]) -> Wave:
        """All at once; what is computed is stored."""

    def forget(self) -> str:
        """Lose everything but what is on disk, page cache included; says how."""

    def close(self) -> None:
        """Let go of it."""
