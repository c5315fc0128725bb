"""Gather and scatter of a paged KV cache in host memory, against plain NumPy indexing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import _native
from kvtier.device import HostCopier, PagedKV
from kvtier.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

GAP = 0xEE


@pytest.fixture(params=["native", "numpy"], scope="module", autouse=True)
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(_native, "core", None)
        elif _native.core is None:
            pytest.skip(_native.why_not)
        yield


def cache(regions: int, blocks: int, block_bytes: int, gap: int, seed: int = 0) -> list[np.ndarray]:
    """A uint8 array (blocks, block_bytes) per region, `gap` bytes between blocks; the gaps hold GAP."""
    draw = np.random.default_rng(seed)
    whole = np.full((regions, blocks, block_bytes + gap), GAP, np.uint8)
    whole[:, :, :block_bytes] = draw.integers(0, 256, (regions, blocks, block_bytes), np.uint8)
    return list(whole[:, :, :block_bytes])


def expected_chunks(tensors: list[np.ndarray], table: np.ndarray) -> np.ndarray:
    """(chunks, regions * blocks per chunk * block bytes), by indexing alone."""
    return np.stack([np.stack(tensors)[:, row].reshape(-1) for row in table])


SHAPES = st.tuples(
    st.integers(1, 5),
    st.integers(1, 40),
    st.sampled_from([1, 63, 4096, 5000, 32768]),
    st.sampled_from([0, 64]),
)


@given(shape=SHAPES, data=st.data(), dtype=st.sampled_from([np.int32, np.int64]))
def test_gather_is_indexing(shape: tuple[int, int, int, int], data: st.DataObject, dtype: type) -> None:
    regions, blocks, block_bytes, gap = shape
    tensors = cache(regions, blocks, block_bytes, gap)
    per_chunk = data.draw(st.integers(1, 4))
    rows = st.lists(st.integers(0, blocks - 1), min_size=per_chunk, max_size=per_chunk)
    table = np.array(data.draw(st.lists(rows, min_size=1, max_size=12)), dtype)
    paged = PagedKV.of(tensors)
    into = np.full((len(table), paged.chunk_bytes(per_chunk)), GAP, np.uint8)
    HostCopier(paged).gather(table, into)
    assert (into == expected_chunks(tensors, table)).all()


@given(shape=SHAPES, data=st.data(), dtype=st.sampled_from([np.int32, np.int64]))
def test_scatter_is_indexed_assignment(
    shape: tuple[int, int, int, int], data: st.DataObject, dtype: type
) -> None:
    regions, blocks, block_bytes, gap = shape
    tensors = cache(regions, blocks, block_bytes, gap)
    order = data.draw(st.permutations(range(blocks)))
    per_chunk = data.draw(st.integers(1, blocks))
    chunks = data.draw(st.integers(1, blocks // per_chunk))
    table = np.array(order[: chunks * per_chunk], dtype).reshape(chunks, per_chunk)
    paged = PagedKV.of(tensors)
    source = np.random.default_rng(1).integers(0, 256, (chunks, paged.chunk_bytes(per_chunk)), np.uint8)
    expected = np.stack(tensors)
    for row, chunk in zip(table, source, strict=True):
        expected[:, row] = chunk.reshape(regions, per_chunk, block_bytes)
    HostCopier(paged).scatter(source, table)
    assert (np.stack(tensors) == expected).all(), "other blocks keep their bytes"
    if gap:
        assert (tensors[0].base[:, :, block_bytes:] == GAP).all(), "the gaps are not ours"


def test_a_whole_cache_goes_out_and_comes_back_in_other_blocks() -> None:
    """Enough bytes for streaming copies, at odd addresses."""
    memory = np.zeros(8 * 64 * 4096 + 1, np.uint8)[1:].reshape(8, 64, 4096)
    memory[:] = np.random.default_rng(3).integers(0, 256, memory.shape, np.uint8)
    before = memory.copy()
    copier = HostCopier(PagedKV.of(list(memory)))
    chunks = np.empty((4, 8 * 16 * 4096 + 1), np.uint8)[:, 1:]
    table = np.random.default_rng(4).permutation(64).reshape(4, 16)
    copier.gather(table, list(chunks))
    memory[:] = 0
    moved = np.random.default_rng(5).permutation(64).reshape(4, 16)
    copier.scatter(list(chunks), moved)
    assert (memory[:, moved.reshape(-1)] == before[:, table.reshape(-1)]).all()


def test_more_pieces_than_go_into_one_native_call() -> None:
    tensors = cache(8, 1200, 24, 8)
    table = np.random.default_rng(1).permutation(1200).reshape(300, 4)
    copier = HostCopier(PagedKV.of(tensors))
    chunks = np.zeros((300, 8 * 4 * 24), np.uint8)
    copier.gather(table, chunks)
    assert (chunks == expected_chunks(tensors, table)).all()
    copier.scatter(chunks, table[::-1].copy())
    assert (chunks == expected_chunks(tensors, table[::-1])).all()


def test_the_tensors_of_vllm_and_their_owner() -> None:
    torch = pytest.importorskip("torch")
    layers = [torch.randn(2, 9, 16, 2, 8).to(torch.bfloat16) for _ in range(3)]
    planes = [plane for layer in layers for plane in layer]
    paged = PagedKV.of(planes)
    assert paged.block_bytes == 16 * 2 * 8 * 2
    assert paged.chunk_bytes(4) == 3 * 2 * 4 * paged.block_bytes
    into = torch.empty(2, paged.chunk_bytes(4), dtype=torch.uint8)
    table = np.array([[8, 0, 3, 3], [1, 2, 4, 5]], np.int32)
    HostCopier(paged).gather(table, list(into))
    found = into.view(torch.bfloat16).reshape(2, 3, 2, 4, 16, 2, 8)
    for i, row in enumerate(table.tolist()):
        for layer in range(3):
            assert torch.equal(found[i, layer], layers[layer][:, row])


def test_no_chunks_are_no_work() -> None:
    copier = HostCopier(PagedKV.of(cache(2, 3, 64, 0)))
    copier.gather(np.empty((0, 2), np.int32), [])
    copier.scatter([], np.empty((0, 2), np.int32))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.array([[0, 3]]), "names block 3, needs ids from 0 to 2"),
        (np.array([[-2, 0]]), "names block -2"),
        (np.array([0, 1]), r"shape \(2,\), needs int32 or int64 ids"),
        (np.array([[0.0, 1.0]]), "dtype float64"),
        (np.array([[0, 1]], np.uint8), "dtype uint8"),
        (np.empty((1, 0), np.int64), r"shape \(1, 0\)"),
        (np.array([[0, 1], [1, 2]]), "2 rows of block_table"),
        (np.array([[0, 1, 2]]), r"\[0\] has 256 bytes, needs the 384 of its blocks"),
    ],
)
def test_tables_that_do_not_fit_are_refused(table: np.ndarray, message: str) -> None:
    copier = HostCopier(PagedKV.of(cache(2, 3, 64, 0)))
    chunk = np.zeros((1, 256), np.uint8)
    with pytest.raises(InvalidRequest, match=message):
        copier.gather(table, chunk)
    with pytest.raises(InvalidRequest, match=message if len(table) < 2 or table.ndim < 2 else "block_table"):
        copier.scatter(chunk, table)
    assert not chunk.any()


@pytest.mark.parametrize("table", [[[1, 1]], [[0, 1], [2, 0]]])
def test_a_scatter_to_one_block_twice_is_refused(table: list[list[int]]) -> None:
    copier = HostCopier(PagedKV.of(cache(2, 3, 64, 0)))
    with pytest.raises(InvalidRequest, match="names a block twice"):
        copier.scatter(np.zeros((len(table), 256), np.uint8), np.array(table))


@pytest.mark.parametrize("table", [[[-1, 2], [-1, -1]], [[1, -1], [0, 2]], [[-1, -1], [-1, -1]]])
def test_a_scatter_leaves_out_what_goes_nowhere(table: list[list[int]]) -> None:
    tensors = cache(3, 4, 64, 8)
    source = np.random.default_rng(2).integers(0, 256, (2, 3 * 2 * 64), np.uint8)
    expected = np.stack(tensors)
    for row, chunk in zip(table, source.reshape(2, 3, 2, 64), strict=True):
        for i, block in enumerate(row):
            if block >= 0:
                expected[:, block] = chunk[:, i]
    copier = HostCopier(PagedKV.of(tensors))
    copier.scatter(list(source), np.array(table))
    assert (np.stack(tensors) == expected).all()
    with pytest.raises(InvalidRequest, match="names block -1"):
        copier.gather(np.array(table), source)


def test_a_read_only_chunk_can_be_scattered_and_not_gathered_into() -> None:
    tensors = cache(2, 3, 64, 0)
    copier = HostCopier(PagedKV.of(tensors))
    copier.scatter([bytes(256)], np.array([[0, 2]]))
    assert not np.stack(tensors)[:, [0, 2]].any()
    with pytest.raises(InvalidRequest, match="read-only"):
        copier.gather(np.array([[0, 2]]), [bytes(256)])


READ_ONLY = np.zeros((3, 4), np.uint8)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([], "tensors is empty"),
        ([np.zeros(())], r"tensors\[0\] needs a shape of \(blocks, ...\)"),
        ([np.zeros((0, 4))], "at least one block"),
        ([np.zeros((3, 4, 4)).transpose(0, 2, 1)], r"tensors\[0\]\[0\] is not contiguous"),
        ([np.zeros((3, 4)), np.zeros((3, 5))], r"tensors\[1\] has 3 blocks of 40 bytes"),
        ([np.zeros((3, 4)), np.zeros((4, 4))], r"tensors\[1\] has 4 blocks"),
        ([np.zeros((3, 4)), np.zeros((3, 8))[:, :4]], r"tensors\[1\] has 3 blocks of 32 bytes, 64 apart"),
        ([np.zeros((3, 4))[::-1]], "no overlap"),
        ([np.broadcast_to(np.zeros(4), (3, 4)).copy()[:, ::2]], "is not contiguous"),
        ([READ_ONLY], "read-only"),
    ],
)
def test_tensors_that_are_no_paged_cache_are_refused(tensors: list[Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        PagedKV.of(tensors)


def test_addresses_that_are_no_paged_cache_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="dtype uint64"):
        PagedKV(np.array([1], np.int64), 1, 1, 1)
    with pytest.raises(InvalidRequest, match="no overlap"):
        PagedKV(np.array([1], np.uint64), 2, 8, 4)
