"""Settings of the tier (the keys beside `"type": "kvtier"`) and of the connector (its extra config)."""

from __future__ import annotations

import difflib
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.config import FIELDS, GIB, MIB
from kvtier.errors import InvalidRequest
from kvtier.settings import load

if TYPE_CHECKING:
    from kvtier.config import StoreConfig

_TIER = "the kvtier tier"
_CONNECTOR = "KvtierConnector"
_OWN: dict[str, dict[str, type]] = {
    _TIER: {"model_id": str, "lend": bool, "keep_after_reset": bool, "locality": str},
    _CONNECTOR: {"model_id": str, "keep_after_reset": bool, "chunk_tokens": int, "recompute_if_faster": bool},
}
_NEEDS = {str: "a string", bool: "true or false", int: "a whole number"}
_NOT_YOURS = ("chunk_bytes",)
_SEE = {_TIER: "blocks_per_chunk", _CONNECTOR: "chunk_tokens"}
_CHUNKS_LANDING = 32
"""Chunks of DRAM for what is on its way to or from disk: enough to keep a device busy."""
CHUNK_TOKENS = 128
"""Tokens per chunk of the connector, rounded up to whole blocks."""
CAPACITY = 16 * GIB
"""Of the connector's disk tier, unless given, or half of the room there is if that is less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """What a `kvtier` tier is built from."""

    store: StoreConfig
    """Any setting of `kvtier.StoreConfig`. `paths` and, for a new directory, `capacity` are required;
    `dram` is 0 unless given, as vLLM has a pool of its own, and `on_incompatible` is "discard"."""
    model_id: str = ""
    """What tells this model's weights from all others, instead of a digest of their files. Needed for
    LoRA (adapters included) and for weights that are not local files."""
    lend: bool = True
    """Have the disk write straight into vLLM's rows. A device that hangs then keeps those rows, and the
    requests that wait for them, until it answers; without it they are recomputed at `get_timeout`, at the
    price of a copy."""
    keep_after_reset: bool = False
    """Whether the weights are still the same when vLLM has reset its caches (sleep mode). Unless they
    are, what is stored before a reset is not used after it, and what is stored after it is never found
    by another process."""
    locality: str | None = None
    """LOCAL or REMOTE: how vLLM's per-request tier filters see this tier."""


@dataclass(frozen=True, slots=True)
class Rank:
    """Which worker of an engine this is, and of how many, in each way of being parallel."""

    dp: int
    dp_size: int
    pp: int
    pp_size: int
    tp: int
    tp_size: int

    @property
    def index(self) -> int:
        """Its number among the workers of its replica."""
        return self.pp * self.tp_size + self.tp

    @property
    def workers(self) -> int:
        """How many workers all replicas have."""
        return self.dp_size * self.pp_size * self.tp_size

    @property
    def directory(self) -> str:
        """Where it keeps its chunks, below each path: empty if there is nobody beside it."""
        axes = (("dp", self.dp, self.dp_size), ("pp", self.pp, self.pp_size), ("tp", self.tp, self.tp_size))
        return "-".join(f"{name}{rank}" for name, rank, size in axes if size > 1 or rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings:
    """What `KvtierConnector` is built from."""

    store: dict[str, Any]
    """Any setting of `kvtier.StoreConfig` but `chunk_bytes`, as given. `capacity` and `dram` are those of
    all workers together; where not given, they are 16 GiB in all, or half of the room there is, and 1 GiB
    for each worker. `paths` is `kvtier/vllm` in the user's cache directory unless given, and
    `on_incompatible` is "discard"."""
    chunk_tokens: int = 0
    """Tokens stored as one, a multiple of the block size; 0: 128, rounded up to whole blocks."""
    model_id: str = ""
    """As of `TierSettings`."""
    keep_after_reset: bool = False
    """As of `TierSettings`."""
    recompute_if_faster: bool = True
    """Compute what is stored where that has proved to be faster than to load it."""

    def tokens_of_chunk(self, block_tokens: int) -> int:
        """Tokens per chunk of an engine with blocks of `block_tokens`. Raises InvalidRequest if that is not
        whole blocks.
        """
        tokens = self.chunk_tokens or -(-CHUNK_TOKENS // block_tokens) * block_tokens
        if tokens % block_tokens:
            raise InvalidRequest(
                f"setting 'chunk_tokens' of {_CONNECTOR} is {tokens}, needs a multiple of the "
                f"{block_tokens} tokens of vLLM's blocks"
            )
        return tokens

    def store_of(self, rank: Rank, chunk_bytes: int) -> StoreConfig:
        """The settings of one worker's store, for chunks of that size. Raises InvalidRequest."""
        values = _with_defaults(self.store, chunk_bytes)
        if "capacity" not in values and "KVTIER_CAPACITY" not in os.environ:
            values["capacity"] = min(CAPACITY, _room(load(None, {**values, "chunk_bytes": 1}).paths) // 2)
        config = load(None, {**values, "chunk_bytes": chunk_bytes})
        dram = config.dram
        if "dram" in self.store or "KVTIER_DRAM" in os.environ:
            dram //= rank.workers
        return replace(_of_rank(config, rank), dram=dram)


def tier_settings(config: dict[str, Any], *, row_bytes: int, replica: int, replicas: int) -> TierSettings:
    """Parse the tier's configuration.

    `row_bytes` is the size of a row of vLLM's primary tier. Of several data-parallel `replicas` each
    has a subdirectory of its own, and its share of the capacity.

    Raises InvalidRequest for an unknown setting (with the nearest name) or a wrong value.
    """
    values, own = _parted(config, _TIER)
    if own.get("locality") not in (None, "LOCAL", "REMOTE"):
        raise InvalidRequest(f"setting 'locality' is {own['locality']!r}, needs 'LOCAL' or 'REMOTE'")
    if "KVTIER_DRAM" not in os.environ:
        values.setdefault("dram", 0)
    if "paths" not in values and "KVTIER_PATHS" not in os.environ:
        raise InvalidRequest(
            "the kvtier tier has no 'paths': give a directory on each disk, such as "
            '{"type": "kvtier", "paths": "/nvme/kv", "capacity": "64GiB"}'
        )
    store = load(None, {**_with_defaults(values, row_bytes), "chunk_bytes": row_bytes})
    return TierSettings(store=_of_rank(store, Rank(replica, replicas, 0, 1, 0, 1)), **own)


def connector_settings(config: dict[str, Any]) -> ConnectorSettings:
    """Parse the connector's extra config. Raises InvalidRequest as `tier_settings` does."""
    values, own = _parted(config, _CONNECTOR)
    if own.get("chunk_tokens", 1) < 1:
        raise InvalidRequest(
            f"setting 'chunk_tokens' of {_CONNECTOR} is {own['chunk_tokens']}, needs to be at least 1"
        )
    if "paths" not in values and "KVTIER_PATHS" not in os.environ:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        values["paths"] = str(cache / "kvtier" / "vllm")
    settings = ConnectorSettings(store=values, **own)
    load(None, {**_with_defaults(values, 1), "chunk_bytes": 1})  # raises for what is wrong whatever the model
    return settings


def _parted(config: dict[str, Any], whose: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of the store, and those of `whose` own."""
    own_names = _OWN[whose]
    known = tuple(name for name in (*FIELDS, *own_names) if name not in _NOT_YOURS)
    for name in config:
        if name not in known:
            raise InvalidRequest(_unknown(name, known, whose))
    own = {name: config[name] for name in own_names if name in config}
    for name, value in own.items():
        kind = own_names[name]
        if name != "locality" and type(value) is not kind:
            raise InvalidRequest(f"setting {name!r} of {whose} is {value!r}, needs {_NEEDS[kind]}")
    return {name: value for name, value in config.items() if name not in own_names}, own


def _with_defaults(values: dict[str, Any], chunk_bytes: int) -> dict[str, Any]:
    """`values`, and what an integration takes where they and the environment say nothing."""
    defaults = {"landing": max(64 * MIB, _CHUNKS_LANDING * chunk_bytes), "on_incompatible": "discard"}
    more = {name: value for name, value in defaults.items() if f"KVTIER_{name.upper()}" not in os.environ}
    return {**more, **values}


def _room(paths: tuple[Path, ...]) -> int:
    """Bytes that are free where these directories are, or taken up by what is in them."""
    total = 0
    for path in paths:
        place = next(place for place in (path, *path.absolute().parents) if place.exists())
        total += shutil.disk_usage(place).free
        total += sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())
    return total


def _of_rank(store: StoreConfig, rank: Rank) -> StoreConfig:
    paths = tuple(path / rank.directory for path in store.paths)
    return replace(store, paths=paths, capacity=store.capacity // rank.workers)


def _unknown(name: str, known: tuple[str, ...], whose: str) -> str:
    if name in _NOT_YOURS:
        return f"setting {name!r} is not for you to set: vLLM's blocks decide it (see {_SEE[whose]!r})"
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(known)
    return f"unknown setting {name!r} of {whose}; {hint}"
