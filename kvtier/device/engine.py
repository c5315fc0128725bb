"""EngineKV: an inference engine's KV tensors, described once by the names of their axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvtier.device.paged import PagedKV
from kvtier.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

CANONICAL = "layer,plane,token,head,dim"
"""The order of a payload that does not depend on the block size, and that other engines share."""
_PLAIN = CANONICAL.split(",")
_RANKS = ("layer", "plane", "head", "token", "dim")
"""In which order the regions of a chunk lie, by the axes that are not within a block's own bytes."""
_KNOWN = (*_RANKS, "block")


class Region(NamedTuple):
    """Where block 0 of a region begins: a tensor, and bytes from its first element on."""

    tensor: Any
    offset: int


class _Memory(NamedTuple):
    """A tensor as memory; strides in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineKV:
    """KV tensors of an engine: what they hold, and where its blocks lie. It keeps the tensors alive.

    Blocks of all regions have the same size and distance; region by region their bytes make a chunk.
    """

    layers: int
    planes: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int
    order: str
    """Order of a chunk's bytes, as of `Namespace.order`; names the block size if it depends on it."""
    regions: tuple[Region, ...]
    blocks: int
    block_bytes: int
    """Bytes of one block of one region, without gaps."""
    stride_bytes: int
    """Bytes from one block of a region to the next."""
    device: str
    """As torch spells it: `cpu`, `cuda:0`."""

    @classmethod
    def of(cls, kv_caches: Any, *, axes: str, block_tokens: int | None = None) -> EngineKV:
        """Describe one tensor per layer, or a pair of them, keys and values.

        `kv_caches` is a sequence of those, or a mapping with them as values, in the order of the layers.
        `axes` names the axes of each tensor, for example `block token head dim` (vLLM's NHD, keys and
        values apart), `plane block head token dim` (HND, fused), `block token dim` (MLA). With a
        `layer` axis there is one tensor, or pair, for all layers. Any strides will do as long as the
        bytes of a block do not overlap. Without a `block` axis the tensors are contiguous over tokens,
        and count as blocks of `block_tokens` tokens.

        Raises InvalidRequest, naming the tensor, for anything else.
        """
        names = _parsed(axes)
        entries = _entries(kv_caches)
        if "layer" in names and len(entries) > 1:
            raise InvalidRequest(
                f"axes {axes!r} has layer and kv_caches has {len(entries)} entries: give the one tensor (or "
                "pair) that holds all layers, or leave layer out"
            )
        if "plane" in names and len(entries[0]) > 1:
            raise InvalidRequest(
                f"axes {axes!r} has plane, but keys and values are apart: leave plane out, or give one tensor"
            )
        memory = _common(entries, names)
        sizes = dict(zip(names, memory.shape, strict=True))
        strides = dict(zip(names, memory.strides, strict=True))
        tokens = _cut_into_blocks(sizes, strides, block_tokens)
        group = _dense(sizes, strides, memory.itemsize)
        outer = [name for name in _RANKS if name in sizes and name not in group and sizes[name] > 1]
        block_bytes = memory.itemsize * math.prod(sizes[name] for name in group)
        stride_bytes = strides["block"] if sizes["block"] > 1 else block_bytes
        if stride_bytes < block_bytes:
            raise InvalidRequest(
                f"the blocks of kv_caches have {block_bytes} bytes, {stride_bytes} apart: they overlap"
            )
        return cls(
            layers=len(entries) * sizes.get("layer", 1),
            planes=len(entries[0]) * sizes.get("plane", 1),
            kv_heads=sizes.get("head", 1),
            head_dim=sizes.get("dim", 1),
            dtype=memory.dtype,
            block_tokens=tokens,
            order=_order(outer, group, sizes, tokens),
            regions=tuple(_regions(entries, outer, sizes, strides)),
            blocks=sizes["block"],
            block_bytes=block_bytes,
            stride_bytes=stride_bytes,
            device=memory.device,
        )

    @property
    def layer_steps(self) -> int:
        """Into how many equal ranges, in the order of the layers, the regions fall: as many as there are
        layers, or 1 if a block holds all of them.
        """
        return self.layers if self.order.startswith("layer") else 1

    def paged(self) -> PagedKV:
        """The same as addresses, of tensors in host memory."""
        bases = [_address(region.tensor) + region.offset for region in self.regions]
        return PagedKV(
            np.array(bases, np.uint64), self.blocks, self.block_bytes, self.stride_bytes, self.regions
        )


def _parsed(axes: str) -> tuple[str, ...]:
    names = tuple(axes.replace(",", " ").split())
    unknown = [name for name in names if name not in _KNOWN]
    if unknown or len(set(names)) != len(names) or "token" not in names:
        raise InvalidRequest(
            f"axes is {axes!r}, needs each at most once of {', '.join(_KNOWN)}, and token: for example "
            "'block token head dim'"
        )
    return names


def _entries(kv_caches: Any) -> list[tuple[Any, ...]]:
    """A tuple of planes for each layer."""
    layers = list(kv_caches.values()) if isinstance(kv_caches, Mapping) else kv_caches
    if hasattr(layers, "shape") or not isinstance(layers, Sequence) or not layers:
        raise InvalidRequest(
            "kv_caches needs a sequence, or a mapping, of one tensor or pair (keys, values) per layer"
        )
    entries = [tuple(layer) if isinstance(layer, tuple | list) else (layer,) for layer in layers]
    for i, entry in enumerate(entries):
        if len(entry) != len(entries[0]) or not 1 <= len(entry) <= 2:
            raise InvalidRequest(f"kv_caches[{i}] has {len(entry)} tensors, needs one, or keys and values")
    return entries


def _common(entries: list[tuple[Any, ...]], names: tuple[str, ...]) -> _Memory:
    """What all tensors have in common, or an error."""
    first: _Memory | None = None
    for i, entry in enumerate(entries):
        for tensor in entry:
            memory = _memory(tensor, f"kv_caches[{i}]")
            if len(memory.shape) != len(names) or 0 in memory.shape:
                raise InvalidRequest(
                    f"kv_caches[{i}] has shape {memory.shape}, needs the axes {' '.join(names)}, none empty"
                )
            first = first or memory
            if memory != first:
                raise InvalidRequest(
                    f"kv_caches[{i}] is {memory}, and kv_caches[0] is {first}: all layers need the same; "
                    "models that mix kinds of attention are not supported"
                )
    assert first is not None, "there is at least one"
    return first


def _memory(tensor: Any, where: str) -> _Memory:
    if hasattr(tensor, "data_ptr"):
        size = tensor.element_size()
        strides = tuple(size * stride for stride in tensor.stride())
        dtype = str(tensor.dtype).removeprefix("torch.")
        return _Memory(tuple(tensor.shape), strides, size, dtype, str(tensor.device))
    if not isinstance(tensor, np.ndarray):
        raise InvalidRequest(f"{where} is {type(tensor).__name__}, needs a tensor or ndarray")
    if not tensor.flags.writeable:
        raise InvalidRequest(f"{where} is read-only, needs writable memory")
    return _Memory(tensor.shape, tensor.strides, tensor.itemsize, tensor.dtype.name, "cpu")


def _cut_into_blocks(sizes: dict[str, int], strides: dict[str, int], block_tokens: int | None) -> int:
    """Tokens per block; tensors without blocks get some."""
    tokens = sizes["token"]
    if "block" in sizes:
        if block_tokens not in (None, tokens):
            raise InvalidRequest(f"block_tokens is {block_tokens}, but the token axis has {tokens}")
        return tokens
    if block_tokens is None or block_tokens < 1 or tokens % block_tokens:
        raise InvalidRequest(
            f"block_tokens is {block_tokens}, needs to divide the {tokens} tokens, as axes has no block"
        )
    sizes["block"], strides["block"] = tokens // block_tokens, strides["token"] * block_tokens
    sizes["token"] = block_tokens
    return block_tokens


def _dense(sizes: dict[str, int], strides: dict[str, int], itemsize: int) -> list[str]:
    """The axes that lie next to each other in memory, outermost first: one piece of a block."""
    inner = sorted((name for name in sizes if name != "block" and sizes[name] > 1), key=strides.__getitem__)
    group: list[str] = []
    length = itemsize
    for name in inner:
        if strides[name] != length:
            break
        group.insert(0, name)
        length *= sizes[name]
    if inner and not group:
        raise InvalidRequest(
            f"the elements along {inner[0]} are {strides[inner[0]]} bytes apart, needs one axis without gaps "
            f"({itemsize})"
        )
    return group


def _order(outer: list[str], group: list[str], sizes: dict[str, int], tokens: int) -> str:
    """The order of a chunk's axes."""
    if tokens == 1:
        inner = ["token", *group]
    elif group[:1] == ["token"]:
        inner = group  # block after block of tokens is token after token
    else:
        inner = [f"block{tokens}", *group]
    regions = [name for name in _RANKS if name in outer or (name in ("layer", "plane") and name not in group)]
    names = regions + inner
    # Axes of one element are in neither list: where they would be makes no difference to the bytes.
    return CANONICAL if names == [name for name in _PLAIN if name in names] else ",".join(names)


def _regions(
    entries: list[tuple[Any, ...]], outer: list[str], sizes: dict[str, int], strides: dict[str, int]
) -> Iterator[Region]:
    """Layer by layer, in each plane by plane, and so on."""
    found = []
    for layer, entry in enumerate(entries):
        for plane, tensor in enumerate(entry):
            for index in itertools.product(*(range(sizes[name]) for name in outer)):
                at = {"layer": layer, "plane": plane, **dict(zip(outer, index, strict=True))}
                offset = sum(i * strides[name] for name, i in zip(outer, index, strict=True))
                found.append(([at.get(name, 0) for name in _RANKS], Region(tensor, offset)))
    for _, region in sorted(found, key=lambda pair: pair[0]):
        yield region


def _address(tensor: Any) -> int:
    address: int = tensor.data_ptr() if hasattr(tensor, "data_ptr") else tensor.ctypes.data
    return address
