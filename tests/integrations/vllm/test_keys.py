"""Whose KV is found under a request's keys: vLLM's own block hashes, under one namespace."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import InvalidRequest

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def keys() -> Callable[..., list[bytes]]:
    """`keys(cache_salt=..., ...)`: those of a request of four blocks with the same tokens."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_offload.base import make_offload_key
    from vllm.v1.request import Request

    from kvtier.hashing import derived_keys

    init_none_hash(sha256)
    hasher = get_request_block_hasher(32, sha256)

    def keys(**request: Any) -> list[bytes]:
        hashes = Request(
            "request", list(range(128)), SamplingParams(max_tokens=1), None, block_hasher=hasher, **request
        ).block_hashes
        return derived_keys([bytes(make_offload_key(h, 0)) for h in hashes], namespace=bytes(32))

    return keys


def lora(name: str) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, 1, f"/adapters/{name}")


def image(identifier: str) -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    return [MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset=4, length=20))]


def test_requests_of_one_kind_share_and_of_different_kinds_never(keys: Callable[..., list[bytes]]) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"cache_salt": "tenant"},
        {"cache_salt": "another"},
        {"lora_request": lora("french")},
        {"lora_request": lora("latin")},
        {"lora_request": lora("latin"), "cache_salt": "tenant"},
        {"mm_features": image("cat")},
        {"mm_features": image("dog")},
        {"mm_features": image("dog"), "cache_salt": "tenant"},
    ]
    found = [keys(**kind) for kind in kinds]
    assert found == [keys(**kind) for kind in kinds]
    assert len({key for each in found for key in each}) == 4 * len(kinds)


def test_an_adapter_named_like_a_salt_does_not_cross_or_is_refused(
    keys: Callable[..., list[bytes]], engine_config: Any
) -> None:
    from kvtier.integrations.vllm import compat

    if set(keys(cache_salt="same")) & set(keys(lora_request=lora("same"))):
        config = SimpleNamespace(cache_config=engine_config.cache_config, lora_config=object())
        with pytest.raises(InvalidRequest, match=r"use 0\.32 for LoRA"):
            compat.check_engine(config)
