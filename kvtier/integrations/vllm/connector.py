"""`KvtierConnector`: kvtier as vLLM's KV connector, which vLLM makes once per scheduler and per worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from kvtier.connector import Economy
from kvtier.errors import InvalidRequest, UnsupportedModel
from kvtier.integrations.vllm import compat
from kvtier.integrations.vllm.messages import Stored
from kvtier.integrations.vllm.scheduler import Scheduler
from kvtier.integrations.vllm.settings import connector_settings
from kvtier.integrations.vllm.stats import PromMetrics, Stats
from kvtier.integrations.vllm.worker import Worker

if TYPE_CHECKING:
    from kvtier.integrations.vllm.messages import Plan, Report


class KvtierConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """vLLM's blocks, stored in DRAM and on disk by each worker, and loaded beside its computation.

    Configured by `kv_connector_extra_config`, see `settings.ConnectorSettings`. What a disk does never
    stops vLLM: a load that fails is computed, a save that fails is not stored.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises InvalidRequest and UnsupportedModel for engines that cannot be served safely."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = connector_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        compat.check_engine(vllm_config)
        _check(vllm_config, kv_cache_config)
        self._config = vllm_config
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        if role == KVConnectorRole.SCHEDULER:
            parallel = vllm_config.parallel_config
            block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
            self._scheduler = Scheduler(
                workers=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
                block_tokens=block_tokens,
                chunk_tokens=self._settings.tokens_of_chunk(block_tokens),
                keep_after_reset=self._settings.keep_after_reset,
                economy=Economy() if self._settings.recompute_if_faster else None,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache owes nobody anything."""
        return False

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler's side."""
        assert self._scheduler is not None, "this is a worker"
        return self._scheduler

    @property
    def worker(self) -> Worker:
        """The worker's side, once it has its KV cache."""
        assert self._worker is not None, "this is the scheduler, or there is no KV cache"
        return self._worker

    def on_new_request(self, request: Any) -> None:
        """Follow it."""
        self.scheduler.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded, and that it is done asynchronously."""
        return self.scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Load them."""
        self.scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        """What the workers have to do."""
        return self.scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers have done."""
        self.scheduler.take(
            connector_output.kv_connector_worker_meta, connector_output.finished_recving or ()
        )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Its blocks may go."""
        self.scheduler.finish(request, block_ids)
        return False, None

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """What each worker has stored."""
        self.scheduler.take_stored({stored.index: stored.changes for stored in metadata.values()})

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        """The same, of several pipeline stages."""
        self.set_xfer_handshake_metadata(metadata)

    def has_pending_push_work(self) -> bool:
        """Whether to go on stepping although there is no request."""
        return self.scheduler.is_waiting()

    def reset_cache(self) -> bool:
        """vLLM has reset its caches."""
        self.scheduler.reset()
        return True

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Open the worker's store. Whoever calls it again has new tensors."""
        self.shutdown()
        rank = compat.worker_rank(self._config)
        self._worker = Worker(self._config, self._kv_cache_config, self._settings, rank, kv_caches)

    def get_handshake_metadata(self) -> Stored | None:
        """What the worker has stored, for the scheduler."""
        if self._worker is None:
            return None
        return Stored(self._worker.rank.index, self._worker.changes())

    def handle_preemptions(self, kv_connector_metadata: Plan) -> None:
        """Before a step writes to any block."""
        self.worker.begin_step(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's loads."""
        self.worker.start_loads(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no request of this step waits for a load."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: chunks hold all layers."""

    def wait_for_save(self) -> None:
        """Begin the step's saves, behind its computation; nobody waits for them."""
        self.worker.start_saves(self._get_connector_metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """No sends; and the loads that are over."""
        return None, self.worker.received() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that have to be computed."""
        return self.worker.invalid_blocks()

    def build_connector_worker_meta(self) -> Report | None:
        """What has changed in the worker's store."""
        return self.worker.report()

    def get_kv_connector_stats(self) -> Stats | None:
        """What either side has counted since the last call."""
        if self._scheduler is not None:
            return self._scheduler.stats()
        return None if self._worker is None else self._worker.stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """What another process has counted."""
        return Stats(dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> PromMetrics:
        """The metrics `vllm:kvtier_*`."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Close the store."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


def _check(config: Any, kv_cache_config: Any) -> None:
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    if transfer.kv_load_failure_policy != "recompute":
        raise InvalidRequest(
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}, so that requests would fail "
            'when a disk does: add "kv_load_failure_policy": "recompute" to --kv-transfer-config'
        )
    if transfer.kv_role != "kv_both":
        raise InvalidRequest(
            f'kv_role is {transfer.kv_role!r}, but kvtier both loads and saves: set it to "kv_both"'
        )
    groups = len(kv_cache_config.kv_cache_groups)
    if groups != 1:
        raise UnsupportedModel(
            f"this model has {groups} KV cache groups, and KvtierConnector serves one: leave out "
            "--no-disable-hybrid-kv-cache-manager, or use vLLM's OffloadingConnector with kvtier as its tier"
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise UnsupportedModel(
                f"{name} is {getattr(parallel, name)}, and KvtierConnector does without: set it to 1, or use "
                "vLLM's OffloadingConnector with kvtier as its tier"
            )
