"""Keys and seeds are formats: pinned here, independent of process and machine."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvtier
from kvtier.errors import InvalidRequest
from kvtier.hashing import chunk_keys, derived_keys, part_seed, token_ids

NAMESPACE = bytes(range(32))
GOLDEN = [
    (
        "sha256",
        1,
        1,
        b"",
        1,
        "70f4003d52b6eb03da852e93256b5986b5d4883098bb7973bc5318cc66637a84",
        "70f4003d52b6eb03da852e93256b5986b5d4883098bb7973bc5318cc66637a84",
    ),
    (
        "sha256",
        16,
        16,
        b"",
        1,
        "667bbeabed6ae3423baf72bf2bb5a419a0d9a1d83ba7ecc61770171abe990fbf",
        "667bbeabed6ae3423baf72bf2bb5a419a0d9a1d83ba7ecc61770171abe990fbf",
    ),
    (
        "sha256",
        700,
        256,
        b"",
        2,
        "d202bbd1672bed34b9f9c73e5a779430668fd610aa284b8cf0daa215377151ef",
        "bdb38bd858adbd458675bcd02b933099309576d218e65331aaa7dbe91c8db17c",
    ),
    (
        "sha256",
        700,
        16,
        b"",
        43,
        "667bbeabed6ae3423baf72bf2bb5a419a0d9a1d83ba7ecc61770171abe990fbf",
        "468125f37b96729cdb8d62288955850844b1878d9e421e4455d8bc73a466c327",
    ),
    (
        "sha256",
        50,
        16,
        b"adapter",
        3,
        "82886d9b3f0635e6bdedfc6d3665e521511b0b9221ea983aa918f8db5152e8e8",
        "e26ba29108e218697e65f2413c2b5d83523d347e5556e7cd2c0b8f182fd07cbe",
    ),
    (
        "xxh3_128",
        1,
        1,
        b"",
        1,
        "5846e8a24e6642f1cd9655c2b18ac98b00000000000000000000000000000000",
        "5846e8a24e6642f1cd9655c2b18ac98b00000000000000000000000000000000",
    ),
    (
        "xxh3_128",
        16,
        16,
        b"",
        1,
        "80ebd6145c8550e212412ab6d3afa5a800000000000000000000000000000000",
        "80ebd6145c8550e212412ab6d3afa5a800000000000000000000000000000000",
    ),
    (
        "xxh3_128",
        700,
        256,
        b"",
        2,
        "8e3f587aef63841ad0c2bbe3d49db3fe00000000000000000000000000000000",
        "4096ef2aed31be2ab69cf9ee5d54354100000000000000000000000000000000",
    ),
    (
        "xxh3_128",
        700,
        16,
        b"",
        43,
        "80ebd6145c8550e212412ab6d3afa5a800000000000000000000000000000000",
        "050fcd8d0e66552b811eefc5a0945c8000000000000000000000000000000000",
    ),
    (
        "xxh3_128",
        50,
        16,
        b"adapter",
        3,
        "11f767965fbc6840cddb1dae868d54ed00000000000000000000000000000000",
        "9386bac28cd56e54d2cef7490899d62700000000000000000000000000000000",
    ),
]


def tokens(count: int) -> list[int]:
    """Ids from the whole range of 32 bits."""
    return [i * 2654435761 % 2**32 for i in range(count)]


@pytest.mark.parametrize(("algorithm", "count", "chunk", "extra", "n", "first", "last"), GOLDEN)
def test_golden_keys(
    algorithm: Any, count: int, chunk: int, extra: bytes, n: int, first: str, last: str
) -> None:
    found = chunk_keys(
        tokens(count), namespace=NAMESPACE, chunk_tokens=chunk, algorithm=algorithm, extra=extra
    )
    assert len(found) == n
    assert (found[0].hex(), found[-1].hex()) == (first, last)


def test_golden_derived_key_and_seed() -> None:
    (key,) = derived_keys([b"block"], namespace=NAMESPACE, extra=b"x")
    assert key.hex() == "16a7132391d9ca50f5b864018ee52ad8130940dfdb95b991f8f51d376aee0153"
    assert part_seed(NAMESPACE, 7, bytes(range(16))) == 2395850050304133379
    assert part_seed(bytes(32), 2**64 - 1, bytes(16)) == 3893960235208729445


@pytest.mark.parametrize("count", [0, 1, 15])
def test_a_tail_shorter_than_a_chunk_has_no_key(count: int) -> None:
    assert chunk_keys(tokens(count), namespace=NAMESPACE, chunk_tokens=16) == []
    longer = chunk_keys(tokens(16 + count), namespace=NAMESPACE, chunk_tokens=16)
    assert longer == chunk_keys(tokens(16), namespace=NAMESPACE, chunk_tokens=16)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=8, max_size=60))
def test_lists_and_arrays_of_any_width_agree(ids: list[int]) -> None:
    expected = chunk_keys(ids, namespace=NAMESPACE, chunk_tokens=4)
    arrays = [np.array(ids, kind) for kind in ("<u4", "<i4", "<i8", "<u8", ">u4", ">i8")]
    arrays += [np.repeat(np.array(ids, "<u4"), 2)[::2]]
    for form in (tuple(ids), [np.int64(i) for i in ids], *arrays):
        assert chunk_keys(form, namespace=NAMESPACE, chunk_tokens=4) == expected


def test_ids_of_torch_agree() -> None:
    torch = pytest.importorskip("torch")
    ids = torch.arange(40)
    expected = chunk_keys(list(range(40)), namespace=NAMESPACE, chunk_tokens=8)
    assert chunk_keys(ids, namespace=NAMESPACE, chunk_tokens=8) == expected
    assert chunk_keys(ids.numpy(), namespace=NAMESPACE, chunk_tokens=8) == expected


@given(st.data(), st.sampled_from(["sha256", "xxh3_128"]))
def test_a_changed_token_changes_exactly_the_keys_from_its_chunk_on(data: Any, algorithm: Any) -> None:
    ids = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=80))
    chunk = data.draw(st.integers(1, 12))
    at = data.draw(st.integers(0, len(ids) - 1))
    other = list(ids)
    other[at] ^= data.draw(st.integers(1, 2**32 - 1))
    args: dict[str, Any] = {"namespace": NAMESPACE, "chunk_tokens": chunk, "algorithm": algorithm}
    before, after = chunk_keys(ids, **args), chunk_keys(other, **args)
    same = [a == b for a, b in zip(before, after, strict=True)]
    assert same == [i < at // chunk for i in range(len(ids) // chunk)]
    assert len(set(before)) == len(before)


@pytest.mark.parametrize(
    "changed",
    [{"namespace": bytes(32)}, {"extra": b"x"}, {"chunk_tokens": 5}, {"algorithm": "xxh3_128"}],
    ids=lambda changed: next(iter(changed)),
)
def test_invariant_12_every_argument_changes_every_key(changed: dict[str, Any]) -> None:
    args: dict[str, Any] = {"namespace": NAMESPACE, "chunk_tokens": 4}
    assert not set(chunk_keys(tokens(40), **args)) & set(chunk_keys(tokens(40), **{**args, **changed}))


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_keys_do_not_depend_on_the_process(seed: str) -> None:
    code = (
        "import kvtier; ids = [i * 2654435761 % 2**32 for i in range(700)];"
        "print(kvtier.chunk_keys(ids, namespace=bytes(range(32)))[-1].hex())"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == GOLDEN[2][-1]


WRONG_TOKENS = {
    "negative": ([1, -1], r"tokens\[1\] is -1, needs"),
    "too large": ([1, 2**32], r"tokens\[1\] is 4294967296, needs"),
    "far too large": ([2**200], rf"tokens\[0\] is {2**200}, needs"),
    "a float": ([1, 2.0], r"tokens\[1\] is 2.0 \(float\), needs"),
    "a boolean": ([1, True], r"tokens\[1\] is True \(bool\), needs"),
    "a NumPy boolean": ([np.True_], r"tokens\[0\] is np.True_ \(bool\), needs"),
    "text": ("some text", r"tokens\[0\] is 's' \(str\), needs"),
    "none": (None, "tokens is NoneType, needs a sequence"),
    "a number": (7, "tokens is int, needs a sequence"),
    "rows": ([[1, 2], [3, 4]], r"tokens\[0\] is \[1, 2\] \(list\), needs"),
    "an array of floats": (np.ones(4), "tokens holds float64"),
    "an array of booleans": (np.ones(4, bool), "tokens holds bool"),
    "an array of objects": (np.array([1, None]), "tokens holds object"),
    "a negative array": (np.array([5, -7]), "tokens holds -7"),
    "an array too large": (np.array([2**32]), "tokens holds 4294967296"),
    "an unsigned array too large": (np.array([2**64 - 1], np.uint64), "tokens holds 18446744073709551615"),
    "a matrix": (np.ones((2, 2), np.uint32), r"tokens has shape \(2, 2\)"),
    "no dimension": (np.array(7, np.uint32), r"tokens has shape \(\)"),
}


@pytest.mark.parametrize("kind", WRONG_TOKENS)
def test_wrong_tokens_are_refused(kind: str) -> None:
    wrong, message = WRONG_TOKENS[kind]
    with pytest.raises(InvalidRequest, match=message):
        chunk_keys(wrong, namespace=NAMESPACE, chunk_tokens=1)
    with pytest.raises(InvalidRequest, match=r"^tokens"):
        token_ids(wrong)


def test_an_iterator_is_refused_or_read() -> None:
    try:
        found = chunk_keys(iter([1, 2, 3, 4]), namespace=NAMESPACE, chunk_tokens=2)  # type: ignore[arg-type]
    except InvalidRequest:
        return
    assert len(found) == 2


@pytest.mark.parametrize("rows", [[[1], [2]], [[True], [False]], [True, False]], ids=str)
def test_wrong_tensors_are_refused(rows: Any) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(InvalidRequest, match="tokens"):
        chunk_keys(torch.tensor(rows), namespace=NAMESPACE, chunk_tokens=1)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("namespace", bytes(31), "namespace is 31 bytes"),
        ("namespace", "x" * 32, "namespace is str"),
        ("namespace", bytearray(32), "namespace is bytearray"),
        ("namespace", None, "namespace is NoneType"),
        ("chunk_tokens", 0, "chunk_tokens is 0"),
        ("chunk_tokens", -1, "chunk_tokens is -1"),
        ("chunk_tokens", 1.5, "chunk_tokens is 1.5"),
        ("chunk_tokens", True, "chunk_tokens is True"),
        ("extra", "text", "extra is str"),
        ("extra", None, "extra is NoneType"),
        ("algorithm", "md5", "algorithm is 'md5', needs one of sha256, xxh3_128"),
    ],
)
def test_wrong_arguments_are_refused_by_name(argument: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        chunk_keys([1, 2], **{"namespace": NAMESPACE, argument: value})


@pytest.mark.parametrize(
    "arguments",
    [
        {"namespace": bytes(31)},
        {"namespace": None},
        {"extra": "x"},
        {"hashes": ["text"]},
        {"hashes": [7]},
        {"hashes": [b"ab", b"abc"]},
    ],
    ids=str,
)
def test_wrong_arguments_of_derived_keys_are_refused(arguments: dict[str, Any]) -> None:
    arguments = {"hashes": [b"block"], "namespace": NAMESPACE, **arguments}
    with pytest.raises(InvalidRequest):
        kvtier.derived_keys(arguments.pop("hashes"), **arguments)


@pytest.mark.parametrize("what", ["key", "generation", "slab"])
def test_invariant_1_the_seed_binds_key_generation_and_slab(what: str) -> None:
    seed = part_seed(NAMESPACE, 7, bytes(16))
    other = {
        "key": part_seed(bytes(32), 7, bytes(16)),
        "generation": part_seed(NAMESPACE, 8, bytes(16)),
        "slab": part_seed(NAMESPACE, 7, bytes([1] * 16)),
    }[what]
    assert seed != other
    assert abs(seed - other) > 2**17, "seeds of their parts overlap"
