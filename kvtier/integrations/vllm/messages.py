"""What the connector's two sides tell each other: plans from the scheduler, reports from the workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvtier.types import KEY_BYTES


@dataclass(slots=True)
class Job:
    """A load or a save of some of a request's tokens."""

    request_id: str
    known: int
    """Chunks of the request whose hashes the workers have already."""
    hashes: list[bytes]
    """Of the chunks behind those, as far as the job reaches: vLLM's hash of each one's last block."""
    start: int
    end: int
    """Tokens, whole blocks."""
    blocks: list[int]
    """vLLM's blocks of the tokens from `start` to `end`."""


@dataclass
class Plan(KVConnectorMetadata):  # type: ignore[misc]
    """What the workers have to do in one step, in this order."""

    era: bytes
    """Part of every key: another one after vLLM has reset its caches."""
    late: list[Job] = field(default_factory=list)
    """Saves of what was computed in steps before, by requests that have ended."""
    ended: list[str] = field(default_factory=list)
    """Requests of which nothing more will be asked."""
    cancelled: list[str] = field(default_factory=list)
    """Requests that do not wait for their load any more."""
    reused: list[int] = field(default_factory=list)
    """Blocks that this step writes to, and that others may have had before."""
    loads: list[Job] = field(default_factory=list)
    saves: list[Job] = field(default_factory=list)
    """Of what is computed by the end of this step."""


@dataclass(slots=True)
class Changes:
    """What has changed in one worker's store since it told last. Keys are packed, 32 bytes each."""

    namespace: bytes
    """Under which it makes keys."""
    added: bytes = b""
    removed: bytes = b""
    failed: bytes = b""
    """Stored, but could not be loaded just now."""
    is_saving: bool = False
    """Whether there is more to come without a new save."""


@dataclass
class Report(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What the workers tell the scheduler after a step."""

    changes: dict[int, Changes] = field(default_factory=dict)
    """By the worker's index, see `Rank`."""
    loads: list[tuple[int, float]] = field(default_factory=list)
    """Tokens and seconds of loads that are over, as `Economy.observe_load` takes them."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Report:
        """Both, of different workers."""
        return Report({**self.changes, **other.changes}, [*self.loads, *other.loads])


@dataclass
class Stored(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What one worker has stored when the engine starts."""

    index: int
    changes: Changes


def unpacked(keys: bytes) -> list[bytes]:
    """The keys that were packed."""
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
