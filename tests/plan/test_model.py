"""Bytes of a token's KV, from `config.json` files and shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import InvalidRequest
from kvtier.plan.model import from_config, layout

HERE = Path()
QWEN3 = {"num_hidden_layers": 62, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
         "hidden_size": 6144, "torch_dtype": "bfloat16", "sliding_window": None}  # fmt: skip
LLAMA2 = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096, "torch_dtype": "float16"}
DEEPSEEK = {"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
            "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "nbytes"),
    [
        (QWEN3, 62 * 2 * 8 * 128 * 2),
        (LLAMA2, 32 * 2 * 32 * 128 * 2),
        (DEEPSEEK, 61 * (512 + 64) * 2),
        ({"text_config": QWEN3}, 62 * 2 * 8 * 128 * 2),
        ({**QWEN3, "layer_types": ["full_attention"] * 62}, 62 * 2 * 8 * 128 * 2),
        ({**QWEN3, "sliding_window": 4096, "use_sliding_window": False}, 62 * 2 * 8 * 128 * 2),
    ],
)
def test_bytes_of_a_token(config: dict[str, Any], nbytes: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for where in ("config.json", "."):
        assert layout({"config": where}, tmp_path)[0].bytes_per_token == nbytes


def test_fields_beside_a_config_override_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    found, source = layout({"config": "config.json", "dtype": "fp8"}, tmp_path)
    assert (found.bytes_per_token, found.dtype, source) == (62 * 2 * 8 * 128, "float8_e4m3fn", "config.json")
    mla = {"config": "config.json", "kv_lora_rank": 512, "rope_head_dim": 64}
    assert layout(mla, tmp_path)[0].bytes_per_token == 62 * 576 * 2


def test_a_shape_does_without_a_config() -> None:
    shape = {"layers": 61, "kv_lora_rank": 512, "rope_head_dim": 64, "dtype": "bfloat16"}
    assert layout(shape, HERE)[0].bytes_per_token == 61 * 576 * 2


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"layer": 2}, "did you mean 'layers'"),
        ({"layers": 2}, "lacks kv_heads, head_dim, dtype"),
        ({"layers": 2, "kv_heads": 0, "head_dim": 1, "dtype": "bf16"}, "kv_heads in .* is 0"),
        ({"layers": 2, "kv_heads": 1, "head_dim": 1, "dtype": "int4"}, "dtype is 'int4'"),
        ({"layers": 2, "kv_lora_rank": 1, "dtype": "bf16"}, "lacks rope_head_dim"),
        ({"layers": 2, "kv_lora_rank": 1, "rope_head_dim": 1, "head_dim": 3, "dtype": "bf16"}, "give either"),
        ({"config": "absent.json"}, "cannot read"),
    ],
)
def test_what_is_not_whole_is_refused(section: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=says):
        layout(section, tmp_path)


@pytest.mark.parametrize(
    "more", [{"sliding_window": 4096}, {"layer_types": ["full_attention", "linear_attention"]}]
)
def test_layers_that_do_not_keep_every_token_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="Give the shape"):
        from_config({**QWEN3, **more})


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_config_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(InvalidRequest, match="JSON"):
        layout({"config": "config.json"}, tmp_path)
