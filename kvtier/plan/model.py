"""The shape of a model's KV: from its Hugging Face `config.json`, or as given."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvtier.errors import InvalidRequest
from kvtier.layout import DTYPE_BYTES, KVLayout
from kvtier.plan import schema

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_MLA = ("kv_lora_rank", "rope_head_dim")
_DTYPES = {"fp8": "float8_e4m3fn", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def layout(section: Mapping[str, Any], directory: Path) -> tuple[KVLayout, str]:
    """The layout of one token's KV, and where it is from. `config` is looked for from `directory` on.

    Fields beside `config` override what it says. Raises InvalidRequest for a shape that is not whole, and
    for models some of whose layers do not keep every token.
    """
    schema.known(section, "[model]", schema.MODEL)
    shape: dict[str, Any] = {}
    source = "given"
    if "config" in section:
        file = directory / schema.text(section, "config", "[model]")
        shape = from_config(_read(file))
        source = str(section["config"])
    given = {name: value for name, value in section.items() if name not in ("config", "name")}
    if any(name in given for name in _MLA):
        shape = {name: value for name, value in shape.items() if name not in ("kv_heads", "head_dim")}
    elif "kv_heads" in given or "head_dim" in given:
        shape = {name: value for name, value in shape.items() if name not in _MLA}
    shape |= given
    if isinstance(shape.get("dtype"), str):
        shape["dtype"] = _DTYPES.get(shape["dtype"], shape["dtype"])
    if any(name in shape for name in _MLA):
        if "kv_heads" in shape or "head_dim" in shape:
            raise InvalidRequest("[model] gives kv_heads or head_dim, and MLA's ranks: give either")
        _whole(shape, "layers", *_MLA, "dtype")
        # One latent plane of the compressed KV and the shared rotary part (DeepSeek-V2, section 2.1).
        shape |= {
            "kv_heads": 1,
            "head_dim": shape.pop("kv_lora_rank") + shape.pop("rope_head_dim"),
            "planes": 1,
        }
    _whole(shape, "layers", "kv_heads", "head_dim", "dtype")
    return KVLayout(**shape, chunk_tokens=1), source


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `[model]` that a `config.json` gives. Raises InvalidRequest as `layout` does."""
    config = config.get("text_config", config)
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if kinds or window:
        what = ", ".join(sorted(kinds)) or f"a sliding window of {window}"
        raise InvalidRequest(
            f"the model has {what}: not every layer keeps every token. Give the shape, with the number of "
            "`layers` that do"
        )
    heads = config.get("num_attention_heads")
    hidden = config.get("hidden_size")
    shape: dict[str, Any] = {
        "layers": config.get("num_hidden_layers"),
        "dtype": config.get("dtype") or config.get("torch_dtype"),
    }
    if config.get("kv_lora_rank"):
        shape |= {"kv_lora_rank": config["kv_lora_rank"], "rope_head_dim": config.get("qk_rope_head_dim")}
    else:
        each = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None
        shape |= {
            "kv_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or each,
        }
    return {name: value for name, value in shape.items() if value is not None}


def _whole(shape: Mapping[str, Any], *needed: str) -> None:
    """Raise InvalidRequest for what is missing or no number."""
    missing = [name for name in needed if name not in shape]
    if missing:
        raise InvalidRequest(
            f"[model] lacks {', '.join(missing)}: give `config`, the path of a config.json, or layers, "
            "kv_heads, head_dim and dtype, or for MLA layers, kv_lora_rank, rope_head_dim and dtype "
            f"(one of {', '.join(DTYPE_BYTES)})"
        )
    if not isinstance(shape["dtype"], str):
        raise InvalidRequest(f"dtype in [model] is {shape['dtype']!r}, needs one of {', '.join(DTYPE_BYTES)}")
    for name in needed:
        value = shape[name]
        if name != "dtype" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InvalidRequest(f"{name} in [model] is {value!r}, needs a whole number of at least 1")


def _read(file: Path) -> dict[str, Any]:
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"cannot read the model's config {file}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidRequest(f"the model's config {file} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidRequest(f"the model's config {file} is no JSON object")
    return config
