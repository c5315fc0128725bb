"""Copies of hits in DRAM: on the store's thread, or on the one that waits for them."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvtier.store import hits
from small_stores import CHUNK
from store_calls import idle

if TYPE_CHECKING:
    from collections.abc import Iterator

    import kvtier


@pytest.fixture
def filled(open_store: Any, keys: Any, payloads: Any) -> kvtier.Store:
    store: kvtier.Store = open_store()
    store.put(keys(8), payloads(8)).result(20)
    idle(store)
    return store


@pytest.fixture
def held(filled: kvtier.Store) -> Iterator[threading.Event]:
    """The store's own copier is busy until this is set."""
    go_on = threading.Event()
    filled._core.copier.submit(lambda: go_on.wait(20))
    yield go_on
    go_on.set()


def test_whoever_waits_does_not_need_the_copier(
    filled: kvtier.Store, held: threading.Event, keys: Any, payloads: Any
) -> None:
    targets = np.zeros((8, CHUNK), np.uint8)
    assert filled.get(keys(8), into=targets).result().ok
    assert (targets == payloads(8)).all()
    assert filled.stats()["dram.hits"] == 8
    assert filled.stats()["dram.pinned_slots"] == 0


def test_whoever_waits_briefly_is_not_kept_by_a_copy(
    filled: kvtier.Store, held: threading.Event, keys: Any
) -> None:
    transfer = filled.get(keys(8), into=np.zeros((8, CHUNK), np.uint8))
    with pytest.raises(TimeoutError):
        transfer.result(0.01)
    held.set()
    assert transfer.result(20).ok


def test_an_event_loop_is_never_kept_by_a_copy(
    filled: kvtier.Store, held: threading.Event, keys: Any
) -> None:
    async def get() -> kvtier.BatchResult:
        transfer = filled.get(keys(8), into=np.zeros((8, CHUNK), np.uint8))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(transfer, 0.05)
        held.set()
        return await transfer

    assert asyncio.run(get()).ok


def test_ctrl_c_in_the_midst_of_a_copy_leaves_it_to_the_copier(
    filled: kvtier.Store, held: threading.Event, keys: Any, payloads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(hits, "copy_many", interrupted)
    targets = np.zeros((8, CHUNK), np.uint8)
    transfer = filled.get(keys(8), into=targets)
    with pytest.raises(KeyboardInterrupt):
        transfer.result()
    held.set()
    assert transfer.result(20).ok
    assert (targets == payloads(8)).all()
    assert filled.stats()["dram.pinned_slots"] == 0
    assert filled.stats()["dram.hits"] == 8
