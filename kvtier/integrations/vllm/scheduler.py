"""The connector's side in vLLM's scheduler: which tokens are offered, loaded and saved.

Everything here runs on the scheduler's thread, between two steps, in memory.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtier.integrations.vllm import compat
from kvtier.integrations.vllm.known import KnownChunks
from kvtier.integrations.vllm.messages import Changes, Job, Plan, Report
from kvtier.integrations.vllm.pace import PrefillPace
from kvtier.integrations.vllm.stats import Told, of_scheduler

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvtier.connector import Economy
    from kvtier.integrations.vllm.stats import Stats
    from kvtier.types import ChunkKey

_AWAKE = 1.0
"""Seconds for which an idle engine goes on stepping, at most, to learn what has become of its last saves."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Tracked:
    """A request that vLLM has not ended."""

    request: Any
    hashes: list[bytes] = field(default_factory=list)  # one per full chunk
    names: list[list[ChunkKey]] = field(default_factory=list)  # of these, at each worker
    sent: int = 0  # of these, to the workers
    block_ids: list[int] = field(default_factory=list)  # only where a step does not tell
    looked_after: int = 0  # chunks that are stored, or whose save was asked for
    found: tuple[int, int, int] = (-1, 0, 0)  # version of what is known, start, tokens found there
    is_worth: bool | None = None  # whether to load what was found, once that is decided
    is_loading: bool = False
    may_save: bool = True


class Scheduler:
    """Follows the requests of one engine. `block_tokens` and `chunk_tokens` are sizes, `workers` how many."""

    def __init__(
        self,
        *,
        workers: int,
        block_tokens: int,
        chunk_tokens: int,
        keep_after_reset: bool = False,
        economy: Economy | None = None,
    ) -> None:
        """With an `economy` only what is faster to load than to compute is offered."""
        self.known = KnownChunks(workers)
        """What can be loaded."""
        self._economy = economy
        self._pace = None if economy is None else PrefillPace(economy)
        self._told = Told()
        self._scheduled: list[str] = []  # requests of the last step
        self._saving: set[int] = set()  # workers with saves under way
        self._awake_until = 0.0
        self._workers = workers
        self._block_tokens = block_tokens
        self._chunk_tokens = chunk_tokens
        self._per_chunk = chunk_tokens // block_tokens
        self._keep_after_reset = keep_after_reset
        self._era = b""
        self._tracked: dict[str, _Tracked] = {}
        self._plan = Plan(self._era)

    def add(self, request: Any) -> None:
        """Follow a new request."""
        self._tracked[request.request_id] = _Tracked(request)

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens behind the first `computed` are offered for an asynchronous load, whole blocks;
        (None, False) as long as it is not known what the workers have.
        """
        if request.request_id not in self._tracked:
            self.add(request)
        tracked = self._tracked[request.request_id]
        if request.skip_reading_prefix_cache:
            tracked.found = (-1, computed, 0)
        elif not self._name(tracked):
            return None, False
        elif tracked.found[:2] != (self.known.version, computed):
            tracked.found = (self.known.version, computed, self._find(tracked, computed))
        tokens = tracked.found[2]
        if tokens and self._economy is not None:
            if tracked.is_worth is None:
                tracked.is_worth = self._economy.worth(tokens) > 0
            tokens = tokens if tracked.is_worth else 0
        return tokens, tokens > 0

    def allocated(self, request: Any, block_ids: list[int], tokens: int) -> None:
        """Have `tokens` of a request be loaded, as many as were offered, into its blocks."""
        tracked = self._tracked[request.request_id]
        _, start, found = tracked.found
        tracked.found, tracked.is_worth = (-1, 0, 0), None
        if not tokens:
            return
        end = start + min(tokens, found)
        blocks = block_ids[start // self._block_tokens : end // self._block_tokens]
        self._plan.loads.append(self._job(tracked, start, end, blocks))
        # What had these blocks before may still be on its way to the store.
        self._plan.reused += blocks
        tracked.is_loading = True

    def plan(self, output: Any) -> Plan:
        """What the workers have to do in the step that is described by vLLM's SchedulerOutput."""
        plan, self._plan = self._plan, Plan(self._era)
        compat.add_written_blocks(output, self._block_tokens, plan.reused)
        for request_id, tables in compat.block_tables(output).items():
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.block_ids = tables[0]
        prefill = 0
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            request = tracked.request
            if scheduled > 1:
                prefill += max(0, min(scheduled, request.num_prompt_tokens - request.num_computed_tokens))
            # Beyond the request's tokens are drafts, which may be rejected.
            end = min(request.num_computed_tokens + scheduled, request.num_tokens)
            if end // self._chunk_tokens > tracked.looked_after and tracked.may_save:
                block_ids = compat.block_table(output, request_id) or tracked.block_ids
                plan.saves += self._saves(tracked, end, block_ids)
        if plan.saves or plan.late:
            self._saving.update(range(self._workers))
            self._awake_until = time.monotonic() + _AWAKE
        if self._pace is not None:
            was_idle = self._tracked.keys().isdisjoint(self._scheduled)
            self._pace.step(prefill, output.total_num_scheduled_tokens, was_idle=was_idle)
            self._scheduled = list(output.num_scheduled_tokens)
        return plan

    def take(self, report: Report | None, received: Iterable[str]) -> None:
        """Learn what has come of a step: the workers' report, and whose loads are over at all of them."""
        if report is not None:
            for worker, changes in report.changes.items():
                self.known.take(worker, changes)
                if not changes.is_saving:
                    self._saving.discard(worker)
            if self._economy is not None:
                for tokens, seconds in report.loads:
                    self._economy.observe_load(tokens, seconds)
        for request_id in received:
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.is_loading = False

    def is_waiting(self) -> bool:
        """Whether an idle engine should step once more: what was saved last is not known yet."""
        return bool(self._saving) and time.monotonic() < self._awake_until

    def stats(self) -> Stats | None:
        """What was decided since the last call, at most once a second."""
        if not self._told.is_due():
            return None
        return self._told.take(of_scheduler(self._economy, self._chunk_tokens))

    def take_stored(self, stored: Mapping[int, Changes]) -> None:
        """Learn what each worker has from the start."""
        for worker, changes in stored.items():
            self.known.take(worker, changes)

    def finish(self, request: Any, block_ids: list[int]) -> None:
        """A request has ended. Its blocks may be used again at once: the workers copy them first."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        if tracked.is_loading:
            self._plan.cancelled.append(request.request_id)
        elif tracked.may_save:
            end = compat.tokens_with_kv(request)
            if end // self._chunk_tokens > tracked.looked_after:
                self._plan.late += self._saves(tracked, end, block_ids)
        if tracked.sent:
            self._plan.ended.append(request.request_id)

    def reset(self) -> None:
        """vLLM resets its caches, maybe for other weights: unless told otherwise, go on under keys that
        nobody else has.
        """
        if self._keep_after_reset:
            return
        self._era = self._plan.era = os.urandom(16)
        self._plan.late.clear()  # under the new keys they would be taken for KV of the new weights
        self.known.version += 1
        for tracked in self._tracked.values():
            tracked.names.clear()
            tracked.sent = tracked.looked_after = 0
            # What such a request has computed so far may be of the weights before.
            tracked.may_save = tracked.request.num_computed_tokens == 0
        _log.warning("caches were reset: what was stored before is not used until vLLM is started again")

    def __len__(self) -> int:
        """Requests that are followed."""
        return len(self._tracked)

    def _name(self, tracked: _Tracked) -> bool:
        """Bring the keys of a request up to date; False if that cannot be done yet."""
        block_hashes = tracked.request.block_hashes
        chunks = len(block_hashes) // self._per_chunk
        # A streaming session may take its last token back, and with it the hash of the block.
        while (had := len(tracked.hashes)) and (
            had > chunks or tracked.hashes[-1] != block_hashes[had * self._per_chunk - 1]
        ):
            tracked.hashes.pop()
            del tracked.names[had - 1 :]
            tracked.sent = 0
        for chunk in range(len(tracked.hashes), chunks):
            tracked.hashes.append(bytes(block_hashes[(chunk + 1) * self._per_chunk - 1]))
        names = self.known.names(tracked.hashes[len(tracked.names) : chunks], self._era)
        if names is None:
            return False
        tracked.names += names
        return True

    def _find(self, tracked: _Tracked, computed: int) -> int:
        """Tokens behind `computed` that are stored; one of the request is left to compute."""
        first = chunk = computed // self._chunk_tokens
        while chunk < len(tracked.names) and self.known.is_stored(tracked.names[chunk]):
            chunk += 1
        if chunk == first:
            return 0
        last: int = (tracked.request.num_tokens - 1) // self._block_tokens * self._block_tokens
        return max(0, min(chunk * self._chunk_tokens, last) - computed)

    def _saves(self, tracked: _Tracked, end: int, block_ids: list[int]) -> list[Job]:
        """Jobs for the chunks up to token `end` that are not stored yet."""
        if not self._name(tracked):
            return []
        stop = min(end // self._chunk_tokens, len(tracked.names))
        wanted = [
            chunk
            for chunk in range(tracked.looked_after, stop)
            if not self.known.is_stored(tracked.names[chunk])
        ]
        tracked.looked_after = max(tracked.looked_after, stop)
        jobs = []
        for first, last in _runs(wanted):
            start, end = first * self._chunk_tokens, (last + 1) * self._chunk_tokens
            blocks = block_ids[first * self._per_chunk : (last + 1) * self._per_chunk]
            jobs.append(self._job(tracked, start, end, blocks))
        return jobs

    def _job(self, tracked: _Tracked, start: int, end: int, blocks: list[int]) -> Job:
        known, reach = tracked.sent, -(-end // self._chunk_tokens)
        tracked.sent = max(known, reach)
        return Job(tracked.request.request_id, known, tracked.hashes[known:reach], start, end, blocks)


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """First and last of each run of consecutive numbers."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs
