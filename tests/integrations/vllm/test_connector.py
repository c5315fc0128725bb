"""What vLLM makes of `KvtierConnector`, and what that refuses, on a real engine's configuration."""

from __future__ import annotations

import copy
import pickle
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import InvalidRequest, TierUnavailable, UnsupportedModel

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def make_config(engine_config: Any) -> Callable[..., Any]:
    """A VllmConfig for the connector in which some fields are others: `part__field=value`."""

    def make(extra: dict[str, Any] | None = None, **values: Any) -> Any:
        config = copy.copy(engine_config)
        given = {"kv_transfer_config__kv_load_failure_policy": "recompute", **values}
        for name, value in given.items():
            part, _, field = name.partition("__")
            inner = copy.copy(getattr(config, part))
            object.__setattr__(inner, field, value)
            object.__setattr__(config, part, inner)
        inner = copy.copy(config.kv_transfer_config)
        inner.kv_connector_extra_config = extra or {}
        object.__setattr__(config, "kv_transfer_config", inner)
        return config

    return make


def make_connector(config: Any, groups: int = 1) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from kvtier.integrations.vllm import KvtierConnector

    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=32))
    caches = SimpleNamespace(kv_cache_groups=[group] * groups)
    return KvtierConnector(config, KVConnectorRole.SCHEDULER, caches)


def test_its_name_is_enough() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvtier.integrations.vllm import KvtierConnector
    from kvtier.integrations.vllm.plugin import register

    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name("KvtierConnector") is KvtierConnector


def test_it_starts_without_settings(make_config: Any) -> None:
    connector = make_connector(make_config())
    assert len(connector.scheduler) == 0
    assert not connector.requires_kv_delivery
    connector.shutdown()


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        (
            {"kv_transfer_config__kv_load_failure_policy": "fail"},
            InvalidRequest,
            'add "kv_load_failure_policy": "recompute" to --kv-transfer-config',
        ),
        ({"kv_transfer_config__kv_role": "kv_producer"}, InvalidRequest, 'set it to "kv_both"'),
        ({"cache_config__enable_prefix_caching": False}, InvalidRequest, "prefix caching is off"),
        (
            {"parallel_config__decode_context_parallel_size": 2},
            UnsupportedModel,
            "decode_context_parallel_size is 2",
        ),
        ({"extra": {"path": "/kv"}}, InvalidRequest, "unknown setting 'path' .* did you mean 'paths'"),
        ({"extra": {"chunk_tokens": 40}}, InvalidRequest, "needs a multiple of the 32 tokens"),
    ],
)
def test_what_it_cannot_serve_is_refused(
    make_config: Any, values: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        make_connector(make_config(**values))


def test_several_groups_are_refused(make_config: Any) -> None:
    with pytest.raises(UnsupportedModel, match="has 2 KV cache groups, and KvtierConnector serves one"):
        make_connector(make_config(), groups=2)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    from kvtier.integrations import vllm as ours

    monkeypatch.setattr(vllm, "__version__", "0.31.2")
    with pytest.raises(TierUnavailable, match=r"vLLM 0\.31\.2, but kvtier works with 0\.29 and 0\.32"):
        _ = ours.KvtierConnector


def test_what_the_sides_tell_each_other_survives_the_way() -> None:
    from kvtier.integrations.vllm.messages import Changes, Job, Plan, Report, Stored

    plan = Plan(b"era", loads=[Job("r", 0, [b"hash"], 0, 32, [7])], reused=[1])
    told = Report({0: Changes(b"space", added=b"key")}, [(256, 0.5)])
    for message in (plan, told, Stored(1, told.changes[0])):
        assert pickle.loads(pickle.dumps(message)) == message
    both = told.aggregate(Report({1: Changes(b"other")}, [(0, 9.0)]))
    assert both == Report({0: told.changes[0], 1: Changes(b"other")}, [(256, 0.5), (0, 9.0)])


def test_metrics_add_up_over_workers() -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    from kvtier.integrations.vllm.stats import PromMetrics, Stats

    registry = CollectorRegistry()
    types = {
        kind: lambda name, documentation, labelnames, kind=kind: kind(
            name, documentation, labelnames, registry=registry
        )
        for kind in (Counter, Gauge, Histogram)
    }
    metrics = PromMetrics(SimpleNamespace(kv_transfer_config=None), types, ["engine"], {0: ["0"], 1: ["1"]})
    first = Stats({"vllm:kvtier_chunks|get|hit": 3.0, "vllm:kvtier_used_bytes|disk": 100.0})
    second = Stats({"vllm:kvtier_chunks|get|hit": 2.0, "vllm:kvtier_chunk_tokens": 256.0})
    told = first.aggregate(second)
    assert told.reduce() == {"chunks.get.hit": 5.0, "used_bytes.disk": 100.0, "chunk_tokens": 256.0}
    metrics.observe(told.data, 0)
    metrics.observe({"vllm:kvtier_used_bytes|disk": -40.0, "vllm:kvtier_chunk_tokens": 256.0}, 0)
    metrics.observe(told.data, 1)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"vllm:kvtier_{name}", {"engine": "0", **labels})

    assert value("chunks_total", operation="get", outcome="hit") == 5
    assert value("used_bytes", tier="disk") == 60
    assert value("chunk_tokens") == 256
    told.reset()
    assert told.is_empty()
