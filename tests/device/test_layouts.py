"""Every layout, dtype, block size and copier, against a reference that follows the order's own words."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine_kv import KNOWN, LOGICAL, EngineTensors, laid_out
from kvtier import _native
from kvtier.device import EngineKV, HostCopier
from kvtier.errors import InvalidRequest

torch = pytest.importorskip("torch")

from kvtier.device.torch import TorchCopier  # noqa: E402

DTYPES = {
    "float32": np.uint32,
    "float16": np.uint16,
    "bfloat16": np.uint16,
    "float8_e4m3fn": np.uint8,
    "float8_e5m2": np.uint8,
}
"""And the numbers that stand for their bits: NumPy has not all of them."""
BLOCK_SIZES = (1, 3, 16)
BLOCKS = 7
SIZES = {"layer": 3, "plane": 2, "block": BLOCKS, "head": 2, "dim": 4}
VLLM = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Orders in memory of vLLM's views (block, head, token, content of both planes)."""
WORDS = {"L": "layer", "B": "block", "H": "head", "N": "token", "C": "dim"}
LAYOUTS = [*KNOWN, *(f"vLLM {order}" for order in VLLM), "MLA", "contiguous NHD", "contiguous HND", "static"]
COPIERS = ["native", "numpy", "torch"]


def engine(layout: str, dtype: str, size: int) -> tuple[EngineTensors, int | None]:
    """Torch tensors in that layout, full of random bits; and the block size where they have none."""
    sizes, number, block_tokens = {**SIZES, "token": size}, DTYPES[dtype], None
    if layout in KNOWN:
        memory, given = KNOWN[layout]
        made = laid_out(memory, sizes, given=given, dtype=number)
    elif layout.startswith("vLLM"):
        words = [WORDS[letter] for letter in layout.split()[1]]
        sizes = {**sizes, "plane": 1, "dim": 2 * SIZES["dim"]}
        axes = ("block", "head", "token", "plane", "dim")
        made = laid_out((*words[:-1], "plane", "dim"), sizes, axes=axes, dtype=number, gap=5)
        views = [view[..., 0, :] for view in made.kv_caches]
        made = EngineTensors(views, "block head token dim", made.plain)
    elif layout == "MLA":
        sizes = {**sizes, "plane": 1, "head": 1, "dim": 9}
        made = laid_out(("layer", "block", "plane", "token", "head", "dim"), sizes, dtype=number)
        made = EngineTensors([view[0, :, :, 0] for view in made.kv_caches], "block token dim", made.plain)
    else:
        block_tokens = size
        inner = ("token", "head", "dim") if layout.endswith("NHD") else ("head", "token", "dim")
        room = 5 if layout == "static" else 0  # behind the tokens, as a larger cache has
        shape = [BLOCKS * size + room if name == "token" else sizes[name] for name in inner]
        pairs = np.zeros((SIZES["layer"], 2, *shape), number)
        pairs = pairs[:, :, :, :-room] if room else pairs
        heads_last = pairs if layout.endswith("NHD") else pairs.transpose(0, 1, 3, 2, 4)
        plain = split_tokens(heads_last, size)
        made = EngineTensors([tuple(pair) for pair in pairs], " ".join(inner), plain)
    draw = np.random.default_rng(len(layout) + size)
    made.plain[:] = draw.integers(0, np.iinfo(number).max, made.plain.shape, number, endpoint=True)

    def as_torch(array: Any) -> Any:
        return torch.from_numpy(array).view(getattr(torch, dtype))

    caches = [tuple(map(as_torch, c)) if isinstance(c, tuple) else as_torch(c) for c in made.kv_caches]
    return EngineTensors(caches, made.axes, made.plain), block_tokens


def split_tokens(array: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """(layer, plane, tokens, head, dim) as a view with the axes of LOGICAL."""
    layers, planes, tokens, heads, dim = array.shape
    strides = (*array.strides[:2], size * array.strides[2], *array.strides[2:])
    return np.lib.stride_tricks.as_strided(
        array, (layers, planes, tokens // size, size, heads, dim), strides, writeable=True
    )


def reference(plain: npt.NDArray[Any], order: str, blocks: list[int]) -> bytes:
    """A chunk of these blocks, element by element in the order of the axes that `order` names."""
    sizes = dict(zip(LOGICAL, plain.shape, strict=True)) | {"block": len(blocks)}
    names = ["block" if name.startswith("block") else name for name in order.split(",")]
    if "block" not in names:
        names.insert(names.index("token"), "block")
    names += [name for name in LOGICAL if name not in names]  # of one element each
    found = []
    for index in itertools.product(*(range(sizes[name]) for name in names)):
        at = dict(zip(names, index, strict=True))
        at["block"] = blocks[at["block"]]
        found.append(plain[tuple(at[name] for name in LOGICAL)])
    return np.array(found, plain.dtype).tobytes()


@pytest.fixture(params=COPIERS)
def copier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "native" and _native.core is None:
        pytest.skip("no native core")
    if request.param == "numpy":
        monkeypatch.setattr(_native, "core", None)
    return TorchCopier if request.param == "torch" else lambda kv: HostCopier(kv.paged())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_go_out_and_come_back_bit_for_bit(copier: Any, layout: str) -> None:
    for dtype, size in itertools.product(DTYPES, BLOCK_SIZES):
        tensors, block_tokens = engine(layout, dtype, size)
        kv = EngineKV.of(tensors.kv_caches, axes=tensors.axes, block_tokens=block_tokens)
        assert (kv.layers, kv.blocks, kv.block_tokens, kv.dtype) == (SIZES["layer"], BLOCKS, size, dtype)
        moves = copier(kv)
        draw = np.random.default_rng(size)
        table = draw.permutation(BLOCKS)[:6].reshape(3, 2)
        nbytes = len(kv.regions) * 2 * kv.block_bytes
        chunks = np.full((3, nbytes), 0xA5, np.uint8)
        moves.gather(table, chunks)
        before = tensors.plain.copy()
        for row, chunk in zip(table.tolist(), chunks, strict=True):
            assert chunk.tobytes() == reference(before, kv.order, row), (dtype, size)

        other = draw.permutation(BLOCKS)[:6].reshape(3, 2)
        other[1, 0] = -1
        tensors.plain[:] = 7
        moves.scatter(chunks, other)
        expected = np.full_like(before, 7)
        for source, target in zip(table.reshape(-1), other.reshape(-1), strict=True):
            if target >= 0:
                expected[:, :, target] = before[:, :, source]
        assert (tensors.plain == expected).all(), (dtype, size)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_by_themselves_are_the_whole(copier: Any, layout: str) -> None:
    tensors, block_tokens = engine(layout, "bfloat16", 3)
    kv = EngineKV.of(tensors.kv_caches, axes=tensors.axes, block_tokens=block_tokens)
    moves, table = copier(kv), np.array([[5, 0], [2, 6]])
    chunks = np.zeros((2, len(kv.regions) * 2 * kv.block_bytes), np.uint8)
    moves.gather(table, chunks)
    before = tensors.plain.copy()
    assert kv.layer_steps in (1, SIZES["layer"])
    each = len(kv.regions) // kv.layer_steps
    tensors.plain[:] = 7
    for layer in range(kv.layer_steps):
        moves.scatter(chunks, table, None, range(layer * each, layer * each + each))
        done = SIZES["layer"] if kv.layer_steps == 1 else layer + 1
        expected = np.full_like(before, 7)
        expected[:done, :, table] = before[:done, :, table]
        assert (tensors.plain == expected).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_there_is_not_is_refused_before_anything_is_touched(copier: Any, layout: str) -> None:
    tensors, block_tokens = engine(layout, "float16", 3)
    kv = EngineKV.of(tensors.kv_caches, axes=tensors.axes, block_tokens=block_tokens)
    moves = copier(kv)
    nbytes = len(kv.regions) * 2 * kv.block_bytes
    chunks, before = np.zeros((2, nbytes), np.uint8), tensors.plain.copy()
    for wrong in ([[0, 1], [2, BLOCKS]], [[0, 1], [2, -2]]):
        for call in (moves.gather, lambda table, into: moves.scatter(into, table)):
            with pytest.raises(InvalidRequest, match=f"names block {wrong[1][1]}"):
                call(np.array(wrong), chunks)
    with pytest.raises(InvalidRequest, match="names block -1"):
        moves.gather(np.array([[0, 1], [2, -1]]), chunks)
    with pytest.raises(InvalidRequest, match="twice"):
        moves.scatter(chunks, np.array([[0, 1], [2, 0]]))
    with pytest.raises(InvalidRequest, match="buffers for"):
        moves.scatter(chunks, np.array([[0, 1]]))
    with pytest.raises(InvalidRequest, match="bytes, needs"):
        moves.gather(np.array([[0, 1], [2, 3]]), chunks[:, 1:].copy())
    with pytest.raises(InvalidRequest, match="regions"):
        moves.scatter(chunks, np.array([[0, 1], [2, 3]]), None, range(1, len(kv.regions) + 1))
    assert not chunks.any()
    assert (tensors.plain == before).all()
