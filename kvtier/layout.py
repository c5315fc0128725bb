"""What a payload is: the KV of one chunk as bytes, and the namespace that tells payloads apart."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, get_args

from kvtier.errors import InvalidRequest
from kvtier.hashing import Algorithm, chunk_keys
from kvtier.types import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from kvtier.types import ChunkKey

NAMESPACE_VERSION = 1
DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The shape of one chunk's payload: C order, layer-major, little-endian.

    Raises InvalidRequest at construction for a count below 1 or an unknown dtype.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    """One of `DTYPE_BYTES`, spelled as torch does."""
    planes: int = 2
    """2: keys, then values; 1: MLA's single latent plane."""
    chunk_tokens: int = 256

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "chunk_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidRequest(f"{name} is {value!r}, needs a whole number of at least 1")
        if isinstance(self.planes, bool) or not isinstance(self.planes, int) or self.planes not in (1, 2):
            raise InvalidRequest(f"planes is {self.planes!r}, needs 1 or 2")
        if self.dtype not in DTYPE_BYTES:
            raise InvalidRequest(f"dtype is {self.dtype!r}, needs one of {', '.join(DTYPE_BYTES)}")

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(layers, planes, chunk_tokens, kv_heads, head_dim)."""
        return (self.layers, self.planes, self.chunk_tokens, self.kv_heads, self.head_dim)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers and planes."""
        return self.layers * self.planes * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one payload."""
        return self.bytes_per_token * self.chunk_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything that makes two payloads of the same tokens differ in meaning.

    Raises InvalidRequest at construction for a weights digest that is not 32 bytes, or a rank
    outside its size.
    """

    model: str
    weights: bytes
    """32-byte digest over every parameter's name, shape, dtype and bytes."""
    layout: KVLayout
    order: str = "layer,plane,token,head,dim"
    """Order of the payload's axes."""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    lora: str = ""
    salt: str = ""
    """A tenant's secret: nothing stored under it can be reached without it."""
    algorithm: Algorithm = "sha256"

    def __post_init__(self) -> None:
        if not isinstance(self.weights, bytes) or len(self.weights) != KEY_BYTES:
            got = (
                f"{len(self.weights)} bytes"
                if isinstance(self.weights, bytes)
                else type(self.weights).__name__
            )
            raise InvalidRequest(f"weights is {got}, needs a digest of 32 bytes")
        if not isinstance(self.layout, KVLayout):
            raise InvalidRequest(f"layout is {type(self.layout).__name__}, needs a KVLayout")
        for name in ("model", "order", "lora", "salt"):
            if not isinstance(getattr(self, name), str):
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}, needs a string")
        if self.algorithm not in get_args(Algorithm):
            raise InvalidRequest(
                f"algorithm is {self.algorithm!r}, needs one of {', '.join(get_args(Algorithm))}"
            )
        for name in ("tp_rank", "tp_size", "pp_rank", "pp_size"):
            if type(getattr(self, name)) is not int:
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}, needs a whole number")
        for axis in ("tp", "pp"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if not 0 <= rank < size:
                raise InvalidRequest(
                    f"{axis}_rank is {rank}, needs to be from 0 to {axis}_size - 1 = {size - 1}"
                )

    def digest(self) -> bytes:
        """32 bytes, the parent of every first chunk's key."""
        record: dict[str, Any] = {"version": NAMESPACE_VERSION, **asdict(self)}
        record.update(record.pop("layout"))
        return hashlib.sha256(canonical(record)).digest()

    def chunk_keys(self, tokens: Sequence[int] | npt.NDArray[np.integer[Any]]) -> list[ChunkKey]:
        """Keys of the full chunks of `tokens`, shape (t,), under this namespace."""
        return chunk_keys(
            tokens,
            namespace=self.digest(),
            chunk_tokens=self.layout.chunk_tokens,
            algorithm=self.algorithm,
        )


def canonical(record: dict[str, Any]) -> bytes:
    """`record` as bytes: fields sorted by name; name, type and value each with its length in front.

    Values are int, str or bytes. No two different records share an encoding.
    """
    encoded = b""
    for name in sorted(record):
        value = record[name]
        kind, data = {
            int: (b"i", str(value).encode()),
            str: (b"s", value.encode() if isinstance(value, str) else b""),
            bytes: (b"b", value if isinstance(value, bytes) else b""),
        }[type(value)]
        for item in (name.encode(), kind, data):
            encoded += len(item).to_bytes(4, "little") + item
    return encoded
