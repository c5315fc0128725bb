"""Copies between an inference engine's paged KV cache and kvtier's chunks in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from kvtier.device.engine import CANONICAL, EngineKV
from kvtier.device.host import HostCopier
from kvtier.device.paged import NO_BLOCK, PagedKV

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvtier.buffers import Buffers

__all__ = ["CANONICAL", "NO_BLOCK", "Copier", "EngineKV", "HostCopier", "PagedKV", "copier_for"]


class Copier(Protocol):
    """What moves blocks: many to a call, which returns when all is copied. See `HostCopier`."""

    def mark(self) -> object:
        """What the calling thread has asked the device for so far, for `after`."""
        ...

    def gather(self, block_table: npt.NDArray[Any], into: Buffers, after: object = None) -> None:
        """Blocks to chunks, once what `after` marks is done."""
        ...

    def scatter(
        self,
        source: Buffers,
        block_table: npt.NDArray[Any],
        after: object = None,
        regions: range | None = None,
    ) -> None:
        """Chunks to blocks, all of their regions or some, once what `after` marks is done."""
        ...


def copier_for(kv: EngineKV) -> Copier:
    """The copier for the memory that `kv` lies in."""
    if kv.device == "cpu":
        return HostCopier(kv.paged())
    from kvtier.device.torch import TorchCopier

    return TorchCopier(kv)
