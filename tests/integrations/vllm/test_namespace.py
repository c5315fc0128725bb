"""What makes keys differ, on a real engine's configuration."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import InvalidRequest, TierUnavailable

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

if TYPE_CHECKING:
    from pathlib import Path

ROW = 64 << 10


def names(spec: Any, config: Any, **more: Any) -> bytes:
    from kvtier.integrations.vllm.namespace import tier_namespace

    return tier_namespace(spec, config, **{"row_bytes": ROW, "model_id": "", **more})


@pytest.fixture
def spec(engine_config: Any) -> Any:
    from vllm_pool import make_spec

    return make_spec(engine_config, paths="/kv")


def changed(config: Any, part: str, **values: Any) -> Any:
    """A copy of a VllmConfig in which some fields of one part are others."""
    config = copy.copy(config)
    inner = copy.copy(getattr(config, part))
    for name, value in values.items():
        object.__setattr__(inner, name, value)
    object.__setattr__(config, part, inner)
    return config


def test_the_same_engine_has_the_same_keys(spec: Any, engine_config: Any) -> None:
    assert names(spec, engine_config) == names(spec, copy.copy(engine_config))


def test_whatever_changes_a_rows_meaning_changes_the_keys(
    spec: Any, engine_config: Any, tmp_path: Path
) -> None:
    from vllm_models import save_tiny_llama

    rope = copy.deepcopy(engine_config.model_config.hf_config)
    rope.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    other = save_tiny_llama(tmp_path / "other", seed=1)
    found = [
        names(spec, engine_config),
        names(spec, engine_config, row_bytes=2 * ROW),
        names(spec, engine_config, model_id="mine"),
        names(spec, engine_config, model_id="other"),
        names(spec, changed(engine_config, "model_config", model=str(other))),
        names(spec, changed(engine_config, "model_config", quantization="fp8")),
        names(spec, changed(engine_config, "model_config", max_model_len=1024)),
        names(spec, changed(engine_config, "model_config", hf_config=rope, hf_text_config=rope)),
        names(spec, changed(engine_config, "cache_config", cache_dtype="fp8_e5m2")),
        names(spec, changed(engine_config, "cache_config", prefix_caching_hash_algo="sha256_cbor")),
        names(spec, changed(engine_config, "load_config", load_format="dummy")),
    ]
    for name in ("tp_size", "pp_size", "dcp_size"):
        parallel = copy.copy(spec.config.parallel)
        object.__setattr__(parallel, name, 2)
        config = copy.copy(spec.config)
        object.__setattr__(config, "parallel", parallel)
        found.append(names(SimpleNamespace(config=config, replicated_layout=False), engine_config))
    assert len(set(found)) == len(found)


def test_whatever_changes_a_blocks_meaning_changes_the_keys(engine_config: Any, tmp_path: Path) -> None:
    from kvtier.integrations.vllm.namespace import blocks_identity
    from vllm_models import save_tiny_llama

    def names(config: Any, **more: Any) -> bytes:
        return blocks_identity(config, **{"kv_format": "NHD", "layers": ["a", "b"], "model_id": "", **more})

    other = save_tiny_llama(tmp_path / "other", seed=1)
    found = [
        names(engine_config),
        names(engine_config, kv_format="HND"),
        names(engine_config, layers=["b", "a"]),
        names(engine_config, model_id="mine"),
        names(changed(engine_config, "model_config", model=str(other))),
        names(changed(engine_config, "model_config", dtype="bfloat16")),
        names(changed(engine_config, "cache_config", cache_dtype="fp8_e5m2")),
        names(changed(engine_config, "cache_config", block_size=64)),
    ]
    assert len(set(found)) == len(found)
    assert names(copy.copy(engine_config)) == found[0]


def test_lora_needs_a_name_for_the_adapters(spec: Any, engine_config: Any) -> None:
    config = copy.copy(engine_config)
    object.__setattr__(config, "lora_config", SimpleNamespace())
    with pytest.raises(InvalidRequest, match=r"LoRA is on.*: set kvtier's 'model_id'"):
        names(spec, config)
    assert names(spec, config, model_id="base and adapters of May")


def test_the_engines_configuration_is_that_of_the_caller(spec: Any, engine_config: Any) -> None:
    from kvtier.integrations.vllm import compat

    def calls(vllm_config: Any) -> Any:
        return compat.engine_config(spec)

    assert calls(engine_config) is engine_config
    other = changed(engine_config, "kv_transfer_config", engine_id="another")
    with pytest.raises(TierUnavailable, match="is not where this version keeps it"):
        calls(other)


def test_hashes_that_differ_in_each_process_are_refused(
    engine_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtier.integrations.vllm import compat

    config = changed(engine_config, "cache_config", prefix_caching_hash_algo="xxhash")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(InvalidRequest, match="nothing would be found after a restart"):
        compat.check_engine(config)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    compat.check_engine(config)


def test_an_engine_without_prefix_caching_is_refused(engine_config: Any) -> None:
    from kvtier.integrations.vllm import compat

    with pytest.raises(InvalidRequest, match="prefix caching is off"):
        compat.check_engine(changed(engine_config, "cache_config", enable_prefix_caching=False))
