"""`PrefixCache`: a model's KV, stored by prompt and restored for the longest known prefix."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from transformers import DynamicCache

from kvtier.codec import parse_codec
from kvtier.connector.layers import LayerLoad
from kvtier.connector.load import Load
from kvtier.connector.mover import Inline
from kvtier.connector.operation import Means
from kvtier.connector.request import Pin
from kvtier.errors import InvalidRequest
from kvtier.integrations.hf.checks import check_cache, check_ids, check_mode, check_model, inner_model
from kvtier.integrations.hf.restoring import Restoring
from kvtier.integrations.hf.tensors import Restored, gather
from kvtier.integrations.hf.weights import weights_digest
from kvtier.layout import KVLayout, Namespace
from kvtier.owner import Owner, check_tenant
from kvtier.types import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kvtier.store.lease import Until
    from kvtier.store.store import Store
    from kvtier.store.transfer import Transfer
    from kvtier.types import BatchResult, ChunkKey


LoadT = TypeVar("LoadT", bound=Load)


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

        logits, cache, restored = prefix_cache.restore_and_prefill(input_ids)
        prefix_cache.save(input_ids, cache)

    What a model's KV depends on besides the tokens (weights, adapters, config) is part of every key,
    and followed when it changes: see `weights_digest`. The store stays the caller's to close.
    """

    def __init__(
        self,
        model: Any,
        store: Store,
        *,
        chunk_tokens: int = 256,
        salt: str = "",
        lora: str = "",
        codec: str = "raw",
        tenant: str = "",
        ttl: float | None = None,
    ) -> None:
        """Read the model's weights once, unless `weights_digest(model)` already did.

        `salt` keeps tenants apart: nothing stored under it is found without it. `lora` names an
        adapter that is applied outside of the model's parameters. `codec` is how the disk tier stores
        the chunks, see `Store.put`; it is not part of the keys. Nor are `tenant`, whom they count for
        besides their namespace, and `ttl`, the seconds they live (default: the store's).

        Raises UnsupportedModel for a model that cannot be restored exactly, InvalidRequest for a
        `chunk_tokens` below 1, an unknown codec, or a tenant's name that is too long.
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
        parse_codec(codec)
        self._codec = codec
        check_tenant(tenant)
        self._tenant = tenant
        self._ttl = ttl
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
        return self._keys(self.namespace(), input_ids)

    def _keys(self, namespace: Namespace, input_ids: torch.Tensor) -> list[list[ChunkKey]]:
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
        check_ids(input_ids, attention_mask, self._config)
        namespace = self.namespace()
        rows = self._keys(namespace, input_ids)
        held = check_cache(cache, self.layout, len(rows)) // self.layout.chunk_tokens
        places: dict[ChunkKey, tuple[int, int]] = {}
        for row, keys in enumerate(rows):
            for chunk, key in enumerate(keys[:held]):
                places.setdefault(key, (row, chunk))
        size = self.layout.chunk_bytes
        table = _table(list(places.values()))
        owner = Owner(namespace.digest(), self._tenant)
        with self._store.reserve(list(places), size, owner=owner) as reservation:
            if not (reservation.result.status == Status.REFUSED).any():
                slots = [(i, view) for i, view in enumerate(reservation.views) if view is not None]
                gather(cache, self.layout, [view for _, view in slots], table[[i for i, _ in slots]])
                return reservation.commit(until=until, codec=self._codec, ttl=self._ttl)
        # More than DRAM has room for now: a put waits for it, but needs copies to wait with.
        copies = [np.empty(size, np.uint8) for _ in places]
        gather(cache, self.layout, copies, table)
        return self._store.put(
            list(places), copies, until=until, codec=self._codec, owner=owner, ttl=self._ttl
        )

    def restore(
        self, input_ids: torch.Tensor, *, attention_mask: torch.Tensor | None = None
    ) -> tuple[DynamicCache, int]:
        """A fresh cache with the longest prefix that is stored for every row, and its tokens.

        The count is a multiple of `chunk_tokens`, except when everything is stored: then it is one
        less than there are tokens, as the last one must be computed to get logits. An empty cache
        and 0 if nothing is stored; what does not come within the store's `get_timeout` is left out.
        Feed the cache exactly the ids behind the prefix (`prefill`), or all ids to
        `model.generate(input_ids, cache=cache)`.

        Raises InvalidRequest for ids that are not an integer tensor (batch, tokens), for padding,
        and UnsupportedModel while the model is in training mode. Never for anything a disk can do.
        """
        here = Inline()
        load, room = self._load(input_ids, attention_mask, here, Load)
        cache = DynamicCache(config=self._config)
        batch, tokens = input_ids.shape
        done = here.run(load).chunks.prefix
        restored = min(done // batch * self.layout.chunk_tokens, tokens - 1)
        if restored:
            room.fill(cache, restored)
        return cache, restored

    def restore_and_prefill(
        self, input_ids: torch.Tensor, *, attention_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, DynamicCache, int]:
        """`restore` and `prefill` at once: logits of the last token, the cache, and how much was restored.

        Layers of the prefix are read in their order, and each layer of the model waits for its own alone:
        where reading and computing take equally long, the logits are there in not much more than half the
        time. What is found to be missing or bad on the way is computed, with all that is behind it, as
        `restore` would have it.

        Raises as `restore` and `prefill` do.
        """
        with self._restoring(input_ids, attention_mask) as restoring:
            return restoring.use(lambda cache: self.prefill(input_ids, cache, attention_mask=attention_mask))

    def _restoring(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> Restoring:
        here = Inline()
        make = partial(LayerLoad, layers=self.layout.layers)
        load, room = self._load(input_ids, attention_mask, here, make)
        batch, tokens = input_ids.shape
        return Restoring(here, load, room, self._config, batch=batch, most=tokens - 1)

    def _load(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        here: Inline,
        make: Callable[..., LoadT],
    ) -> tuple[LoadT, Restored]:
        """A load of all that is stored of every row, and what it fills."""
        check_mode(self._inner)
        rows = self.keys(input_ids, attention_mask=attention_mask)
        chunks = min(self._store.match(keys) for keys in rows)
        batch, tokens = input_ids.shape
        room = Restored(
            self.layout, batch, tokens + self.layout.chunk_tokens if chunks else 0, self._inner.device
        )
        # Chunk by chunk over all rows, so that whatever arrives is a prefix of each.
        places = [(row, chunk) for chunk in range(chunks) for row in range(batch)]
        keys = [rows[row][chunk] for row, chunk in places]
        load = make(
            Means(self._store, here, self.layout.chunk_bytes, lambda _: None),
            keys,
            _table(places),
            room.scatter,
            self._store.config.get_timeout,
            pin=Pin(self._store, keys),
            head=(),
            span=(0, chunks * self.layout.chunk_tokens),
            chunk_tokens=self.layout.chunk_tokens,
        )
        return load, room

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

        What is stored is loaded layer by layer beside the first step, as in `restore_and_prefill`, unless
        the model is compiled or streams what it generates: then before it.

        Returns what `model.generate` returns. What it generated is stored too, for the next turn of
        a conversation.

        Raises InvalidRequest for beam search and other arguments that change the cache's rows or
        kind, and for ids and masks as `restore` does.
        """
        self._check_generation(kwargs)
        mask = kwargs.pop("attention_mask", None)

        def run(cache: DynamicCache) -> Any:
            ones = torch.ones_like(input_ids)  # else generate() takes the padding token for padding
            return self._model.generate(input_ids, cache=cache, attention_mask=ones, **kwargs)

        if kwargs.get("streamer") is not None or hasattr(self._model, "_orig_mod"):
            cache, _ = self.restore(input_ids, attention_mask=mask)
            output = run(cache)
        else:
            with self._restoring(input_ids, mask) as restoring:
                output, cache, _ = restoring.use(run)
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


def _table(places: list[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """Batch row and chunk number of each chunk, for copiers of caches."""
    return np.array(places, np.int64).reshape(-1, 2)
