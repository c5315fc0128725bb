"""What both of the demo's processes do: get to the first token, go on from there, and look at the bytes."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from transformers import DynamicCache

from kvtier import Store, StoreConfig

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvtier.config import EngineName
    from kvtier.integrations.hf import PrefixCache

CHUNK_TOKENS = 256
NEW_TOKENS = 32
PAGE = 4096


@dataclass
class Job:
    """What the second process needs to know; the token ids, `ids.npy`, lie in `folder`."""

    model: str
    dtype: str
    threads: int
    folder: str
    store: str
    chunk_bytes: int
    chunks: int
    engine: EngineName

    def write(self) -> Path:
        """Save it as `job.json` in its folder."""
        file = Path(self.folder, "job.json")
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return file

    @classmethod
    def read(cls, file: Path) -> Job:
        """What `write` saved."""
        return cls(**json.loads(file.read_text(encoding="utf-8")))

    def open_store(self) -> Store:
        """The demo's store, with room for the prompt in both tiers and a little more."""
        window = max(64 << 20, 2 * self.chunk_bytes)
        return Store(
            StoreConfig(
                paths=(Path(self.store),),
                capacity=self.capacity,
                dram=(self.chunks + 2) * self.chunk_bytes,
                chunk_bytes=self.chunk_bytes,
                landing=window,
                io_window=window,
                engine=self.engine,
            )
        )

    @property
    def capacity(self) -> int:
        """Bytes on disk: the prompt, as much again for the division into extents, and the journal."""
        return 2 * self.chunks * self.chunk_bytes + 16 * self.chunk_bytes + (64 << 20)


@dataclass
class Start:
    """How one way to the first token went. Times in seconds."""

    ttft: float
    open: float
    """Of that, opening the store."""
    restore: float
    compute: float
    restored: int
    """Tokens."""
    tokens: list[int]
    """Greedily generated, the first one included."""
    digests: list[str]
    """`kv_digests` of what was restored."""


def warm_up(model: Any) -> None:
    """Run a short prompt, so that neither side pays for the libraries' first time."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for length in (64, 1):
            ids = torch.ones((1, length), dtype=torch.long)
            model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
    gc.collect()


def first_token(
    model: Any, prefix_cache: PrefixCache, ids: torch.Tensor, began: float, *, restore: bool
) -> tuple[Start, DynamicCache, torch.Tensor]:
    """From token ids (1, tokens) in hand to the next token; `began` is when the clock was started.

    Also returns the cache, which then holds the whole prompt, and the logits (1, 1, vocab).
    """
    opened = time.perf_counter()
    cache, restored = prefix_cache.restore(ids) if restore else (DynamicCache(config=model.config), 0)
    ready = time.perf_counter()
    logits = prefix_cache.prefill(ids, cache)
    token = int(logits[0, -1].argmax())
    now = time.perf_counter()
    start = Start(
        ttft=now - began,
        open=opened - began,
        restore=ready - opened,
        compute=now - ready,
        restored=restored,
        tokens=[token],
        digests=kv_digests(cache, restored),
    )
    return start, cache, logits


def go_on(model: Any, cache: DynamicCache, start: Start, logits: torch.Tensor) -> npt.NDArray[np.float32]:
    """Generate greedily up to NEW_TOKENS into `start.tokens`; logits of every step, (NEW_TOKENS, vocab)."""
    steps = [logits[0, -1]]
    with torch.no_grad():
        while len(start.tokens) < NEW_TOKENS:
            ids = torch.tensor([start.tokens[-1:]])
            steps.append(model(input_ids=ids, cache=cache, use_cache=True).logits[0, -1])
            start.tokens.append(int(steps[-1].argmax()))
    rows: npt.NDArray[np.float32] = torch.stack(steps).float().numpy()
    return rows


def kv_digests(cache: DynamicCache, tokens: int) -> list[str]:
    """xxh3_128 of the first `tokens` tokens' keys and values, one per chunk."""
    digests = []
    for start in range(0, tokens, CHUNK_TOKENS):
        hasher = xxhash.xxh3_128()
        for layer in cache.layers:
            for plane in (layer.keys, layer.values):
                part = plane[0, :, start : min(start + CHUNK_TOKENS, tokens)]
                hasher.update(part.contiguous().view(torch.uint8).numpy())
        digests.append(hasher.hexdigest())
    return digests


def drop_page_cache(folder: Path) -> None:
    """Write out all files in `folder` and ask the kernel to forget what it holds of them."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def device_bytes_read() -> int:
    """Bytes that this process made the kernel fetch from block devices; 0 where it does not say."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("read_bytes:")).split()[1])
    return 0
