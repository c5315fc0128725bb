"""The connector's side in a worker, on tensors made by hand."""

from __future__ import annotations

import threading
import time
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import InvalidRequest
from kvtier.testing.build import obstacle
from kvtier.testing.emulated import EmulatedDevice
from kvtier.testing.faults import Fault

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LAYERS, BLOCKS, HEADS, TOKENS, DIM = 3, 24, 2, 16, 8
CHUNK = 2 * TOKENS


def tensors(split: int = 1) -> dict[str, Any]:
    """One tensor per layer, all in one memory as vLLM has them; kernels see blocks cut in `split`."""
    import torch

    whole = torch.arange(LAYERS * BLOCKS * HEADS * TOKENS * DIM, dtype=torch.float32)
    shape = (LAYERS, BLOCKS * split, HEADS, TOKENS // split, DIM)
    return {f"layer {i}": layer for i, layer in enumerate(whole.view(shape))}


@pytest.fixture
def make_worker(engine_config: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    from kvtier.integrations.vllm.settings import Rank, connector_settings
    from kvtier.integrations.vllm.worker import Worker

    workers: list[Any] = []

    def make(caches: Any = None, **settings: Any) -> Any:
        group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=TOKENS), layer_names=[])
        config = {
            "paths": str(tmp_path / "kv"), "capacity": "16MiB", "chunk_tokens": CHUNK, "dram": "1MiB",
            **settings,
        }  # fmt: skip
        workers.append(
            Worker(
                engine_config,
                SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[group]),
                connector_settings(config),
                Rank(0, 1, 0, 1, 0, 1),
                caches or tensors(),
            )
        )
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


def plan(**jobs: Any) -> Any:
    from kvtier.integrations.vllm.messages import Plan

    return Plan(**{"era": b"", **jobs})


def job(chunks: range, blocks: list[int], name: str = "r", known: int = 0, start: int | None = None) -> Any:
    """A job for chunks of a request; the load of a chunk may begin in the middle."""
    from kvtier.integrations.vllm.messages import Job

    hashes = [f"chunk {i}".encode().ljust(32) for i in range(known, chunks.stop)]
    begin = chunks.start * CHUNK if start is None else start
    return Job(name, known, hashes, begin, chunks.stop * CHUNK, blocks)


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "that does not come about"
        time.sleep(0.001)


def rest(worker: Any) -> None:
    wait_until(lambda: not worker.connector.stats()["active"])


def received(worker: Any, count: int = 1) -> set[str]:
    names: set[str] = set()

    def more() -> bool:
        names.update(worker.received())
        return len(names) == count

    wait_until(more)
    return names


def save(worker: Any, blocks: list[int], name: str = "r") -> None:
    worker.start_saves(plan(saves=[job(range(len(blocks) // 2), blocks, name)]))
    rest(worker)


@pytest.mark.parametrize("split", [1, 2])
def test_a_block_comes_back_as_it_was(make_worker: Any, split: int) -> None:
    """Also where the kernels' blocks are smaller than the scheduler's."""
    caches = tensors(split)
    expected = {name: cache.clone() for name, cache in caches.items()}
    worker = make_worker(caches)
    assert worker.changes().added == b""
    save(worker, [3, 0, 7, 5])
    told = worker.report().changes[0]
    assert (len(told.added), told.is_saving) == (2 * 32, False)
    for cache in caches.values():
        cache.zero_()
    worker.start_loads(plan(loads=[job(range(2), [10, 11, 12], start=TOKENS)]))
    assert received(worker) == {"r"}
    assert worker.invalid_blocks() == set()
    ((tokens, seconds),) = worker.report().loads
    assert tokens == 3 * TOKENS
    assert seconds > 0
    for name, cache in caches.items():
        blocks, old = cache.reshape(BLOCKS, -1), expected[name].reshape(BLOCKS, -1)
        assert blocks[[10, 11, 12]].equal(old[[0, 7, 5]])
        assert not blocks[[9, 13, 0, 7]].any()


def test_the_end_of_saves_is_told_also_if_they_changed_nothing(make_worker: Any) -> None:
    worker = make_worker()
    worker.changes()
    for _ in range(2):
        save(worker, [0, 1])
        assert not worker.report().changes[0].is_saving
        assert worker.report() is None


def test_layers_that_share_their_kv_are_stored_once(make_worker: Any) -> None:
    caches = tensors()
    assert make_worker({**caches, "layer 3": caches["layer 1"]}).connector.kv.layers == LAYERS


def test_blocks_in_pieces_are_refused(make_worker: Any) -> None:
    import torch

    caches = {"layer": torch.zeros(HEADS, BLOCKS * 2, TOKENS // 2, DIM).transpose(0, 1)}
    with pytest.raises(InvalidRequest, match="in one piece: leave out VLLM_KV_CACHE_LAYOUT"):
        make_worker(caches)


def test_blocks_are_copied_before_they_are_written_to(make_worker: Any) -> None:
    caches = tensors()
    old = caches["layer 1"][4].clone()
    worker = make_worker(caches)
    go_on = threading.Event()
    worker.connector._mover.submit(lambda: go_on.wait(20), urgent=True)
    worker.start_saves(plan(saves=[job(range(1), [4, 5])]))
    assert worker.changes().is_saving
    worker.begin_step(plan(reused=[4]))
    caches["layer 1"][4] = 0
    go_on.set()
    worker.start_loads(plan(loads=[job(range(1), [10, 11])]))
    assert received(worker) == {"r"}
    assert caches["layer 1"][10].equal(old)


def test_the_save_of_a_request_that_has_ended_comes_before_its_blocks_are_used(make_worker: Any) -> None:
    caches = tensors()
    old = caches["layer 1"][4].clone()
    worker = make_worker(caches)
    worker.begin_step(plan(late=[job(range(1), [4, 5])], ended=["r"], reused=[4, 5]))
    caches["layer 1"][4] = 0
    assert worker._requests == {}
    worker.start_loads(plan(loads=[job(range(1), [10, 11], "other")]))
    assert received(worker) == {"other"}
    assert caches["layer 1"][10].equal(old)


def test_what_is_not_there_is_invalid_and_told(make_worker: Any) -> None:
    worker = make_worker()
    worker.changes()
    save(worker, [0, 1])
    worker.report()
    worker.start_loads(plan(loads=[job(range(2), [10, 11, 12, 13])]))
    assert received(worker) == {"r"}
    assert worker.invalid_blocks() == {12, 13}
    assert worker.invalid_blocks() == set()
    told = worker.report()
    assert told.loads == []
    assert len(told.changes[0].failed) == 32


def test_a_load_that_cannot_begin_is_received_too(make_worker: Any) -> None:
    worker = make_worker()
    worker.start_loads(plan(loads=[job(range(1), [10, BLOCKS])]))
    assert worker.received() == {"r"}
    assert worker.invalid_blocks() == {10, BLOCKS}


def test_a_save_that_cannot_begin_is_left_out(make_worker: Any) -> None:
    worker = make_worker()
    worker.start_saves(plan(saves=[job(range(1), [10, BLOCKS])]))
    assert worker.connector.stats()["active"] == 0


@pytest.mark.skipif(bool(obstacle()), reason="no emulated device")
def test_a_cancelled_load_is_received_while_the_device_hangs(make_worker: Any) -> None:
    with EmulatedDevice(size="64MiB") as device:
        worker = make_worker(paths=str(device.paths[0]), dram=0, close_timeout=5.0)
        save(worker, [0, 1])
        worker._shared.store.flush().result(20)
        device.inject(Fault(op="read", hang=True, file="slab*"))
        worker.start_loads(plan(loads=[job(range(1), [10, 11])]))
        wait_until(lambda: device.stats()[0].hanging)
        worker.report()
        worker.begin_step(plan(cancelled=["r"], ended=["r"]))
        assert received(worker) == {"r"}
        assert worker.invalid_blocks() == {10, 11}
        assert worker.report() is None
        device.clear_faults()
        worker.close()


@pytest.mark.skipif(bool(obstacle()), reason="no emulated device")
def test_a_load_that_its_deadline_ends_counts_as_one_of_nothing(make_worker: Any) -> None:
    with EmulatedDevice(size="64MiB") as device:
        worker = make_worker(paths=str(device.paths[0]), dram=0, get_timeout=0.2, close_timeout=5.0)
        save(worker, [0, 1])
        worker._shared.store.flush().result(20)
        device.inject(Fault(op="read", hang=True, file="slab*"))
        worker.start_loads(plan(loads=[job(range(1), [10, 11])]))
        assert received(worker) == {"r"}
        ((tokens, seconds),) = worker.report().loads
        assert tokens == 0
        assert seconds >= 0.2
        device.clear_faults()
        worker.close()


def test_another_era_has_other_keys(make_worker: Any) -> None:
    worker = make_worker()
    save(worker, [0, 1])
    worker.begin_step(plan(era=b"other"))
    worker.start_loads(plan(era=b"other", loads=[job(range(1), [10, 11])]))
    assert received(worker) == {"r"}
    assert worker.invalid_blocks() == {10, 11}


def test_a_worker_tells_what_it_has_from_the_start(make_worker: Any) -> None:
    worker = make_worker()
    save(worker, [0, 1, 2, 3])
    added = worker.changes().added
    worker.close()
    again = make_worker()
    found = again.changes()
    assert sorted(found.added[:32] + found.added[32:]) == sorted(added)
    assert found.namespace == again.connector.namespace().digest()


def test_the_shape_decides_what_is_found(make_worker: Any) -> None:
    """Kernel blocks cut otherwise hold their bytes in another order."""
    spaces = set()
    for caches in (tensors(), tensors(2)):
        worker = make_worker(caches)
        spaces.add(worker.connector.namespace().digest())
        worker.close()
    assert len(spaces) == 2


def test_stats_are_differences(make_worker: Any) -> None:
    worker = make_worker()
    save(worker, [0, 1])
    told = worker.stats()
    assert told.data["vllm:kvtier_chunks|put|stored"] == 1
    assert told.data["vllm:kvtier_used_bytes|dram"] > 0
    assert worker.stats() is None  # too soon
    worker._told._next = 0.0
    save(worker, [0, 1])
    assert worker.stats().data["vllm:kvtier_chunks|put|known"] == 1
