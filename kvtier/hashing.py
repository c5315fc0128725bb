"""Keys of chunks and checksums of payload parts. Both are formats: see docs/FORMAT.md."""

from __future__ import annotations

import hashlib
import operator
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.errors import InvalidRequest
from kvtier.types import KEY_BYTES, ChunkKey

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Algorithm = Literal["sha256", "xxh3_128"]
MAX_TOKEN = 2**32 - 1


def chunk_keys(
    tokens: Sequence[int] | npt.NDArray[np.integer[Any]],
    *,
    namespace: bytes,
    chunk_tokens: int = 256,
    algorithm: Algorithm = "sha256",
    extra: bytes = b"",
) -> list[ChunkKey]:
    """Keys of the full chunks of `tokens`: shape (t,) gives t // chunk_tokens keys of 32 bytes.

    Each key is the digest of its parent key (the first one's parent is `namespace`), the chunk's
    token ids as little-endian uint32, and `extra`. It depends on nothing else: not the process, the
    machine or its byte order. `namespace` is `Namespace.digest()`; it must differ wherever payloads
    differ. `xxh3_128` (zero-padded) is faster but not collision-resistant: one tenant only.

    Raises InvalidRequest for ids that are not integers from 0 to 2**32 - 1, for an array that is
    not one-dimensional, and for a namespace that is not 32 bytes.
    """
    _check_namespace(namespace, extra)
    if isinstance(chunk_tokens, bool) or not isinstance(chunk_tokens, int) or chunk_tokens < 1:
        raise InvalidRequest(f"chunk_tokens is {chunk_tokens!r}, needs a whole number of at least 1")
    digest = _digest(algorithm)
    data = token_ids(tokens).tobytes()
    step = 4 * chunk_tokens
    parent = namespace
    keys = []
    for start in range(0, len(data) - step + 1, step):
        parent = digest(parent + data[start : start + step] + extra)
        keys.append(ChunkKey(parent))
    return keys


def derived_keys(hashes: Sequence[bytes], *, namespace: bytes, extra: bytes = b"") -> list[ChunkKey]:
    """Keys for an engine that brings its own block hashes: the digest of namespace, hash, extra.

    The hashes must already be chained. Raises InvalidRequest unless all are bytes of one length, and
    for a namespace that is not 32 bytes.
    """
    _check_namespace(namespace, extra)
    hashes = list(hashes)
    for i, block_hash in enumerate(hashes):
        if not isinstance(block_hash, bytes) or len(block_hash) != len(hashes[0]) or not block_hash:
            raise InvalidRequest(f"hashes[{i}] is {block_hash!r}, needs bytes, of one length in all of them")
    return [ChunkKey(hashlib.sha256(namespace + block_hash + extra).digest()) for block_hash in hashes]


def _check_namespace(namespace: bytes, extra: bytes) -> None:
    if not isinstance(namespace, bytes) or len(namespace) != KEY_BYTES:
        got = f"{len(namespace)} bytes" if isinstance(namespace, bytes) else type(namespace).__name__
        raise InvalidRequest(f"namespace is {got}, needs the 32 bytes of Namespace.digest()")
    if not isinstance(extra, bytes):
        raise InvalidRequest(f"extra is {type(extra).__name__}, needs bytes")


def token_ids(tokens: Sequence[int] | npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.uint32]:
    """`tokens` as little-endian uint32, shape (t,). Raises InvalidRequest as `chunk_keys` does."""
    if not isinstance(tokens, np.ndarray):
        tokens = _from_array_like(tokens) if hasattr(tokens, "__array__") else _from_sequence(tokens)
    if tokens.ndim != 1:
        raise InvalidRequest(f"tokens has shape {tokens.shape}, needs one dimension")
    if tokens.dtype == np.uint32:
        return tokens.astype("<u4", copy=False)
    if tokens.size == 0:
        return np.empty(0, "<u4")
    if not np.issubdtype(tokens.dtype, np.integer):
        raise InvalidRequest(f"tokens holds {tokens.dtype}, needs integers from 0 to {MAX_TOKEN}")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high > MAX_TOKEN:
        raise InvalidRequest(f"tokens holds {low if low < 0 else high}, needs integers from 0 to {MAX_TOKEN}")
    return tokens.astype("<u4")


def _from_array_like(tokens: Any) -> npt.NDArray[Any]:
    """A tensor's ids with its own shape and dtype, for `token_ids` to judge."""
    try:
        return np.asarray(tokens)
    except (TypeError, RuntimeError) as error:
        raise InvalidRequest(f"tokens is {type(tokens).__name__} that NumPy cannot read: {error}") from None


def _from_sequence(tokens: Sequence[int]) -> npt.NDArray[Any]:
    """Exact integers only: NumPy would turn booleans and floats into ids without a word."""
    needs = f"needs integers from 0 to {MAX_TOKEN}"
    try:
        tokens = list(tokens)
    except TypeError:
        raise InvalidRequest(f"tokens is {type(tokens).__name__}, needs a sequence of ids") from None
    for i, token in enumerate(tokens):
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise InvalidRequest(f"tokens[{i}] is {token!r} ({type(token).__name__}), {needs}")
    ids = [operator.index(token) for token in tokens]
    if ids and not (min(ids) >= 0 and max(ids) <= MAX_TOKEN):
        wrong = next(i for i, token in enumerate(ids) if not 0 <= token <= MAX_TOKEN)
        raise InvalidRequest(f"tokens[{wrong}] is {ids[wrong]}, {needs}")
    return np.array(ids, "<u4")


def _digest(algorithm: str) -> Callable[[bytes], bytes]:
    if algorithm == "sha256":
        return lambda data: hashlib.sha256(data).digest()
    if algorithm == "xxh3_128":
        return lambda data: xxhash.xxh3_128_digest(data).ljust(KEY_BYTES, b"\0")
    raise InvalidRequest(f"algorithm is {algorithm!r}, needs one of {', '.join(get_args(Algorithm))}")


def part_seed(key: bytes, generation: int, slab_id: bytes) -> int:
    """Checksum seed of a payload's part 0; part j uses the seed + j, modulo 2**64.

    It binds a payload to its key, to one use of its slot and to its slab, so that a swapped slot, a
    stale one or another store's file fails its checksum.
    """
    return xxhash.xxh3_64_intdigest(key + generation.to_bytes(8, "little") + slab_id)
