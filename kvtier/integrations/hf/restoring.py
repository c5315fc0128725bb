"""Restoring: a prefix that is loaded layer by layer while the model computes what is behind it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

from transformers import DynamicCache

from kvtier.types import Reason

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, Self

    from kvtier.connector.layers import LayerLoad
    from kvtier.connector.mover import Inline
    from kvtier.integrations.hf.tensors import Restored

T = TypeVar("T")


class _PrefixShrank(Exception):
    """Some of the prefix that the model is attending to cannot be had."""


class Restoring:
    """A load under way, as a context manager that ends it. The thread that computes also copies."""

    def __init__(
        self, here: Inline, load: LayerLoad, room: Restored, config: Any, *, batch: int, most: int
    ) -> None:
        """Begin to load into `room`; `most` tokens at most are to be used."""
        self._here = here
        self._load = load
        self._room = room
        self._config = config
        self._batch = batch
        self._most = most
        self._used = 0
        here.begin(load)

    def use(self, run: Callable[[DynamicCache], T]) -> tuple[T, DynamicCache, int]:
        """What `run` makes of a cache that holds the prefix, the cache, and the prefix's tokens.

        It is run once more, with a shorter prefix, if that is found not to be there before `run` is through
        the layers for the first time: it must not have done anything by then.
        """
        cache = self._cache(self._wait)
        try:
            return run(cache), cache, self._used
        except _PrefixShrank:
            self._here.work(lambda: False)
            cache = self._cache(None)
            return run(cache), cache, self._used

    def _cache(self, wait: Callable[[int], None] | None) -> DynamicCache:
        cache = DynamicCache(config=self._config)
        self._used = self._tokens()
        if self._used:
            self._room.fill(cache, self._used, wait)
        return cache

    def _tokens(self) -> int:
        return min(self._load.reach // self._batch * self._load.chunk_tokens, self._most)

    def _wait(self, layer: int) -> None:
        """Return when the tensors of a layer hold the prefix."""
        self._here.work(partial(self._load.has, layer))
        if self._tokens() < self._used:
            raise _PrefixShrank

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._load.stop(Reason.CANCELLED)
        self._here.work(lambda: False)
