"""SGLang's HiCacheFile (sglang/srt/mem_cache/hicache_storage.py), one file per page.

Read as `_page_transfer` and `_generic_page_get` of sglang/srt/managers/cache_controller.py do: batches of
STORAGE_BATCH_SIZE pages, one `batch_get` per batch on one thread. Two things that the controller does
there with every page are left out, to measure the storage alone: it makes a zeroed page to read into,
and copies that into the host pool afterwards. Here the pages are made once, and start on a page of the
system's memory, as pinned memory does.
"""

from __future__ import annotations

import mmap

import torch
from serve import Chunks, Way, serve
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE, HiCacheFile, HiCacheStorageConfig


class Pages:
    """`batch_get` of all pages."""

    def __init__(self, storage: HiCacheFile, keys: list[str], page_bytes: int) -> None:
        self._storage = storage
        self._keys = keys
        memory = torch.frombuffer(mmap.mmap(-1, len(keys) * page_bytes), dtype=torch.uint8)
        self._pages = list(memory.zero_().reshape(len(keys), page_bytes))
        self._found: list[torch.Tensor | None] = []

    def prepare(self) -> None:
        """Nothing: the pages are there."""

    def load(self) -> None:
        for start in range(0, len(self._keys), STORAGE_BATCH_SIZE):
            some = slice(start, start + STORAGE_BATCH_SIZE)
            self._found += self._storage.batch_get(self._keys[some], self._pages[some])

    def buffers(self) -> list[memoryview]:
        return [memoryview(bytearray()) if page is None else memoryview(page.numpy()) for page in self._found]

    def release(self) -> None:
        self._found = []


def make(chunks: Chunks) -> dict[str, Way]:
    """Put every chunk with `batch_set`, as `_generic_page_set` does."""
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=False, model_name="model",
    )  # fmt: skip
    storage = HiCacheFile(config, str(chunks.directory))
    keys = [f"{number:064x}" for number in range(len(chunks.sources))]
    for number, payload in chunks.payloads():
        if not storage.batch_set([keys[number]], [torch.frombuffer(bytearray(payload), dtype=torch.uint8)]):
            raise OSError(f"HiCacheFile did not store chunk {number}")
    return {"sglang-hicachefile": Pages(storage, keys, chunks.chunk_bytes)}


if __name__ == "__main__":
    serve(make)
