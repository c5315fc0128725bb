"""`KvtierTier`: the disk below vLLM's DRAM pool, behind vLLM's contract for secondary tiers.

Everything here runs on the scheduler's thread, between two steps: it starts transfers and collects
them, and waits for none. The bytes are moved by the store's threads and the kernel.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from kvtier.config import PAGE
from kvtier.errors import InvalidRequest, KVTierError, TierUnavailable
from kvtier.hashing import derived_keys
from kvtier.integrations.vllm import compat, metrics
from kvtier.integrations.vllm.jobs import Job, Loads, Stores, load_result
from kvtier.integrations.vllm.namespace import tier_namespace
from kvtier.integrations.vllm.settings import tier_settings
from kvtier.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from kvtier.types import ChunkKey

_log = logging.getLogger(__name__)
_DISTRUST = 60.0
"""Seconds for which a chunk that could not be loaded counts as absent."""
_STORE_SHARE = 2
"""One row of vLLM's pool in so many may wait to be stored; the others must be free for its own work."""
_SAY_EVERY = 10.0


class KvtierTier(SecondaryTierManager):  # type: ignore[misc]
    """vLLM's rows, stored on disk under its block hashes and a namespace of this engine's.

    Configured by `{"type": "kvtier", "paths": ..., "capacity": ...}` among the `secondary_tiers` of the
    OffloadingConnector; `settings.TierSettings` says what else. Nothing raises while it serves: what a
    disk does is a miss, and vLLM recomputes.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **config: Any,
    ) -> None:
        """Open the store. Raises as `kvtier.open`, and for settings and engines it cannot serve safely.

        `primary_kv_view`, shape (rows, bytes per row), stays vLLM's; it is used until `shutdown`.
        """
        super().__init__(
            offloading_spec, primary_kv_view, tier_type, **compat.base_arguments(backpressure_detector)
        )
        engine = compat.engine_config(offloading_spec)
        compat.check_engine(engine)
        self._rows = _rows(primary_kv_view)
        self._row_bytes = self._rows.shape[1]
        parallel = offloading_spec.config.parallel
        settings = tier_settings(
            config,
            row_bytes=self._row_bytes,
            replica=parallel.data_parallel_index,
            replicas=parallel.data_parallel_size,
        )
        self._settings = settings
        self.locality = None if settings.locality is None else Locality(settings.locality)
        self._namespace = tier_namespace(
            offloading_spec, engine, row_bytes=self._row_bytes, model_id=settings.model_id
        )
        self._loads = Loads()
        self._stores = Stores(max(1, len(self._rows) // _STORE_SHARE))
        self._finished: list[Any] = []  # results that are known already
        self._distrusted: dict[ChunkKey, float] = {}  # until when
        self._shed = 0
        self._store: Store | None = Store(settings.store)
        self._observed = metrics.Observed()
        _log.info("kvtier tier: %r, rows of %d bytes", self._store, self._row_bytes)

    def on_new_request(self, req_context: Any) -> Any:
        """No wishes: chunks are offered as they come to vLLM's pool."""
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """HIT if the chunk is on disk and was not just found unreadable. Memory only."""
        name = self._name(key)
        if self._store is None or (self._distrusted and self._is_distrusted(name)):
            return LookupResult.MISS
        return LookupResult.HIT if self._store.match([name]) else LookupResult.MISS

    def submit_load(self, job_metadata: Any) -> None:
        """Start reading chunks into rows."""
        keys = list(job_metadata.keys)
        names = [self._name(key) for key in keys]
        try:
            transfer = self._open_store().get(names, into=self._views(job_metadata), lend=self._settings.lend)
        except KVTierError:
            _log.exception("a load could not be started, its tokens are recomputed")
            self._distrust(names)
            self._report(job_metadata.job_id, success=False)
            return
        self._loads.add(Job(job_metadata.job_id, keys, names, transfer))

    def submit_store(self, job_metadata: Any) -> None:
        """Start storing rows: the head of them, if too many are waiting already."""
        keys = list(job_metadata.keys)
        take = self._stores.room(len(keys))
        self._shed += len(keys) - take
        if not take:
            self._report(job_metadata.job_id, success=False)
            return
        names = [self._name(key) for key in keys[:take]]
        try:
            transfer = self._open_store().put(names, self._views(job_metadata)[:take])
        except KVTierError:
            _log.exception("a store could not be started")
            self._report(job_metadata.job_id, success=False)
            return
        self._stores.add(Job(job_metadata.job_id, keys[:take], names, transfer), complete=take == len(keys))

    def get_finished_jobs(self) -> Iterable[Any]:
        """What is over since the last call. A row is in none of these while the kernel may touch it."""
        for job in self._loads.take():
            result, failed = load_result(job, self._row_bytes)
            self._distrust(failed)
            self._finished.append(result)
        for job, success in self._stores.take():
            nbytes = len(job.names) * self._row_bytes
            self._report(job.job_id, success=success, seconds=job.seconds(), nbytes=nbytes)
        finished, self._finished = self._finished, []
        return finished

    def has_pending_work(self) -> bool:
        """Whether vLLM has to keep asking."""
        return bool(self._loads) or bool(self._stores) or bool(self._finished)

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Make chunks the most recently used, so that what is hot above does not age on disk."""
        if self._store is not None:
            with self._store.pin([self._name(key) for key in keys]):
                pass

    def drain_jobs(self) -> None:
        """Wait until no row is in use. vLLM calls it before it resets its caches.

        That may be because the weights have changed: unless told otherwise, go on under keys that
        nobody else has.
        """
        self._wait(None)
        if not self._settings.keep_after_reset:
            self._namespace = os.urandom(len(self._namespace))
            _log.warning("caches were reset: what was stored before is not used until vLLM is started again")

    def get_stats(self) -> Any:
        """What was counted since the last call, at most once a second; None if that is nothing."""
        if self._store is None:
            return None
        return self._observed.take(self._store, self._shed)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Definitions of the metrics `vllm:kvtier_*`."""
        return metrics.definitions()

    def shutdown(self) -> None:
        """Close the store and let go of vLLM's memory. May be called again.

        Raises TierUnavailable while the kernel still holds rows, so that vLLM keeps them mapped.
        """
        store, self._store = self._store, None
        if store is not None:
            store.close()
        if not self._wait(0.0):
            raise TierUnavailable(
                f"{len(self._loads)} loads are still in the kernel, for the device hangs: vLLM's rows stay "
                "mapped"
            )
        self._rows = np.empty((0, self._row_bytes), np.uint8)

    def _wait(self, seconds: float | None) -> bool:
        """Wait until no row is in use, for at most `seconds`; whether that came about."""
        start = said = time.monotonic()
        while True:
            self._finished = list(self.get_finished_jobs())
            if not self._loads and not self._stores:
                return True
            now = time.monotonic()
            if seconds is not None and now - start >= seconds:
                return False
            if now - said > _SAY_EVERY:
                said = now
                _log.warning("%d loads and %d stores still hold rows", len(self._loads), len(self._stores))
            time.sleep(0.001)

    def _name(self, key: bytes) -> ChunkKey:
        return derived_keys([bytes(key)], namespace=self._namespace)[0]

    def _open_store(self) -> Store:
        if self._store is None:
            raise TierUnavailable("the tier was shut down")
        return self._store

    def _views(self, job: Any) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
        return [self._rows[row] for row in compat.row_ids(job)]

    def _report(self, job_id: int, *, success: bool, seconds: float = 0.0, nbytes: int = 0) -> None:
        self._finished.append(
            compat.job_result(job_id, success=success, keys=None, seconds=seconds, nbytes=nbytes)
        )

    def _distrust(self, names: Collection[ChunkKey]) -> None:
        """Have lookups miss what could not be loaded: vLLM would ask for it again at once, and again.

        What the store itself does not count as stored any more is found again as soon as it does.
        """
        names = [name for name in names if self._store is not None and self._store.match([name])]
        if not names:
            return
        now = time.monotonic()
        self._distrusted = {name: until for name, until in self._distrusted.items() if until > now}
        self._distrusted.update(dict.fromkeys(names, now + _DISTRUST))

    def _is_distrusted(self, name: ChunkKey) -> bool:
        return self._distrusted.get(name, 0.0) > time.monotonic()


def _rows(view: memoryview) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """vLLM's rows as uint8, shape (rows, bytes). Raises InvalidRequest if they cannot be read into."""
    rows = np.asarray(view).view(np.uint8)
    if not rows.size:
        raise InvalidRequest("vLLM's DRAM pool has no room for a single chunk: raise cpu_bytes_to_use")
    if not rows.flags.c_contiguous or rows.ctypes.data % PAGE or rows.shape[1] % PAGE:
        raise InvalidRequest(
            f"vLLM's rows are {rows.shape[1]} bytes at {rows.ctypes.data:#x}, needs whole pages of {PAGE}"
        )
    return rows
