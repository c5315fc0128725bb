"""The tier's contract with vLLM's manager, on vLLM's own classes."""

from __future__ import annotations

import threading
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import TierUnavailable
from kvtier.testing.emulated import EmulatedDevice
from kvtier.testing.faults import Fault

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SLAB = "slab*"


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    try:
        device = EmulatedDevice(size="64MiB")
    except TierUnavailable as error:
        pytest.skip(str(error))
    with device:
        yield device


def names(found: list[Any]) -> list[str]:
    return [result.name for result in found]


def test_what_was_stored_comes_back_into_the_rows(make_pool: Callable[..., Any]) -> None:
    pool = make_pool()
    pool.store(*range(8))
    pool.forget()
    context, found = pool.find(*range(9))
    assert names(found) == ["HIT_PENDING"] * 8 + ["MISS"]
    pool.settle()
    assert pool.look(context, *range(8)) == ["HIT"] * 8
    for i, row in enumerate(pool.rows_of(context, *range(8))):
        assert (row == pool.content(i)).all()


def test_vllm_finds_the_tier_by_its_type_and_by_its_module() -> None:
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    from kvtier.integrations.vllm import KvtierTier
    from kvtier.integrations.vllm.plugin import register

    register()
    register()  # as in a process that loads its plugins twice
    by_module = {"type": "KvtierTier", "module_path": "kvtier.integrations.vllm"}
    for config in ({"type": "kvtier"}, by_module):
        assert SecondaryTierFactory.get_tier_class(config) is KvtierTier


def test_a_new_engine_finds_what_the_last_one_stored(make_pool: Callable[..., Any]) -> None:
    first = make_pool()
    first.store(1, 2)
    first.close()
    second = make_pool()
    _, found = second.find(1, 2, 3)
    assert names(found) == ["HIT_PENDING", "HIT_PENDING", "MISS"]


def test_of_a_load_that_fails_in_part_the_rest_is_kept(
    make_pool: Callable[..., Any], device: EmulatedDevice
) -> None:
    pool = make_pool(paths=str(device.paths[0]))
    pool.store(*range(8))
    pool.forget()
    device.inject(Fault(op="read", errno=5, count=1, file=SLAB))
    context, _ = pool.find(*range(8))
    pool.settle()
    found = pool.look(context, *range(8))
    assert sorted(found) == ["HIT"] * 7 + ["MISS"]  # and not looked up again and again
    arrived = [i for i, name in enumerate(found) if name == "HIT"]
    for i, row in zip(arrived, pool.rows_of(context, *arrived), strict=True):
        assert (row == pool.content(i)).all()


def test_what_could_not_be_loaded_is_found_once_it_is_stored_anew(
    make_pool: Callable[..., Any], device: EmulatedDevice
) -> None:
    pool = make_pool(paths=str(device.paths[0]))
    pool.store(1)
    pool.forget()
    device.inject(Fault(op="read", errno=5, count=1, file=SLAB))
    pool.find(1)
    pool.settle()
    _, found = pool.find(1)
    assert names(found) == ["MISS"]
    pool.store(1)
    pool.forget()
    context, found = pool.find(1)
    pool.settle()
    assert names(found) == ["HIT_PENDING"]
    assert (pool.rows_of(context, 1)[0] == pool.content(1)).all()


def test_a_row_is_vllms_again_only_when_the_kernel_is_done_with_it(
    make_pool: Callable[..., Any], device: EmulatedDevice
) -> None:
    pool = make_pool(paths=str(device.paths[0]), get_timeout=0.2)
    pool.store(*range(4))
    pool.forget()
    device.inject(Fault(op="read", hang=True, file=SLAB))
    context, _ = pool.find(*range(4))
    pool.step()
    (transfer,) = (job.transfer for job in pool.loads())
    assert not transfer.result(30).ok  # the deadline is over
    pool.step()
    assert pool.look(context, *range(4)) == ["HIT_PENDING"] * 4
    drained = threading.Thread(target=pool.manager.reset_cache)
    drained.start()
    drained.join(0.3)
    assert drained.is_alive()  # it waits for the device
    device.clear_faults()
    drained.join(30)
    assert not drained.is_alive()
    assert not pool.manager.has_pending_work()


def test_loads_that_are_no_loans_end_at_their_deadline(
    make_pool: Callable[..., Any], device: EmulatedDevice
) -> None:
    pool = make_pool(paths=str(device.paths[0]), get_timeout=0.2, lend=False, close_timeout=1.0)
    pool.store(*range(4))
    pool.forget()
    device.inject(Fault(op="read", hang=True, file=SLAB))
    context, _ = pool.find(*range(4))
    pool.settle_loads()
    assert pool.look(context, *range(4)) == ["MISS"] * 4


def test_shutdown_keeps_the_rows_that_the_kernel_holds(
    make_pool: Callable[..., Any], device: EmulatedDevice
) -> None:
    pool = make_pool(paths=str(device.paths[0]), close_timeout=0.5)
    pool.store(1)
    pool.forget()
    device.inject(Fault(op="read", hang=True, file=SLAB))
    pool.find(1)
    pool.step()
    with pytest.raises(TierUnavailable, match="still in the kernel"):
        pool.manager.shutdown()
    assert pool.row(0).nbytes  # still mapped
    (load,) = pool.loads()
    device.clear_faults()
    assert load.transfer.wait_released(30)
    pool.close()


def test_shutdown_with_loads_and_stores_under_way_lets_go_of_everything(
    make_pool: Callable[..., Any],
) -> None:
    pool = make_pool()
    pool.store(*range(16))
    pool.forget()
    pool.find(*range(8))
    pool.store(*range(100, 108))
    pool.step()
    pool.close()  # releases the pool's memory, which fails if anybody still has it
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvtier")]


def test_when_the_disk_does_not_keep_up_stores_are_shed(
    make_pool: Callable[..., Any], device: EmulatedDevice
) -> None:
    pool = make_pool(paths=str(device.paths[0]), landing="64KiB", put_timeout=60.0, close_timeout=1.0)
    device.inject(Fault(op="write", hang=True, file=SLAB))
    for i in range(0, 24, 4):
        pool.store(*range(i, i + 4))
        pool.step()
    waiting = sum(len(job.names) for job, _ in pool.tier._stores._jobs)
    assert 0 < waiting <= 16  # half of the pool
    assert pool.tier._shed >= 24 - 16 - 4
    device.clear_faults()
    pool.settle()
    assert pool.tier._stores.room(100) == 16


def test_a_reset_starts_anew_unless_the_weights_are_said_to_stay(make_pool: Callable[..., Any]) -> None:
    pool = make_pool(keep_after_reset=False)
    pool.store(1)
    pool.forget()
    assert names(pool.find(1)[1]) == ["MISS"]


def test_metrics_are_differences_and_seldom(make_pool: Callable[..., Any]) -> None:
    pool = make_pool()
    pool.store(*range(4))
    pool.settle()
    first = pool.tier.get_stats()
    assert first.data["data"]["vllm:kvtier_chunks"] == {("put", "stored"): 4}
    assert pool.tier.get_stats() is None  # too soon
    assert set(first.data["data"]) <= set(pool.tier.build_metric_definitions({}))


def test_a_chunk_that_is_hot_above_does_not_age_on_disk(make_pool: Callable[..., Any]) -> None:
    pool = make_pool(capacity="4MiB")
    pool.store(0)
    pool.settle()
    for i in range(1, 100):
        pool.store(i)
        pool.settle()
        pool.tier.touch([pool.key(0)], None)
    assert pool.tier._store.stats()["disk.evictions"] > 0
    pool.manager.reset_cache()
    assert names(pool.find(0)[1]) == ["HIT_PENDING"]


def test_after_an_impossible_order_the_scheduler_lives_on(make_pool: Callable[..., Any]) -> None:
    pool = make_pool()
    pool.store(1)
    pool.forget()
    pool.tier._store.close()
    pool.tier._store, closed = None, pool.tier._store
    assert names(pool.find(1)[1]) == ["MISS"]
    pool.store(2)
    pool.step_until(lambda: not pool.manager.has_pending_work())
    pool.tier._store = closed
