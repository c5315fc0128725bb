"""Request: one sequence of tokens as the keys of its chunks, and what is pinned for it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from kvtier.errors import StoreClosed
from kvtier.hashing import Algorithm, chunk_keys, derived_keys, token_ids

if TYPE_CHECKING:
    from types import TracebackType

    from kvtier.connector.mover import Mover
    from kvtier.owner import Owner
    from kvtier.store.store import Store
    from kvtier.types import ChunkKey

_AT_ONCE = 256
Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]


class Pin:
    """Chunks that are kept from eviction until `release`, which may come from any thread, and again."""

    def __init__(self, store: Store, keys: Sequence[ChunkKey]) -> None:
        held = store.pin(keys)
        self.count = held.__enter__()
        """How many keys from the first on are stored, and pinned."""
        self._held = [held]

    def release(self) -> None:
        """Let go of them."""
        try:
            held = self._held.pop()
        except IndexError:
            return
        held.__exit__(None, None, None)


def touch(store: Store, keys: Sequence[ChunkKey]) -> None:
    """Have what is stored of a prefix count as used now, the head last: so heads outlive tails."""
    with contextlib.suppress(StoreClosed):
        # In pieces, since others wait for the store's lock.
        for start in reversed(range(0, len(keys), _AT_ONCE)):
            Pin(store, keys[start : start + _AT_ONCE]).release()


class TokenKeys:
    """Chained keys of tokens, chunk by chunk."""

    def __init__(self, namespace: bytes, chunk_tokens: int, algorithm: Algorithm, extra: bytes) -> None:
        self._parent = namespace
        self._chunk_tokens = chunk_tokens
        self._algorithm: Algorithm = algorithm
        self._extra = extra
        self._rest = np.empty(0, "<u4")  # tokens behind the last full chunk

    def extend(self, tokens: Tokens) -> tuple[list[ChunkKey], int]:
        """The keys of the chunks that `tokens` complete, and how many tokens there were."""
        more = token_ids(tokens)
        rest = np.concatenate([self._rest, more])
        keys = chunk_keys(
            rest,
            namespace=self._parent,
            chunk_tokens=self._chunk_tokens,
            algorithm=self._algorithm,
            extra=self._extra,
        )
        self._rest = rest[len(keys) * self._chunk_tokens :]
        self._parent = keys[-1] if keys else self._parent
        return keys, len(more)


class HashKeys:
    """Keys from the engine's own block hashes: the last one of a chunk stands for all before it."""

    def __init__(self, namespace: bytes, blocks: int, block_tokens: int, extra: bytes) -> None:
        self._namespace = namespace
        self._blocks = blocks  # per chunk
        self._block_tokens = block_tokens
        self._extra = extra
        self._count = 0

    def extend(self, hashes: Sequence[bytes]) -> tuple[list[ChunkKey], int]:
        """The keys of the chunks that `hashes` complete, and the tokens of their blocks."""
        last = [h for i, h in enumerate(hashes, self._count + 1) if i % self._blocks == 0]
        keys = derived_keys(last, namespace=self._namespace, extra=self._extra)
        self._count += len(hashes)
        return keys, len(hashes) * self._block_tokens


class Request:
    """A sequence of tokens that an engine works on: `Connector.request` makes it.

    A context manager, or call `close` at its end: it holds pins from a match to its load. One thread at
    a time may use it.
    """

    def __init__(self, maker: TokenKeys | HashKeys, owner: Owner, mover: Mover) -> None:
        self.keys: list[ChunkKey] = []
        """Of its full chunks."""
        self.tokens = 0
        """How many tokens are known."""
        self.owner = owner
        """Whom the chunks that it saves count for."""
        self._maker = maker
        self._pins: list[Pin] = []
        # The collector may run anywhere, even under the store's lock: leave it to another thread.
        self._finalizer = weakref.finalize(self, _release_later, self._pins, mover)
        self._finalizer.atexit = False

    def extend(self, more: Any) -> None:
        """Append token ids, or block hashes, whichever it was made of. Raises as `chunk_keys` does."""
        keys, tokens = self._maker.extend(more)
        self.keys += keys
        self.tokens += tokens

    def close(self) -> None:
        """Let go of what a match pinned and no load took. Transfers go on. Idempotent."""
        while self._pins:
            self._pins.pop().release()

    def hold(self, pin: Pin) -> None:
        """Keep `pin` in place of the one before."""
        before, self._pins[:] = list(self._pins), [pin]
        for old in before:
            old.release()

    def take_pin(self) -> Pin | None:
        """Hand over the pin, to be released by somebody else."""
        return self._pins.pop() if self._pins else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _release_later(pins: list[Pin], mover: Mover) -> None:
    for pin in pins:
        mover.submit(pin.release)
