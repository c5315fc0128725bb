"""What the tests of the vLLM integration share: a tiny model, its engine's configuration, and pools."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from vllm_pool import Pool


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm_models import save_tiny_llama

        return save_tiny_llama(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The models of the scenarios, and room for their stores."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm_models import save_tiny_gemma, save_tiny_llama

    work = tmp_path_factory.mktemp("engines")
    (work / "model").symlink_to(tiny_model)
    save_tiny_llama(work / "other model", seed=1)
    save_tiny_gemma(work / "gemma")
    return work


@pytest.fixture(scope="session")
def engine_config(tiny_model: Path) -> Any:
    """The VllmConfig that an engine of the tiny model would have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs

        from vllm_models import BLOCK

        transfer = KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config={}
        )
        return EngineArgs(
            model=str(tiny_model), dtype="float32", max_model_len=2048, block_size=BLOCK,
            skip_tokenizer_init=True, kv_transfer_config=transfer,
        ).create_engine_config()  # fmt: skip


@pytest.fixture
def make_pool(engine_config: Any, tmp_path: Path) -> Iterator[Callable[..., Pool]]:
    from vllm_pool import Pool

    pools: list[Pool] = []

    def make(**tier: Any) -> Pool:
        defaults = {"paths": str(tmp_path / "kv"), "capacity": "16MiB", "keep_after_reset": True}
        pools.append(Pool(engine_config, **{**defaults, **tier}))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
