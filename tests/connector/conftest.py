"""What the connector's tests share: connectors that leave nothing behind, and an emulated device."""

from __future__ import annotations

import gc
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest

from devices import instant_device
from engine_sim import connector_of, engine_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine_kv import EngineTensors
    from kvtier.connector import Connector
    from kvtier.testing.emulated import EmulatedDevice


@pytest.fixture
def connect(open_store: Any) -> Iterator[Callable[..., tuple[Connector, EngineTensors]]]:
    """`connect(store, tensors=None, **options)`: a connector and its engine's tensors.

    At the end no operation may be left, and no counter may miss a chunk.
    """
    made: list[Connector] = []

    def make(
        store: Any, tensors: EngineTensors | None = None, **options: Any
    ) -> tuple[Connector, EngineTensors]:
        tensors = tensors or engine_tensors()
        made.append(connector_of(store, tensors, **options))
        return made[-1], tensors

    yield make
    gc.collect()
    for connector in made:
        connector.close()
        numbers = connector.stats()
        assert numbers["active"] == numbers["queued_chunks"] == 0
        for kind in ("load", "save"):
            counts = {
                name.removeprefix(f"{kind}."): n for name, n in numbers.items() if name.startswith(kind)
            }
            requested = counts.pop("requested")
            del counts["bytes"], counts["seconds"]
            assert requested == sum(counts.values())


@pytest.fixture(scope="module")
def shared_device() -> Iterator[EmulatedDevice]:
    yield from instant_device("64MiB")


@pytest.fixture
def device(shared_device: EmulatedDevice) -> Iterator[EmulatedDevice]:
    """A device without timing, empty and without faults."""
    yield shared_device
    shared_device.clear_faults()
    for folder in shared_device.paths[0].iterdir():
        shutil.rmtree(folder)


@pytest.fixture
def disk_store(device: EmulatedDevice, tmp_path: Any, open_store: Any) -> Iterator[Callable[..., Any]]:
    """`disk_store(**settings)`: a store on the device; without DRAM, unless `dram` says so."""

    def make(**settings: Any) -> Any:
        folder = device.paths[0] / tmp_path.name
        return open_store(**{"paths": (folder,), "dram": 0, "capacity": 8 << 20, **settings})

    yield make
    device.clear_faults()


@pytest.fixture(scope="session")
def eventually() -> Callable[..., None]:
    """`eventually(condition, seconds=10)`: poll until it holds."""

    def wait(condition: Callable[[], object], seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not come to be in time"
            time.sleep(0.002)

    return wait
