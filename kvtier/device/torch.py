"""TorchCopier: between KV tensors on a device and chunks in host memory, by torch's own copies."""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

import torch

from kvtier.device.paged import NO_BLOCK, checked_chunks, checked_regions, checked_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import numpy.typing as npt

    from kvtier.buffers import Buffers
    from kvtier.device.engine import EngineKV


class TorchCopier:
    """As `HostCopier`, chunk by chunk, on a stream of its own. It refuses what that does."""

    def __init__(self, kv: EngineKV) -> None:
        self._device = torch.device(kv.device)
        self._regions = [
            # Bytes over the tensor's own memory, whatever its shape, and no part of any graph.
            torch.empty(0, dtype=torch.uint8, device=self._device).set_(
                region.tensor.untyped_storage(),
                region.tensor.storage_offset() * region.tensor.element_size() + region.offset,
                (kv.blocks, kv.block_bytes),
                (kv.stride_bytes, 1),
            )
            for region in kv.regions
        ]
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def mark(self) -> object:
        """All that the calling thread has asked the device for so far: to be waited for by copies."""
        if self._stream is None:
            return None
        return torch.cuda.current_stream(self._device).record_event()

    def gather(self, block_table: npt.NDArray[np.int64], into: Buffers, after: object = None) -> None:
        """Copy the blocks of each row of the table into the chunk of the same row; back when it is there."""
        table, chunks = self._checked(block_table, into, name="into", writable=True)
        with self._running(after):
            for ids, host in zip(self._ids(table), chunks, strict=True):
                chunk = torch.stack([region.index_select(0, ids) for region in self._regions])
                host.copy_(chunk.view(-1))

    def scatter(
        self,
        source: Buffers,
        block_table: npt.NDArray[np.int64],
        after: object = None,
        regions: range | None = None,
    ) -> None:
        """Copy each chunk into the blocks of the same row, except for -1; back when it is done.

        With `regions` the others are left alone.
        """
        table, chunks = self._checked(block_table, source, name="source", writable=False)
        wanted_regions = checked_regions(regions, len(self._regions))
        some = slice(wanted_regions.start, wanted_regions.stop)
        with self._running(after):
            for ids, host in zip(self._ids(table), chunks, strict=True):
                chunk = host.view(len(self._regions), len(ids), -1)[some].to(self._device)
                wanted = ids != NO_BLOCK
                for region, part in zip(self._regions[some], chunk, strict=True):
                    region.index_copy_(0, ids[wanted], part[wanted])

    @contextlib.contextmanager
    def _running(self, after: Any) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self._stream is not None:
                stack.enter_context(torch.cuda.stream(self._stream))
                if after is not None:
                    self._stream.wait_event(after)
            yield
            if self._stream is not None:
                self._stream.synchronize()

    def _checked(
        self, block_table: npt.NDArray[Any], buffers: Buffers, *, name: str, writable: bool
    ) -> tuple[npt.NDArray[np.int64], list[torch.Tensor]]:
        """The table, and the chunks as uint8 tensors; torch warns about arrays that are read-only, so by
        address. Nothing is touched before all of it is checked.
        """
        blocks, block_bytes = self._regions[0].shape
        table = checked_table(block_table, blocks, distinct=not writable)
        nbytes = len(self._regions) * table.shape[1] * block_bytes
        addresses = checked_chunks(buffers, len(table), nbytes, name=name, writable=writable)
        return table, [
            torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
            for address in addresses
        ]

    def _ids(self, block_table: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(block_table).to(self._device)
