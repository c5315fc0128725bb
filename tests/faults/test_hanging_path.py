"""One of two devices hangs, and DRAM is 0: the landing slots are shared so that the other goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvtier import Reason, Status
from kvtier.config import MIB
from kvtier.testing.build import obstacle
from kvtier.testing.emulated import EmulatedDevice
from kvtier.testing.faults import Fault
from kvtier.testing.profiles import profile
from small_stores import CHUNK, SMALL
from store_calls import outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    import kvtier

SLOTS = 16
"""Landing slots of the store: fewer than a window."""


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    if reason := obstacle():
        pytest.skip(reason)
    with EmulatedDevice(replace(profile("instant"), devices=2), size="64MiB") as made:
        yield made


@pytest.fixture
def store(device: EmulatedDevice) -> Iterator[kvtier.Store]:
    import kvtier

    settings = {**SMALL, "dram": 0, "landing": SLOTS * CHUNK, "capacity": 16 * MIB, "io_window": 4 * MIB}
    with kvtier.open([path / "store" for path in device.paths], **settings) as opened:
        yield opened
        device.clear_faults()


def on_path(store: kvtier.Store, number: int, keys: list[Any]) -> list[Any]:
    tier = store._core.paths[number].tier
    return [key for key in keys if tier.find(key) >= 0]


def test_reads_of_a_path_that_hangs_leave_slots_for_the_other(
    store: kvtier.Store, device: EmulatedDevice, key: Any, payload: Any
) -> None:
    keys = [key(i) for i in range(180)]  # whatever shares the paths get, more than slots each
    assert store.put(keys, [payload(i) for i in range(180)], until="disk").result(20).ok
    sound, struck = on_path(store, 0, keys), on_path(store, 1, keys)
    assert len(struck) > SLOTS
    device.inject(Fault(op="read", file="slab", hang=True), device=1)
    late = store.get(struck, into=np.zeros((len(struck), CHUNK), np.uint8), timeout=30)
    targets = np.zeros((len(sound), CHUNK), np.uint8)
    result = store.get(sound, into=targets, timeout=10).result(15)
    assert result.ok, "starved"
    for key_, target in zip(sound, targets, strict=True):
        assert (target == payload(int.from_bytes(key_, "little"))).all()
    device.clear_faults()
    for i in range(len(struck)):
        assert outcome(late.result(40), i) in (
            (Status.HIT, Reason.NONE), (Status.FAILED, Reason.TIER_DOWN)
        )  # fmt: skip


def test_writes_of_a_path_that_hangs_leave_slots_for_the_other(
    store: kvtier.Store, device: EmulatedDevice, key: Any, payload: Any
) -> None:
    device.inject(Fault(op="write", file="slab", hang=True), device=1)
    keys = [key(i) for i in range(60)]
    result = store.put(keys, [payload(i) for i in range(60)], until="disk", timeout=5).result(10)
    stored = int((result.status == Status.STORED).sum())
    assert stored >= 60 - 3 * SLOTS // 4, "starved"
    assert len(on_path(store, 0, keys)) == stored


def test_a_path_alone_has_all_slots(device: EmulatedDevice, key: Any, payload: Any) -> None:
    import kvtier

    settings = {**SMALL, "dram": 0, "landing": SLOTS * CHUNK, "io_window": 4 * MIB}
    with kvtier.open(device.paths[0] / "store", **settings) as store:
        keys = [key(i) for i in range(40)]
        assert store.put(keys, [payload(i) for i in range(40)], until="disk").result(20).ok
        device.inject(Fault(op="read", file="slab", hang=True), device=0)
        transfer = store.get(keys, into=np.zeros((40, CHUNK), np.uint8), timeout=0.5)
        transfer.result(5)
        assert store.stats()["landing.pinned_slots"] == SLOTS
        device.clear_faults()
        assert store.get(keys, into=np.zeros((40, CHUNK), np.uint8)).result(20).ok
