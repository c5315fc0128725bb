"""vLLM's jobs between its rows and the store, from their start to the JobResult."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtier.integrations.vllm import compat
from kvtier.types import Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.store.transfer import Transfer
    from kvtier.types import BatchResult, ChunkKey


@dataclass(slots=True)
class Job:
    """One TransferJob under way. `keys` are vLLM's, `names` the store's, both in the order of its rows."""

    job_id: int
    keys: Sequence[bytes]
    names: Sequence[ChunkKey]
    transfer: Transfer[BatchResult]
    started: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        """How long it has been under way."""
        return time.monotonic() - self.started


class Loads:
    """Reads into rows. A job is over when it has its outcome and the kernel lets go of its rows."""

    def __init__(self) -> None:
        self._jobs: dict[int, Job] = {}
        self._done: deque[Job] = deque()  # filled by the store's threads
        self._held: list[Job] = []  # late, with rows that the kernel may still write to

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job) -> None:
        """Follow a job that was just started."""
        self._jobs[job.job_id] = job
        done = self._done
        job.transfer.add_done_callback(lambda _: done.append(job))

    def take(self) -> list[Job]:
        """Those that are over since the last call."""
        over: list[Job] = []
        held, self._held = self._held, []
        while self._done:
            held.append(self._done.popleft())
        for job in held:
            (over if job.transfer.released else self._held).append(job)
        for job in over:
            del self._jobs[job.job_id]
        return over


class Stores:
    """Copies out of rows. A job is over when its rows are copied; what gets to disk, the store counts."""

    def __init__(self, max_rows: int) -> None:
        """`max_rows`: most rows that may wait to be copied."""
        self._max_rows = max_rows
        self._jobs: deque[tuple[Job, bool]] = deque()  # the store copies in this order
        self._rows = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def room(self, rows: int) -> int:
        """How many of `rows` more may wait."""
        return max(0, min(rows, self._max_rows - self._rows))

    def add(self, job: Job, *, complete: bool) -> None:
        """Follow a job that was just started; not `complete` if its tail was shed."""
        self._jobs.append((job, complete))
        self._rows += len(job.names)

    def take(self) -> list[tuple[Job, bool]]:
        """Those that are over since the last call, and whether the store took all their rows."""
        over: list[tuple[Job, bool]] = []
        while self._jobs and self._jobs[0][0].transfer.copied:
            job, complete = self._jobs.popleft()
            self._rows -= len(job.names)
            refused = job.transfer.done() and not job.transfer.result().ok
            over.append((job, complete and not refused))
        return over


def load_result(job: Job, row_bytes: int) -> tuple[Any, list[ChunkKey]]:
    """The JobResult of a load that is over, and the names of what did not arrive."""
    status = job.transfer.result().status
    arrived = [key for key, outcome in zip(job.keys, status, strict=True) if outcome == Status.HIT]
    failed = [name for name, outcome in zip(job.names, status, strict=True) if outcome != Status.HIT]
    result = compat.job_result(
        job.job_id,
        success=not failed,
        keys=tuple(arrived) or None if failed else None,
        seconds=job.seconds(),
        nbytes=len(arrived) * row_bytes,
    )
    return result, failed
