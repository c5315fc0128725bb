"""KV tensors as engines lay them out, each with the same plain view of what they hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

LOGICAL = ("layer", "plane", "block", "token", "head", "dim")


@dataclass
class EngineTensors:
    """`kv_caches` as a connector takes them; `plain` is the same memory, with the axes of LOGICAL."""

    kv_caches: Any
    axes: str
    plain: npt.NDArray[Any]

    def tokens(self, blocks: Any) -> npt.NDArray[Any]:
        """A copy of what blocks hold, (layers, planes, tokens, heads, dim)."""
        held = self.plain[:, :, np.asarray(blocks, np.int64)]
        layers, planes, count, size, heads, dim = held.shape
        return held.reshape(layers, planes, count * size, heads, dim).copy()

    def fill(self, blocks: Any, kv: npt.NDArray[Any]) -> None:
        """The reverse."""
        layers, planes, _, size, heads, dim = self.plain.shape
        self.plain[:, :, np.asarray(blocks, np.int64)] = kv.reshape(layers, planes, -1, size, heads, dim)


def laid_out(
    memory: tuple[str, ...],
    sizes: dict[str, int],
    *,
    given: str = "layers",
    axes: tuple[str, ...] | None = None,
    dtype: Any = np.float32,
    gap: int = 0,
) -> EngineTensors:
    """Tensors whose axes lie in memory as `memory` says, outermost first, with `gap` elements behind each
    step of the outermost axis.

    `given` is how they are handed over: one for all ("whole"), one per layer ("layers"), or keys and
    values apart ("pairs"), each with its axes ordered as `axes`.
    """
    shape = [sizes[name] for name in memory]
    inner = int(np.prod(shape[1:]))
    base = np.zeros((shape[0], inner + gap), dtype)[:, :inner]
    strided = np.lib.stride_tricks.as_strided(
        base,
        shape,
        (base.strides[0], *(int(np.prod(shape[i + 1 :])) * base.itemsize for i in range(1, len(shape)))),
    )
    plain = strided.transpose([memory.index(name) for name in LOGICAL])
    dropped = {"whole": (), "layers": ("layer",), "pairs": ("layer", "plane")}[given]
    left = tuple(name for name in LOGICAL if name not in dropped)
    axes = left if axes is None else axes

    def arranged(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array.transpose([left.index(name) for name in axes])

    caches: Any
    if given == "whole":
        caches = [arranged(plain)]
    elif given == "layers":
        caches = [arranged(layer) for layer in plain]
    else:
        caches = [tuple(arranged(plane) for plane in layer) for layer in plain]
    return EngineTensors(caches, " ".join(axes), plain)


KNOWN: dict[str, tuple[tuple[str, ...], str]] = {
    "NHD, keys and values apart": (("layer", "plane", "block", "token", "head", "dim"), "pairs"),
    "NHD, plane first": (("layer", "plane", "block", "token", "head", "dim"), "layers"),
    "HND, plane first": (("layer", "plane", "block", "head", "token", "dim"), "layers"),
    "NHD, block first": (("layer", "block", "plane", "token", "head", "dim"), "layers"),
    "HND, block first": (("layer", "block", "plane", "head", "token", "dim"), "layers"),
    "content of both planes": (("layer", "block", "token", "head", "plane", "dim"), "layers"),
    "all layers in a block": (("block", "layer", "plane", "token", "head", "dim"), "whole"),
    "head outside of blocks": (("layer", "head", "block", "token", "plane", "dim"), "layers"),
    "layers apart, one tensor": (("layer", "plane", "block", "token", "head", "dim"), "whole"),
}
"""Layouts that engines have: order in memory, and how they are handed over."""
