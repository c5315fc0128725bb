"""Callers' memory as addresses, the arena, and copies."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from kvtier.buffers import HUGE_PAGE, Arena, copy_many, regions, zero
from kvtier.errors import InvalidRequest

torch = pytest.importorskip("torch")


def read(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


BUFFERS = {
    "ndarray": np.arange(24, dtype=np.uint8),
    "ndarray of floats": np.arange(6, dtype=np.float32),
    "ndarray of several dimensions": np.arange(24, dtype=np.int16).reshape(2, 3, 4),
    "structured ndarray": np.array([(1, 2.0)], [("a", "u1"), ("b", "f8")]),
    "bytearray": bytearray(b"some bytes"),
    "memoryview": memoryview(bytearray(b"some more bytes")),
    "memoryview of floats": memoryview(np.arange(6, dtype=np.float64).reshape(2, 3)),
    "slice of a memoryview": memoryview(bytearray(b"0123456789"))[3:7],
    "float32 tensor": torch.arange(6, dtype=torch.float32),
    "bfloat16 tensor": torch.arange(8, dtype=torch.bfloat16).reshape(2, 4),
    "float8 tensor": torch.arange(8, dtype=torch.float32).to(torch.float8_e4m3fn),
    "part of a tensor": torch.arange(100, dtype=torch.int32)[20:40],
    "parameter": torch.nn.Parameter(torch.ones(3)),
}


@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("writable", [False, True])
def test_a_region_is_exactly_the_bytes_of_the_buffer(kind: str, writable: bool) -> None:
    buffer: Any = BUFFERS[kind]
    if hasattr(buffer, "data_ptr"):
        expected = buffer.detach().contiguous().view(torch.uint8).numpy().tobytes()
    else:
        expected = memoryview(buffer).tobytes()
    (address,), (nbytes,) = regions([buffer], name="into", writable=writable)
    assert read(address, nbytes) == expected


def test_bytes_are_a_source_but_no_target() -> None:
    source = b"immutable"
    (address,), (nbytes,) = regions([source], name="source", writable=False)
    assert read(address, nbytes) == source
    with pytest.raises(InvalidRequest, match=r"into\[0\] is read-only"):
        regions([source], name="into", writable=True)


def test_regions_come_in_order() -> None:
    buffers = [bytearray([i] * (i + 1)) for i in range(20)]
    addresses, lengths = regions(buffers, name="source", writable=False)
    assert [read(a, n) for a, n in zip(addresses, lengths, strict=True)] == [bytes(b) for b in buffers]
    assert regions([], name="source", writable=False) == ([], [])


@pytest.mark.parametrize("shape", [(5, 7), (4, 2, 3), (1, 9), (0, 3)])
def test_an_array_has_a_row_per_key(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(1).integers(0, 2**16, shape, np.uint16)
    addresses, lengths = regions(array, name="into", writable=True)
    assert [read(a, n) for a, n in zip(addresses, lengths, strict=True)] == [row.tobytes() for row in array]


def test_rows_may_lie_apart() -> None:
    wide = np.arange(60, dtype=np.uint8).reshape(6, 10)
    array = wide[::2, :4]
    addresses, lengths = regions(array, name="into", writable=True)
    assert lengths == [4, 4, 4]
    assert [read(a, n) for a, n in zip(addresses, lengths, strict=True)] == [row.tobytes() for row in array]


def test_a_tensor_has_a_row_per_key() -> None:
    tensor = torch.arange(24, dtype=torch.int32).reshape(4, 6)
    addresses, lengths = regions(tensor, name="into", writable=True)
    assert lengths == [24] * 4
    assert b"".join(map(read, addresses, lengths)) == tensor.numpy().tobytes()


def test_invariant_1_an_array_of_one_dimension_has_an_item_per_key() -> None:
    array = np.arange(1, 5, dtype=np.uint64)
    addresses, lengths = regions(array, name="source", writable=False)
    assert lengths == [8] * 4
    assert np.diff(addresses).tolist() == [8] * 3
    assert addresses[0] == array.ctypes.data


def test_rows_may_run_backwards() -> None:
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)[::-1]
    addresses, lengths = regions(array, name="source", writable=False)
    assert b"".join(map(read, addresses, lengths)) == array.tobytes()


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


WRONG = {
    "a list": ([[1, 2, 3]], False, r"\[0\] is list, needs"),
    "a number": ([7], False, r"\[0\] is int, needs"),
    "none": ([None], False, r"\[0\] is NoneType, needs"),
    "text": (["text"], False, r"\[0\] is str, needs"),
    "a column": ([np.zeros((4, 4))[:, 1]], False, r"\[0\] is not contiguous"),
    "Fortran order": (np.zeros((2, 4, 4), order="F"), False, r"\[0\] is not contiguous"),
    "every second byte": ([memoryview(bytearray(8))[::2]], False, r"\[0\] is not contiguous"),
    "a transposed tensor": ([torch.zeros(3, 4).T], False, r"\[0\] is not contiguous"),
    "an expanded tensor": ([torch.zeros(1, 4).expand(3, 4)], True, r"\[0\] is not contiguous"),
    "a tensor without memory": ([torch.zeros(3, device="meta")], False, r"\[0\] is on meta"),
    "Python objects": ([np.array([object()])], False, r"\[0\] holds Python objects"),
    "rows of Python objects": (np.array([[object()]]), False, r"\[0\] holds Python objects"),
    "an empty array": ([np.zeros(0)], False, r"\[0\] is empty"),
    "empty rows": (np.zeros((3, 0)), False, r"\[0\] is empty"),
    "an empty bytearray": ([bytearray()], False, r"\[0\] is empty"),
    "an empty tensor": ([torch.zeros(0)], False, r"\[0\] is empty"),
    "a read-only array": ([read_only(np.zeros(3))], True, r"\[0\] is read-only"),
    "read-only rows": (read_only(np.zeros((2, 3))), True, r"\[0\] is read-only"),
    "a read-only view": ([memoryview(b"abc")], True, r"\[0\] is read-only"),
    "rows that overlap": (
        np.lib.stride_tricks.as_strided(np.zeros(9, np.uint8), (4, 4), (1, 1)), True, "rows that overlap",
    ),
    "one row for all": (np.broadcast_to(np.zeros(4), (3, 4)), True, "read-only|overlap"),
    "the second of two": ([bytearray(3), "x"], True, r"\[1\] is str, needs"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_buffers_are_refused_by_name(kind: str) -> None:
    buffers, writable, message = WRONG[kind]
    with pytest.raises(InvalidRequest, match=f"^spot.*{message}"):
        regions(buffers, name="spot", writable=writable)


def test_copies_go_where_they_should_and_nowhere_else() -> None:
    rng = np.random.default_rng(3)
    lengths = [1, 7, 4096, 4097, 1 << 20, 3]
    sources = [rng.integers(0, 256, n, np.uint8) for n in lengths]
    target = np.full(sum(lengths) + len(lengths) + 1, 0xEE, np.uint8)
    starts = (np.cumsum([0, *lengths[:-1]]) + np.arange(len(lengths)) + 1).tolist()
    base = target.ctypes.data
    copy_many([s.ctypes.data for s in sources], [base + start for start in starts], lengths)
    expected = np.full_like(target, 0xEE)
    for source, start in zip(sources, starts, strict=True):
        expected[start : start + len(source)] = source
    assert (target == expected).all()
    copy_many([], [], [])


def test_zero_clears_just_its_range() -> None:
    target = np.full(100, 7, np.uint8)
    zero(target.ctypes.data + 10, 20)
    assert target.tolist() == [7] * 10 + [0] * 20 + [7] * 70
    zero(target.ctypes.data, 0)
    assert target[0] == 7


@pytest.mark.parametrize(
    ("asked", "given"),
    [(0, 0), (1, HUGE_PAGE), (HUGE_PAGE, HUGE_PAGE), (HUGE_PAGE + 1, 2 * HUGE_PAGE)],
)
def test_an_arena_is_whole_huge_pages(asked: int, given: int) -> None:
    arena = Arena(asked)
    assert arena.nbytes == given
    assert arena.address % HUGE_PAGE == 0
    assert len(arena.view(0, given)) == given


def test_views_of_an_arena_are_its_memory_and_outlive_it() -> None:
    arena = Arena(HUGE_PAGE)
    view = arena.view(4096, 100)
    assert view.ctypes.data == arena.address + 4096
    assert view.flags.writeable
    view[:] = 5
    assert read(arena.address + 4096, 101) == bytes([5] * 100 + [0])
    arena.populate(0, HUGE_PAGE)
    assert view.tolist() == [5] * 100
    del arena
    assert view.tolist() == [5] * 100
