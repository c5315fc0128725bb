"""`PrefixCache`: a model's KV, stored by prompt and restored for the longest known prefix."""

from __future__ import annotations

from collections import deque
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import DynamicCache

from kvtier.errors import InvalidRequest
from kvtier.integrations.hf.checks import check_cache, check_ids, check_mode, check_model, inner_model
from kvtier.integrations.hf.tensors import Restored, gather
from kvtier.integrations.hf.weights import weights_digest
from kvtier.layout import KVLayout, Namespace
from kvtier.types import Status

if TYPE_CHECKING:
    from collections.abc import Generator

    from kvtier.store.lease import Lease, Until
    from kvtier.store.store import Store
    from kvtier.store.transfer import Transfer
    from kvtier.types import BatchResult, ChunkKey

READ_AHEAD = 64 << 20
"""Bytes of chunks leased or being read at any time while a cache is restored."""
READ_BYTES = 8 << 20
"""Bytes of chunks per read, or one chunk: enough to make the cost of a call vanish."""


def kv_layout(model: Any, *, chunk_tokens: int = 256) -> KVLayout:
    """Shape of one chunk of `model`'s KV: its `chunk_bytes` are what a store should be opened for.

    Raises UnsupportedModel for a model that cannot be restored exactly.
    """
    inner = inner_model(model)
    check_model(inner)
    config = inner.config
    heads: int = config.num_attention_heads
    return KVLayout(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=str(inner.dtype).removeprefix("torch."),
        chunk_tokens=chunk_tokens,
    )


class PrefixCache:
    """Stores and restores the KV cache of a transformers decoder. Thread-safe if the model is.

    `input_ids` is always an integer tensor of shape (batch, tokens): prompts of equal length, without
    padding. Each row is stored by itself, in chunks of `chunk_tokens`, in the dtype the model runs in.

        prefix_cache = PrefixCache(model, store)
        output_ids = prefix_cache.generate(input_ids, max_new_tokens=64)

    or, step by step,

        cache, restored = prefix_cache.restore(input_ids)
        logits = prefix_cache.prefill(input_ids, cache)
        prefix_cache.save(input_ids, cache)

    What a model's KV depends on besides the tokens (weights, adapters, config) is part of every key,
    and followed when it changes: see `weights_digest`. The store stays the caller's to close.
    """

    def __init__(
        self, model: Any, store: Store, *, chunk_tokens: int = 256, salt: str = "", lora: str = ""
    ) -> None:
        """Read the model's weights once, unless `weights_digest(model)` already did.

        `salt` keeps tenants apart: nothing stored under it is found without it. `lora` names an
        adapter that is applied outside of the model's parameters.

        Raises UnsupportedModel for a model that cannot be restored exactly, InvalidRequest for a
        `chunk_tokens` below 1.
        """
        self.layout = kv_layout(model, chunk_tokens=chunk_tokens)
        """Shape of one chunk's payload."""
        inner = inner_model(model)
        self._model = model
        self._inner = inner
        self._config = inner.config
        self._store = store
        self._salt = salt
        self._lora = lora
        self.namespace()

    def namespace(self) -> Namespace:
        """What keys are made under now. Differs as soon as the weights or adapters do."""
        return Namespace(
            model=type(self._inner).__name__,
            weights=weights_digest(self._model),
            layout=self.layout,
            lora=self._lora,
            salt=self._salt,
        )

    def keys(
        self, input_ids: torch.Tensor, *, attention_mask: torch.Tensor | None = None
    ) -> list[list[ChunkKey]]:
        """Keys of the full chunks, row by row. Raises as `restore` does."""
        check_ids(input_ids, attention_mask, self._config)
        namespace = self.namespace()
        return [namespace.chunk_keys(row) for row in input_ids.cpu().numpy()]

    def save(
        self,
        input_ids: torch.Tensor,
        cache: DynamicCache,
        *,
        attention_mask: torch.Tensor | None = None,
        until: Until = "dram",
    ) -> Transfer[BatchResult]:
        """Store all full chunks of `input_ids` whose KV `cache` holds.

        `cache` must come from exactly these tokens; it may hold fewer, or more behind them. Chunks
        that the store has are not touched. `cache` is free on return; the transfer is done when
        the tier `until` names has every chunk, its result has an entry per distinct chunk, row
        after row.

        Raises UnsupportedModel for another kind of cache than a plain DynamicCache, InvalidRequest
        for one of another model, batch or dtype, and for ids as `restore` does.
        """
        check_mode(self._inner)
        rows = self.keys(input_ids, attention_mask=attention_mask)
        held = check_cache(cache, self.layout, len(rows)) // self.layout.chunk_tokens
        places: dict[ChunkKey, tuple[int, int]] = {}
        for row, keys in enumerate(rows):
            for chunk, key in enumerate(keys[:held]):
                places.setdefault(key, (row, chunk))
        size = self.layout.chunk_bytes
        with self._store.reserve(list(places), size) as reservation:
            if not (reservation.result.status == Status.REFUSED).any():
                for (row, chunk), slot in zip(places.values(), reservation.views, strict=True):
                    if slot is not None:
                        gather(cache, row, chunk, slot, self.layout)
                return reservation.commit(until=until)
        # More than DRAM has room for now: a put waits for it, but needs copies to wait with.
        copies = [np.empty(size, np.uint8) for _ in places]
        for (row, chunk), copy in zip(places.values(), copies, strict=True):
            gather(cache, row, chunk, copy, self.layout)
        return self._store.put(list(places), copies, until=until)

    def restore(
        self, input_ids: torch.Tensor, *, attention_mask: torch.Tensor | None = None
    ) -> tuple[DynamicCache, int]:
        """A fresh cache with the longest prefix that is stored for every row, and its tokens.

        The count is a multiple of `chunk_tokens`, except when everything is stored: then it is one
        less than there are tokens, as the last one must be computed to get logits. An empty cache
        and 0 if nothing is stored. Feed the cache exactly the ids behind the prefix (`prefill`),
        or all ids to `model.generate(input_ids, cache=cache)`.

        Raises InvalidRequest for ids that are not an integer tensor (batch, tokens), for padding,
        and UnsupportedModel while the model is in training mode. Never for anything a disk can do.
        """
        check_mode(self._inner)
        rows = self.keys(input_ids, attention_mask=attention_mask)
        cache = DynamicCache(config=self._config)
        chunks = min(self._store.match(keys) for keys in rows)
        if chunks == 0:
            return cache, 0
        batch, tokens = input_ids.shape
        room = Restored(self.layout, batch, tokens + self.layout.chunk_tokens, self._inner.device)
        # Chunk by chunk over all rows, so that whatever arrives is a prefix of each.
        places = [(row, chunk) for chunk in range(chunks) for row in range(batch)]
        done = 0
        # Pinned as a whole: nothing is evicted on the way, and the prefix ages from its tail.
        with self._store.pin([key for keys in rows for key in keys[:chunks]]):
            for ahead in (READ_AHEAD // self.layout.chunk_bytes, 1):
                # A small store may refuse that many leases at once, but has room for one.
                done += self._load(rows, places[done:], max(1, ahead), room)
        restored = min(done // batch * self.layout.chunk_tokens, tokens - 1)
        if restored:
            room.fill(cache, restored)
        return cache, restored

    def _load(
        self, rows: list[list[ChunkKey]], places: list[tuple[int, int]], ahead: int, room: Restored
    ) -> int:
        """Copy chunks into `room` with up to `ahead` of them leased; how many came before one did not."""
        size = max(1, min(READ_BYTES // self.layout.chunk_bytes, ahead // 4))
        keys = [rows[row][chunk] for row, chunk in places]
        batches = [keys[start : start + size] for start in range(0, len(keys), size)]
        done = 0
        with closing(self._leases(batches, max(1, ahead // size))) as leases:
            for lease in leases:
                for view in lease.views:
                    if view is None or view.nbytes != self.layout.chunk_bytes:
                        return done
                    row, chunk = places[done]
                    room.scatter(row, chunk, view)
                    done += 1
        return done

    def _leases(self, batches: list[list[ChunkKey]], ahead: int) -> Generator[Lease]:
        """One lease per batch, up to `ahead` being read; closing the generator releases them all."""
        remaining = iter(batches)
        reading = deque(self._store.read(keys) for keys in islice(remaining, ahead))
        try:
            while reading:
                with reading.popleft().result() as lease:
                    yield lease
                reading.extend(self._store.read(keys) for keys in islice(remaining, 1))
        finally:
            for transfer in reading:
                transfer.cancel()
                transfer.result().release()

    def prefill(
        self, input_ids: torch.Tensor, cache: DynamicCache, *, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the model on the ids that `cache` does not hold; logits of the last, (batch, 1, vocab).

        `cache` holds all of `input_ids` afterwards. `attention_mask` can only say that nothing is padded.

        Raises InvalidRequest if `cache` already holds as many tokens as `input_ids` has, or if its
        layers disagree.
        """
        check_ids(input_ids, attention_mask, self._config)
        held = check_cache(cache, self.layout, len(input_ids)) if cache.get_seq_length() else 0
        total = input_ids.shape[1]
        if held >= total:
            raise InvalidRequest(
                f"cache holds {held} tokens and input_ids has {total}: at least one must be left to compute"
            )
        positions = torch.arange(held, total, device=input_ids.device).unsqueeze(0)
        with torch.no_grad():
            output = self._model(
                input_ids=input_ids[:, held:],
                position_ids=positions,
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        if cache.get_seq_length() != total:
            raise InvalidRequest(f"cache holds {cache.get_seq_length()} tokens after {total} were fed")
        return output.logits

    def generate(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """`model.generate(input_ids, **kwargs)`, starting from what is stored and storing the rest.

        Returns what `model.generate` returns. What it generated is stored too, for the next turn of
        a conversation.

        Raises InvalidRequest for beam search and other arguments that change the cache's rows or
        kind, and for ids and masks as `restore` does.
        """
        self._check_generation(kwargs)
        mask = kwargs.pop("attention_mask", None)
        cache, _ = self.restore(input_ids, attention_mask=mask)
        ones = torch.ones_like(input_ids)  # else generate() takes the padding token for padding
        output = self._model.generate(input_ids, cache=cache, attention_mask=ones, **kwargs)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        self.save(sequences, cache, attention_mask=torch.ones_like(sequences))
        return output

    def _check_generation(self, kwargs: dict[str, Any]) -> None:
        for name in ("cache", "past_key_values", "inputs_embeds", "position_ids", "assistant_model"):
            if kwargs.get(name) is not None:
                raise InvalidRequest(
                    f"generate() got {name}, needs token ids alone: call model.generate yourself"
                )
        config = kwargs.get("generation_config") or self._inner.generation_config
        for name, needs in (
            ("num_beams", 1),
            ("num_return_sequences", 1),
            ("cache_implementation", "dynamic"),
        ):
            got = kwargs.get(name, getattr(config, name, None))
            if got is not None and got != needs:
                raise InvalidRequest(f"{name} is {got!r}, needs {needs!r}")
        if kwargs.get("use_cache", True) is False:
            raise InvalidRequest("use_cache is False, needs True")
