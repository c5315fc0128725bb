"""Between a cache's tensors and the bytes of chunks: one copy each way, and a layer that grows in place."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from kvtier.layout import KVLayout


def gather(
    cache: DynamicCache,
    layout: KVLayout,
    slots: Sequence[npt.NDArray[np.uint8]],
    places: npt.NDArray[np.int64],
) -> None:
    """Write chunks into `slots`, uint8 (layout.chunk_bytes,) each.

    `places` has the batch row and the number in it of every chunk, shape (chunks, 2).
    """
    for slot, (row, chunk) in zip(slots, places.tolist(), strict=True):
        start = chunk * layout.chunk_tokens
        planes = [
            tensor[row, :, start : start + layout.chunk_tokens].transpose(0, 1)
            for layer in cache.layers
            for tensor in (layer.keys, layer.values)
        ]
        target = torch.from_numpy(slot).view(getattr(torch, layout.dtype)).view(-1, *layout.shape[2:])
        with torch.no_grad():
            if planes[0].device.type == "cpu":
                torch.stack(planes, out=target)
            else:
                target.copy_(torch.stack(planes))


class Restored:
    """Tensors that a restored cache is built in: `tokens` of room, filled chunk by chunk."""

    def __init__(self, layout: KVLayout, batch: int, tokens: int, device: torch.device) -> None:
        self._layout = layout
        shape = (layout.layers, layout.planes, batch, layout.kv_heads, tokens, layout.head_dim)
        # Made under inference_mode, they could not be appended to outside of it.
        with torch.inference_mode(False):
            self._room = torch.empty(shape, dtype=getattr(torch, layout.dtype), device=device)

    def scatter(
        self,
        slots: Sequence[npt.NDArray[np.uint8]],
        places: npt.NDArray[np.int64],
        layers: range | None = None,
    ) -> None:
        """Copy payloads to their places, the reverse of `gather`: all layers of them, or some. The slots are
        free on return.
        """
        some = slice(None) if layers is None else slice(layers.start, layers.stop)
        for slot, (row, chunk) in zip(slots, places.tolist(), strict=True):
            start = chunk * self._layout.chunk_tokens
            target = self._room[some, :, row, :, start : start + self._layout.chunk_tokens]
            # Crossing to a device, bytes go in one piece and are permuted there.
            bytes_of_layers = _alias(slot).view(self._layout.layers, -1)[some].to(target.device)
            source = bytes_of_layers.view(target.dtype).view(-1, *self._layout.shape[1:])
            with torch.inference_mode(False), torch.no_grad():
                target.copy_(source.transpose(2, 3))

    def fill(self, cache: DynamicCache, tokens: int, wait: Callable[[int], None] | None = None) -> None:
        """Make the first `tokens` tokens the content of `cache`, which must be empty. A layer that is used
        for the first time calls `wait` with its number, which is to return when the tokens are there.
        """
        cache.layers = [
            GrowingLayer(keys, values, tokens, partial(wait, i) if wait is not None else None)
            for i, (keys, values) in enumerate(self._room)
        ]


def _alias(slot: npt.NDArray[np.uint8]) -> torch.Tensor:
    """`slot` as a uint8 tensor that is only read: torch warns about each array that is read-only."""
    return torch.frombuffer((ctypes.c_uint8 * slot.nbytes).from_address(slot.ctypes.data), dtype=torch.uint8)


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """A DynamicLayer that lies at the start of larger tensors, and writes new tokens behind the old.

    A DynamicLayer copies all it holds for every token that is added; at 4,096 tokens that costs more
    than the token's own computation. As soon as anything else has replaced its tensors (beam search,
    say), or the room is used up, it behaves as its base class.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        tokens: int,
        wait: Callable[[], None] | None = None,
    ) -> None:
        """`keys`, `values`: (batch, kv heads, room, head dim), of which `tokens` are in use, once `wait` has
        returned. It is called at the first `update`, as nothing reads them before.
        """
        super().__init__()
        self.lazy_initialization(keys, values)
        self._room: tuple[torch.Tensor, torch.Tensor] | None = (keys, values)
        self._wait = wait
        self.keys, self.values = keys[:, :, :tokens], values[:, :, :tokens]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append (batch, kv heads, new tokens, head dim); returns all keys and values."""
        if self._wait is not None:
            self._wait()
            self._wait = None
        states = (key_states, value_states)
        if self._room is None or not self._fits(self._room, states):
            self._room = None
            grown: tuple[torch.Tensor, torch.Tensor] = super().update(
                key_states, value_states, *args, **kwargs
            )
            return grown
        start = self.keys.shape[-2]
        end = start + key_states.shape[-2]
        for room, new in zip(self._room, states, strict=True):
            room[:, :, start:end] = new
        self.keys, self.values = (room[:, :, :end] for room in self._room)
        return self.keys, self.values

    def _fits(
        self, rooms: tuple[torch.Tensor, torch.Tensor], states: tuple[torch.Tensor, torch.Tensor]
    ) -> bool:
        if torch.compiler.is_compiling() or self.keys is None:
            return False
        for room, held, new in zip(rooms, (self.keys, self.values), states, strict=True):
            ours = held.data_ptr() == room.data_ptr() and held.stride() == room.stride()
            alike = held.shape[:2] == new.shape[:2] == room.shape[:2] and new.dtype == room.dtype
            enough = held.shape[-2] + new.shape[-2] <= room.shape[-2]
            if not (ours and alike and enough) or (new.requires_grad and torch.is_grad_enabled()):
                return False
        return True
