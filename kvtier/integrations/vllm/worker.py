"""The connector's side in a worker: its store, and the loads and saves of its KV cache."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.config import FIELDS
from kvtier.connector import Connector, shared_store
from kvtier.device import EngineKV
from kvtier.integrations.vllm import compat
from kvtier.integrations.vllm.messages import Changes, Report
from kvtier.integrations.vllm.namespace import blocks_identity
from kvtier.integrations.vllm.pace import LoadClock
from kvtier.integrations.vllm.stats import Told, of_worker
from kvtier.types import Reason, Status

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from kvtier.connector import LoadResult, Request
    from kvtier.integrations.vllm.messages import Job, Plan
    from kvtier.integrations.vllm.settings import ConnectorSettings, Rank
    from kvtier.integrations.vllm.stats import Stats
    from kvtier.store.transfer import Transfer
    from kvtier.types import BatchResult, ChunkKey

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Load:
    keys: list[ChunkKey]
    transfer: Transfer[LoadResult]


class Worker:
    """One rank's store and transfers. Nothing raises while it serves: what fails is recomputed.

    Called by the worker's thread alone; loads come to their end on the store's.
    """

    def __init__(
        self, config: Any, kv_cache_config: Any, settings: ConnectorSettings, rank: Rank, kv_caches: Any
    ) -> None:
        """Open the store for vLLM's tensors, `kv_caches` by layer. Raises as `kvtier.open`, and for
        tensors and models that cannot be served safely.
        """
        layers, axes = compat.kv_layers(kv_caches, kv_cache_config)
        kv = EngineKV.of(layers, axes=axes)
        chunk_tokens = settings.tokens_of_chunk(kv.block_tokens)
        chunk_bytes = len(kv.regions) * kv.block_bytes * (chunk_tokens // kv.block_tokens)
        store = settings.store_of(rank, chunk_bytes)
        identity = blocks_identity(
            config,
            kv_format=f"{compat.kv_format(config, kv_cache_config)} block={kv.block_tokens} axes={axes}",
            layers=list(layers),
            model_id=settings.model_id,
        )
        self.rank = rank
        """Which worker this is."""
        self._shared = shared_store(None, **{name: getattr(store, name) for name in FIELDS})
        try:
            self.connector = Connector(
                self._shared.store,
                layers,
                axes=axes,
                model="vllm",
                weights=identity,
                chunk_tokens=chunk_tokens,
                tp_rank=rank.tp,
                tp_size=rank.tp_size,
                pp_rank=rank.pp,
                pp_size=rank.pp_size,
            )
        except BaseException:
            self._shared.close()
            raise
        self._block_tokens = kv.block_tokens
        self._chunk_tokens = chunk_tokens
        self._namespace = self.connector.namespace().digest()
        self._follower = self._shared.store.follow()
        self._era = b""
        self._requests: dict[str, Request] = {}
        self._loads: dict[str, _Load] = {}
        self._clock = LoadClock()
        self._over: deque[tuple[str, float]] = deque()  # with what each took; filled by the store's threads
        self._lost: list[tuple[str, list[int]]] = []  # loads that could not be started, and their blocks
        self._invalid: set[int] = set()
        self._failed: list[bytes] = []  # keys
        self._measured: list[tuple[int, float]] = []  # tokens and seconds of loads
        self._saves: set[Transfer[BatchResult]] = set()  # that are not stored yet
        self._was_saving = False  # as was told
        self._told = Told()
        _log.info("kvtier: %r, chunks of %d tokens, %d bytes", self._shared.store, chunk_tokens, chunk_bytes)

    def begin_step(self, plan: Plan) -> None:
        """Before anything is computed: have no transfer touch the blocks that the step writes to."""
        if plan.era != self._era:
            self._era = plan.era
            self._drop(list(self._requests))
        for job in plan.late:
            self._save(job)
        self._drop(plan.ended)
        for request_id in plan.cancelled:
            if (load := self._loads.get(request_id)) is not None:
                load.transfer.cancel()
        if plan.reused:
            self.connector.fence(plan.reused)

    def start_loads(self, plan: Plan) -> None:
        """Begin to fill blocks."""
        for job in plan.loads:
            self._clock.begin(job.request_id)
            try:
                request = self._request(job)
                keys = request.keys[job.start // self._chunk_tokens : -(-job.end // self._chunk_tokens)]
                transfer = self.connector.load(request, self._table(job), job.start, job.end)
            except Exception:
                _log.exception("a load could not be started, its tokens are recomputed")
                self._clock.end(job.request_id)
                self._lost.append((job.request_id, job.blocks))
                continue
            self._loads[job.request_id] = _Load(keys, transfer)
            transfer.add_done_callback(partial(self._note, job.request_id))

    def start_saves(self, plan: Plan) -> None:
        """Begin to copy what the step has computed."""
        for job in plan.saves:
            self._save(job)

    def received(self) -> set[str]:
        """Requests whose loads are over since the last call, in success or not."""
        over = set()
        while self._lost:
            request_id, blocks = self._lost.pop()
            self._invalid.update(blocks)
            over.add(request_id)
        while self._over:
            request_id, seconds = self._over.popleft()
            load = self._loads.pop(request_id)
            result = load.transfer.result()
            self._invalid.update(result.invalid_blocks.tolist())
            self._failed += _unavailable(load.keys, result.chunks)
            if result.chunks.ok:
                self._measured.append((result.tokens, seconds))
            elif (result.chunks.reason == Reason.DEADLINE).any():
                self._measured.append((0, seconds))
            over.add(request_id)
        return over

    def invalid_blocks(self) -> set[int]:
        """Blocks of these, and of loads that are reported later, that do not hold what they should."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def report(self) -> Report | None:
        """What has changed in the store since the last call, and what loads took."""
        changes = self.changes()
        measured, self._measured = self._measured, []
        was_saving, self._was_saving = self._was_saving, changes.is_saving
        is_new = changes.added or changes.removed or changes.failed or was_saving != changes.is_saving
        if not (is_new or measured):
            return None
        return Report({self.rank.index: changes}, measured)

    def stats(self) -> Stats | None:
        """What was counted since the last call, at most once a second."""
        if not self._told.is_due():
            return None
        return self._told.take(of_worker(self.connector, self._shared.store.stats()))

    def changes(self) -> Changes:
        """The same; the first time, all that is stored."""
        is_saving = bool(self._saves)  # before the look, so that nothing falls between
        found = self._follower.take()
        failed, self._failed = self._failed, []
        return Changes(
            self._namespace, b"".join(found.added), b"".join(found.removed), b"".join(failed), is_saving
        )

    def close(self) -> None:
        """Finish copies, cancel loads, and close the store. Idempotent."""
        self.connector.close()
        self._follower.close()
        self._shared.close()
        self._drop(list(self._requests))

    def _note(self, request_id: str, _: Transfer[LoadResult]) -> None:
        self._over.append((request_id, self._clock.end(request_id)))

    def _save(self, job: Job) -> None:
        self._was_saving = True  # as the scheduler takes it, until it is told otherwise
        try:
            request = self._request(job)
            transfer = self.connector.save(request, self._table(job), job.start, job.end)
            self._saves.add(transfer)
            transfer.add_done_callback(self._saves.discard)
        except Exception:
            _log.exception("a save could not be started")

    def _request(self, job: Job) -> Request:
        """The request of a job, with the keys that it needs."""
        request = self._requests.get(job.request_id)
        if request is None or not job.known:
            self._drop([job.request_id])
            request = self.connector.request(chunk_hashes=job.hashes, extra=self._era)
            self._requests[job.request_id] = request
        else:
            request.extend(job.hashes)
        return request

    def _table(self, job: Job) -> npt.NDArray[np.int64]:
        """The block table that a transfer takes; before its tokens it is not looked at."""
        table = np.zeros(job.end // self._block_tokens, np.int64)
        table[job.start // self._block_tokens :] = job.blocks
        return table

    def _drop(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if (request := self._requests.pop(request_id, None)) is not None:
                request.close()


def _unavailable(keys: list[ChunkKey], result: BatchResult) -> list[ChunkKey]:
    """What could not be loaded, without what was not tried for that, or because nobody waited for it."""
    return [
        key
        for key, status, reason in zip(keys, result.status, result.reason, strict=True)
        if status != Status.HIT and reason != Reason.CANCELLED
    ]
