"""EngineKV: any order of axes is described by its regions, and the same order means the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine_kv import KNOWN, LOGICAL, EngineTensors, laid_out
from kvtier.device import CANONICAL, EngineKV, HostCopier, copier_for
from kvtier.errors import InvalidRequest

SIZES = {"layer": 2, "plane": 2, "block": 6, "token": 4, "head": 3, "dim": 8}


def filled(tensors: EngineTensors) -> EngineTensors:
    tensors.plain[:] = np.arange(tensors.plain.size, dtype=tensors.plain.dtype).reshape(tensors.plain.shape)
    return tensors


def chunk_of(tensors: EngineTensors, blocks: list[int]) -> tuple[EngineKV, np.ndarray]:
    kv = EngineKV.of(tensors.kv_caches, axes=tensors.axes)
    into = np.zeros((1, len(kv.regions) * len(blocks) * kv.block_bytes), np.uint8)
    copier_for(kv).gather(np.array([blocks]), into)
    return kv, into[0]


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("NHD, keys and values apart", CANONICAL),
        ("NHD, plane first", CANONICAL),
        ("HND, plane first", "layer,plane,block4,head,token,dim"),
        ("NHD, block first", "layer,block4,plane,token,head,dim"),
        ("HND, block first", "layer,block4,plane,head,token,dim"),
        ("content of both planes", "layer,token,head,plane,dim"),
        ("all layers in a block", "block4,layer,plane,token,head,dim"),
        ("head outside of blocks", "layer,head,token,plane,dim"),
        ("layers apart, one tensor", CANONICAL),
    ],
)
def test_the_layouts_of_engines(name: str, order: str) -> None:
    memory, handed_over = KNOWN[name]
    tensors = filled(laid_out(memory, SIZES, given=handed_over))
    kv, chunk = chunk_of(tensors, [5, 0, 3])
    assert (kv.layers, kv.planes, kv.kv_heads, kv.head_dim, kv.dtype) == (2, 2, 3, 8, "float32")
    assert (kv.blocks, kv.block_tokens, kv.order) == (6, 4, order)
    if order == CANONICAL:
        assert chunk.tobytes() == tensors.tokens([5, 0, 3]).tobytes()


SMALL = st.fixed_dictionaries({name: st.integers(1, 4) for name in LOGICAL if name != "plane"})


@given(
    sizes=SMALL,
    planes=st.integers(1, 2),
    memory=st.permutations(LOGICAL),
    handed_over=st.sampled_from(["whole", "layers", "pairs"]),
    gap=st.integers(0, 3),
    data=st.data(),
)
def test_every_order_goes_out_and_comes_back(
    sizes: dict[str, int], planes: int, memory: list[str], handed_over: str, gap: int, data: st.DataObject
) -> None:
    sizes = {**sizes, "plane": planes}
    dropped = {"whole": (), "layers": ("layer",), "pairs": ("layer", "plane")}[handed_over]
    axes = tuple(data.draw(st.permutations([name for name in LOGICAL if name not in dropped])))
    wide = [name for name in memory if sizes[name] > 1]
    # Elements that do not lie next to each other are refused.
    assume(not wide or wide[-1] not in ("block", *dropped))
    assume(not (gap and wide and memory[0] == wide[-1]))
    tensors = filled(laid_out(tuple(memory), sizes, given=handed_over, axes=axes, gap=gap))
    blocks = data.draw(st.permutations(range(sizes["block"])))
    kv, chunk = chunk_of(tensors, list(blocks))
    held = tensors.tokens(blocks)
    assert chunk.nbytes == held.nbytes
    if kv.order == CANONICAL:
        assert chunk.tobytes() == held.tobytes()
    tensors.plain[:] = 0
    copier_for(kv).scatter([chunk], np.array([blocks[::-1]]))
    assert (tensors.tokens(blocks[::-1]) == held).all()


@given(
    tokens=st.sampled_from([4, 8]),
    blocks=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    heads=st.integers(1, 3),
    memories=st.tuples(st.permutations(LOGICAL), st.permutations(LOGICAL)),
)
def test_the_same_order_is_the_same_bytes(
    tokens: int, blocks: tuple[int, int], heads: int, memories: tuple[list[str], list[str]]
) -> None:
    """The order is in the namespace: two engines that share it must mean the same by a chunk."""
    value = np.random.default_rng(0).random((2, 2, tokens, heads, 2), np.float32)
    found = []
    for memory, block_tokens in zip(memories, blocks, strict=True):
        sizes = {
            "layer": 2, "plane": 2, "block": tokens // block_tokens, "token": block_tokens,
            "head": heads, "dim": 2,
        }  # fmt: skip
        wide = [name for name in memory if sizes[name] > 1]
        assume(wide[-1] != "block")
        tensors = laid_out(tuple(memory), sizes, given="whole")
        tensors.fill(range(sizes["block"]), value)
        kv, chunk = chunk_of(tensors, list(range(sizes["block"])))
        found.append((kv.order, chunk.tobytes()))
    assert found[0][0] != found[1][0] or found[0][1] == found[1][1]


def test_contiguous_tensors_are_cut_into_blocks() -> None:
    value = np.arange(2 * 24 * 3 * 8, dtype=np.float32).reshape(2, 24, 3, 8)
    by_token = EngineKV.of([(value[0].copy(), value[1].copy())], axes="token head dim", block_tokens=4)
    assert (by_token.blocks, by_token.order) == (6, CANONICAL)
    by_head = [(plane.transpose(1, 0, 2).copy()) for plane in value]
    kv = EngineKV.of([tuple(by_head)], axes="head token dim", block_tokens=4)
    assert (kv.blocks, kv.order, len(kv.regions)) == (6, "layer,plane,head,token,dim", 6)
    into = np.zeros((1, value.nbytes), np.uint8)
    HostCopier(kv.paged()).gather(np.arange(6)[None], into)
    assert into.tobytes() == value.transpose(0, 2, 1, 3).tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_torch_copies_are_the_same_as_the_native_ones(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    from kvtier.device.torch import TorchCopier

    whole = torch.randint(0, 120, (3, 9, 2, 4, 2, 8), dtype=torch.uint8).to(getattr(torch, dtype))
    layers = [layer.permute(0, 1, 3, 2, 4) for layer in whole]  # HND seen as NHD
    kv = EngineKV.of(layers, axes="block plane head token dim")
    table = np.array([[8, 0, 3], [1, 2, 4]])
    host, other = HostCopier(kv.paged()), TorchCopier(kv)
    nbytes = 3 * len(kv.regions) * kv.block_bytes
    ours, theirs = np.zeros((2, nbytes), np.uint8), np.zeros((2, nbytes), np.uint8)
    host.gather(table, ours)
    other.gather(table, theirs, other.mark())
    assert (ours == theirs).all()
    before = [layer.clone() for layer in layers]
    moved = np.array([[5, 6, -1], [-1, 7, 8]])
    other.scatter(list(theirs), moved, other.mark())
    for layer, old in zip(layers, before, strict=True):
        old[[5, 6, 7, 8]] = old[[8, 0, 2, 4]]
        assert torch.equal(layer.view(torch.uint8), old.view(torch.uint8))


def test_the_tensors_of_a_model_in_inference_mode() -> None:
    torch = pytest.importorskip("torch")
    from kvtier.device.torch import TorchCopier

    with torch.inference_mode():
        layer = torch.ones(4, 2, 8)
    kv = EngineKV.of([layer], axes="block token dim")
    assert kv.planes == kv.kv_heads == 1, "MLA has neither"
    TorchCopier(kv).scatter([bytes(kv.block_bytes)], np.array([[2]]))
    assert layer.sum().item() == 3 * 16


def test_tensors_on_a_gpu() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    layers = [torch.randn(9, 4, 2, 8, device="cuda").to(torch.bfloat16) for _ in range(3)]
    kv = EngineKV.of(layers, axes="block token head dim")
    copier = copier_for(kv)
    chunks = [np.zeros(2 * len(layers) * kv.block_bytes, np.uint8) for _ in range(2)]
    copier.gather(np.array([[8, 0], [3, 5]]), chunks, copier.mark())
    for number, blocks in enumerate(([8, 0], [3, 5])):
        held = torch.stack([layer[blocks] for layer in layers]).cpu().view(torch.uint8).numpy()
        assert chunks[number].tobytes() == held.tobytes()
    before = [layer.clone() for layer in layers]
    for layer in layers:
        layer.zero_()
    copier.scatter(chunks, np.array([[1, -1], [2, 4]]), copier.mark())
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer[[1, 2, 4]], old[[8, 3, 5]])
        assert not layer[[0, 3, 5, 6, 7, 8]].any()


GOOD = np.zeros((4, 2, 3, 8), np.float32)
READ_ONLY = np.zeros((4, 2, 3, 8), np.float32)
READ_ONLY.flags.writeable = False
AXES = "block token head dim"


@pytest.mark.parametrize(
    ("kv_caches", "axes", "options", "message"),
    [
        ([], AXES, {}, "needs a sequence, or a mapping"),
        (GOOD, AXES, {}, "needs a sequence, or a mapping"),
        ([(GOOD, GOOD, GOOD)], AXES, {}, r"kv_caches\[0\] has 3 tensors"),
        ([GOOD, (GOOD, GOOD)], AXES, {}, r"kv_caches\[1\] has 2 tensors"),
        (["no tensor"], AXES, {}, "is str, needs a tensor"),
        ([READ_ONLY], AXES, {}, "is read-only"),
        ([GOOD], "block token dim", {}, r"shape \(4, 2, 3, 8\), needs the axes block token dim"),
        ([GOOD], "block page head dim", {}, "needs each at most once of layer, plane"),
        ([GOOD], "block head head dim", {}, "needs each at most once"),
        ([GOOD], "block layer head dim", {}, "and token"),
        ([GOOD, GOOD], "layer token head dim", {}, "has layer and kv_caches has 2 entries"),
        ([(GOOD, GOOD)], "plane token head dim", {}, "keys and values are apart"),
        ([GOOD, GOOD[:3]], AXES, {}, "all layers need the same"),
        ([GOOD, GOOD.astype(np.float16)], AXES, {}, "all layers need the same"),
        ([GOOD], AXES, {"block_tokens": 4}, "block_tokens is 4, but the token axis has 2"),
        ([GOOD], "token layer head dim", {}, "block_tokens is None, needs to divide the 4 tokens"),
        ([GOOD], "token layer head dim", {"block_tokens": 3}, "needs to divide"),
        ([GOOD[..., ::2]], AXES, {}, "8 bytes apart, needs one axis without gaps"),
        ([GOOD[::-1]], AXES, {}, "they overlap"),
        ([np.lib.stride_tricks.as_strided(GOOD, (4, 2, 3, 8), (0, 96, 32, 4))], AXES, {}, "overlap"),
    ],
)
def test_what_is_no_kv_cache_is_refused(
    kv_caches: Any, axes: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        EngineKV.of(kv_caches, axes=axes, **options)
