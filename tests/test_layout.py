"""Layouts and namespaces."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import InvalidRequest
from kvtier.hashing import chunk_keys
from kvtier.layout import DTYPE_BYTES, KVLayout, Namespace, canonical

LAYOUT = KVLayout(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16")
NAMESPACE = Namespace(model="org/model", weights=bytes(range(32)), layout=LAYOUT)
CHANGES: dict[str, Any] = {
    "model": "org/other",
    "weights": bytes(32),
    "order": "layer,token,plane,head,dim",
    "tp_rank": 1,
    "tp_size": 3,
    "pp_rank": 1,
    "pp_size": 3,
    "lora": "adapter",
    "salt": "tenant",
    "algorithm": "xxh3_128",
    "layers": 31,
    "kv_heads": 4,
    "head_dim": 128,
    "dtype": "float16",
    "planes": 1,
    "chunk_tokens": 128,
}


def test_golden_digest() -> None:
    assert NAMESPACE.digest().hex() == "75e99647e34c0fa82669fa2d22b9c497ccf17de4baa3f4c3bc7b23c30763c2e4"


def test_every_field_is_covered() -> None:
    names = {field.name for kind in (KVLayout, Namespace) for field in fields(kind)}
    assert names - {"layout"} == set(CHANGES)


@pytest.mark.parametrize("name", CHANGES)
def test_invariant_12_every_field_changes_the_digest_and_every_key(name: str) -> None:
    base = replace(NAMESPACE, tp_size=2, pp_size=2)
    if name in {field.name for field in fields(KVLayout)}:
        other = replace(base, layout=replace(LAYOUT, **{name: CHANGES[name]}))
    else:
        other = replace(base, **{name: CHANGES[name]})
    assert other.digest() != base.digest()
    ids = np.arange(512, dtype=np.uint32)
    assert not set(other.chunk_keys(ids)) & set(base.chunk_keys(ids))


def test_equal_namespaces_have_equal_digests() -> None:
    assert replace(NAMESPACE, layout=replace(LAYOUT)).digest() == NAMESPACE.digest()


@pytest.mark.parametrize("algorithm", ["sha256", "xxh3_128"])
def test_keys_of_a_namespace_are_chunk_keys_under_its_digest(algorithm: Any) -> None:
    namespace = replace(NAMESPACE, algorithm=algorithm)
    ids = list(range(600))
    expected = chunk_keys(ids, namespace=namespace.digest(), chunk_tokens=256, algorithm=algorithm)
    assert namespace.chunk_keys(ids) == expected
    assert len(expected) == 2


VALUES = st.one_of(
    st.integers(-(2**70), 2**70),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    st.binary(max_size=6),
)
RECORDS = st.dictionaries(st.text("abis01", max_size=4), VALUES, max_size=4)


@given(RECORDS, RECORDS)
def test_different_records_never_share_an_encoding(first: dict[str, Any], second: dict[str, Any]) -> None:
    same = first == second and all(type(first[name]) is type(second[name]) for name in first)
    assert (canonical(first) == canonical(second)) == same


@given(RECORDS)
def test_the_order_of_fields_does_not_matter(record: dict[str, Any]) -> None:
    assert canonical(dict(reversed(record.items()))) == canonical(record)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": "1"}),
        ({"a": "x"}, {"a": b"x"}),
        ({"a": "bc"}, {"ab": "c"}),
        ({"a": ""}, {}),
        ({"a": "1", "b": "2"}, {"a": "1b2"}),
    ],
)
def test_encodings_that_could_be_confused_are_not(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert canonical(one) != canonical(other)


def test_golden_encoding() -> None:
    assert canonical({"b": 12, "a": "é"}) == (
        b"\x01\0\0\0a" b"\x01\0\0\0s" b"\x02\0\0\0\xc3\xa9" b"\x01\0\0\0b" b"\x01\0\0\0i" b"\x02\0\0\x0012"
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("planes", [1, 2])
def test_numbers_of_a_layout(dtype: str, planes: int) -> None:
    layout = KVLayout(layers=5, kv_heads=3, head_dim=16, dtype=dtype, planes=planes, chunk_tokens=32)
    width = {"float32": 4, "float16": 2, "bfloat16": 2}.get(dtype, 1)
    assert layout.shape == (5, planes, 32, 3, 16)
    assert layout.bytes_per_token == 5 * planes * 3 * 16 * width
    assert layout.chunk_bytes == np.prod(layout.shape) * width


def test_widths_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    assert {name: getattr(torch, name).itemsize for name in DTYPE_BYTES} == DTYPE_BYTES


@pytest.mark.parametrize("name", ["layers", "kv_heads", "head_dim", "chunk_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "3", None])
def test_counts_are_whole_numbers_from_one(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} is {value!r}, needs a whole number"):
        replace(LAYOUT, **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("planes", 0, "planes is 0, needs 1 or 2"),
        ("planes", 3, "planes is 3"),
        ("planes", "2", "planes is '2'"),
        ("dtype", "torch.bfloat16", "dtype is 'torch.bfloat16', needs one of float32"),
        ("dtype", "float64", "dtype is 'float64'"),
    ],
)
def test_wrong_layouts_are_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        replace(LAYOUT, **{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": bytes(31)}, "weights is 31 bytes, needs a digest of 32 bytes"),
        ({"weights": "x" * 32}, "weights is str"),
        ({"weights": None}, "weights is NoneType"),
        ({"tp_rank": 1}, "tp_rank is 1, needs to be from 0 to tp_size - 1 = 0"),
        ({"tp_rank": -1}, "tp_rank is -1"),
        ({"pp_rank": 4, "pp_size": 4}, "pp_rank is 4"),
        ({"pp_size": 0}, "pp_rank is 0, needs to be from 0 to pp_size - 1 = -1"),
    ],
)
def test_wrong_namespaces_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        replace(NAMESPACE, **changes)


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (NAMESPACE, {"model": None}),
        (NAMESPACE, {"model": 7}),
        (NAMESPACE, {"lora": None}),
        (NAMESPACE, {"salt": b"secret"}),
        (NAMESPACE, {"tp_rank": 0.0}),
        (NAMESPACE, {"tp_size": True}),
        (NAMESPACE, {"algorithm": "md5"}),
        (LAYOUT, {"planes": True}),
        (LAYOUT, {"planes": 2.0}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_wrong_types_are_refused_at_construction(base: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        replace(base, **changes)
