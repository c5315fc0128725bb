"""Reads told of chunks piece by piece: what is told is there and right, whatever comes of the rest."""

from __future__ import annotations

import errno
import random
import shutil
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from devices import instant_device
from kvtier import Reason, Status
from kvtier.config import KIB, MIB
from kvtier.store import flight
from kvtier.testing.faults import Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import kvtier
    from kvtier.testing.emulated import EmulatedDevice

PIECE = 64 * KIB
PIECES = 8
CHUNK = PIECES * PIECE
COUNT = 6
IN_ORDER: dict[str, Any] = {"engine": "threads", "io_threads": 1}  # so that a read's number tells its place


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "PIECE_BYTES", PIECE)


@pytest.fixture(scope="module")
def shared_device() -> Iterator[EmulatedDevice]:
    yield from instant_device("64MiB")


@pytest.fixture
def device(shared_device: EmulatedDevice) -> Iterator[EmulatedDevice]:
    yield shared_device
    shared_device.clear_faults()
    for folder in shared_device.paths[0].iterdir():
        shutil.rmtree(folder)


@pytest.fixture
def kind() -> str:
    return "slab"


@pytest.fixture
def stored(
    device: EmulatedDevice, open_store: Any, keys: Any, payload: Any
) -> Iterator[Callable[..., kvtier.Store]]:
    """`stored(**settings)`: a store that has `COUNT` chunks on the device, and none of them in DRAM."""

    def make(codec: str = "raw", **settings: Any) -> kvtier.Store:
        place = device.paths[0] / "store"
        settings = {
            "chunk_bytes": CHUNK,
            "capacity": 16 * MIB,
            "dram": 8 * MIB,
            "landing": 4 * MIB,
            **settings,
        }
        store = open_store(place, **settings)
        content = [payload(i, CHUNK) for i in range(COUNT)]
        assert store.put(keys(COUNT), content, until="disk", codec=codec).result(20).ok
        store.close()
        made.append(open_store(place, **settings))
        return made[-1]

    made: list[kvtier.Store] = []
    yield make
    device.clear_faults()
    end = time.monotonic() + 20
    while any(path.begun_bytes or path.reads.in_flight for store in made for path in store._core.paths):
        assert time.monotonic() < end, "a slot is held by nobody"
        time.sleep(0.01)


class Told:
    """What a read tells. What is told is looked at at once."""

    def __init__(self, payload: Any) -> None:
        self.calls: list[tuple[int, int]] = []
        self.wrong: list[tuple[int, int]] = []
        self._payload = payload

    def __call__(self, i: int, view: Any, nbytes: int) -> None:
        self.calls.append((i, nbytes))
        if nbytes >= 0 and not (view[:nbytes] == self._payload(i, CHUNK)[:nbytes]).all():
            self.wrong.append((i, nbytes))

    def of(self, i: int) -> list[int]:
        return [nbytes for item, nbytes in self.calls if item == i]


@pytest.mark.parametrize("engine", ["auto", "threads", "aio"])
@pytest.mark.parametrize("dram", [0, 8 * MIB])
def test_chunks_come_side_by_side_from_front_to_back(
    stored: Any, keys: Any, payload: Any, engine: str, dram: int
) -> None:
    told = Told(payload)
    store = stored(engine=engine, dram=dram, io_window=CHUNK)
    with store.read(keys(COUNT), on_progress=told).result(20) as lease:
        assert lease.result.ok
        for i, view in enumerate(lease.views):
            assert (view == payload(i, CHUNK)).all()
    assert not told.wrong
    for i in range(COUNT):
        assert told.of(i) == sorted(told.of(i))
        assert told.of(i)[-1] == CHUNK
        assert len(set(told.of(i))) >= PIECES / 2
    first_whole = next(n for n, (_, nbytes) in enumerate(told.calls) if nbytes == CHUNK)
    begun = {i for i, _ in told.calls[:first_whole]}
    assert begun == set(range(COUNT)), "no chunk is whole before all have begun"
    assert store.stats()["disk.bytes_read"] == COUNT * CHUNK


def test_what_is_in_dram_is_told_of_at_once(open_store: Any, keys: Any, payload: Any) -> None:
    store = open_store(False, chunk_bytes=CHUNK, dram=8 * MIB)
    store.put(keys(2), [payload(i, CHUNK) for i in range(2)]).result(20)
    told = Told(payload)
    with store.read(keys(3), on_progress=told).result(20) as lease:
        assert lease.result.prefix == 2
    assert sorted(told.calls) == [(0, CHUNK), (1, CHUNK), (2, -1)]
    assert not told.wrong


@pytest.mark.parametrize(("kind", "codec"), [("files", "raw"), ("slab", "lz4"), ("files", "lz4")])
def test_what_can_be_checked_only_as_a_whole_is_told_of_as_a_whole(
    open_store: Any, tmp_path: Any, kind: str, codec: str, keys: Any
) -> None:
    content = np.zeros((COUNT, CHUNK), np.uint8) + np.arange(COUNT, dtype=np.uint8)[:, None]
    settings = {"chunk_bytes": CHUNK, "capacity": 16 * MIB, "dram": 8 * MIB, "kind": kind}
    store = open_store(**settings)
    assert store.put(keys(COUNT), content, until="disk", codec=codec).result(20).ok
    store.close()
    store = open_store(**settings)
    calls = []
    with store.read(keys(COUNT), on_progress=lambda i, view, n: calls.append((i, n))).result(20) as lease:
        assert all((view == content[i]).all() for i, view in enumerate(lease.views))
    assert {n for _, n in calls} == {CHUNK}


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ({"flip_bit": 77}, Status.MISS, Reason.CHECKSUM),
        ({"errno": errno.EIO}, Status.FAILED, Reason.IO_ERROR),
    ],
)
def test_a_bad_piece_ends_its_chunk_and_no_other(
    stored: Any, device: Any, keys: Any, payload: Any, fault: dict[str, int], status: Status, reason: Reason
) -> None:
    store = stored(io_window=CHUNK, **IN_ORDER)
    device.inject(Fault(op="read", file="slab", nth=COUNT * 4 + 3, count=1, **fault))
    told = Told(payload)
    with store.read(keys(COUNT), on_progress=told).result(20) as lease:
        bad = np.flatnonzero(lease.result.status != Status.HIT)
        assert len(bad) == 1
        assert (lease.result.status[bad[0]], lease.result.reason[bad[0]]) == (status, reason)
        assert lease.views[bad[0]] is None
        assert sum(view is not None for view in lease.views) == COUNT - 1
    assert not told.wrong
    assert told.of(bad[0])[-1] == -1
    assert CHUNK > max(told.of(bad[0])) > 0, "what came before was told, and right"
    assert store.stats()["disk.bytes_read"] < COUNT * CHUNK, "no more of it is read"
    device.clear_faults()
    if reason is Reason.CHECKSUM:
        assert store.match(keys(COUNT)) == bad[0]


def test_what_was_told_stays_until_the_lease_is_released(
    stored: Any, device: Any, keys: Any, key: Any, payload: Any
) -> None:
    """A deadline passes in mid-chunk. Other chunks want the slots, but what was shown does not change."""
    store = stored(dram=COUNT * CHUNK, io_window=CHUNK, **IN_ORDER)
    hang = device.inject(Fault(op="read", file="slab", nth=COUNT * 3, count=100, hang=True))
    shown: dict[int, tuple[Any, int]] = {}

    def look(i: int, view: Any, nbytes: int) -> None:
        if nbytes > 0:
            shown[i] = (view, nbytes)

    lease = store.read(keys(COUNT), on_progress=look, timeout=1.5).result(20)
    assert set(lease.result.reason.tolist()) == {Reason.DEADLINE}
    assert lease.views == [None] * COUNT
    assert len(shown) == COUNT
    hang.remove()
    others = [key(100 + i) for i in range(COUNT)]
    store.put(others, [payload(50 + i, CHUNK) for i in range(COUNT)], timeout=0.3).result(20)
    into = np.zeros((COUNT, CHUNK), np.uint8)
    store.get(keys(COUNT), into=into).result(20)
    for i, (view, nbytes) in shown.items():
        assert (view[:nbytes] == payload(i, CHUNK)[:nbytes]).all()
    shown.clear()
    lease.release()
    assert store.put(others, [payload(50 + i, CHUNK) for i in range(COUNT)]).result(20).ok


def test_a_cancelled_stream_gives_everything_back(stored: Any, device: Any, keys: Any, payload: Any) -> None:
    store = stored(io_window=CHUNK)
    device.inject(Fault(op="read", file="slab", delay=0.002))
    told = Told(payload)
    begun = threading.Event()

    def look(i: int, view: Any, nbytes: int) -> None:
        told(i, view, nbytes)
        begun.set()

    transfer = store.read(keys(COUNT), on_progress=look)
    assert begun.wait(20)
    assert transfer.cancel()
    with transfer.result(20) as lease:
        assert set(lease.result.reason.tolist()) <= {Reason.CANCELLED, Reason.NONE}
        assert lease.result.status[-1] == Status.FAILED
    device.clear_faults()
    calls = len(told.calls)
    buffers = np.zeros((COUNT, CHUNK), np.uint8)
    assert store.get(keys(COUNT), into=buffers).result(20).ok
    assert all((buffers[i] == payload(i, CHUNK)).all() for i in range(COUNT))
    assert len(told.calls) == calls, "nothing is told after the outcome"
    assert not told.wrong


def test_others_join_a_stream_and_a_stream_joins_others(
    stored: Any, device: Any, keys: Any, payload: Any
) -> None:
    store = stored(io_window=CHUNK)
    device.inject(Fault(op="read", file="slab", delay=0.002))
    told, late = Told(payload), Told(payload)
    buffers = np.zeros((COUNT, CHUNK), np.uint8)
    get = store.get(keys(2), into=buffers[:2])
    stream = store.read(keys(COUNT), on_progress=told)
    again = store.read(keys(COUNT), on_progress=late)
    rest = store.get(keys(COUNT)[2:], into=buffers[2:])
    assert get.result(20).ok
    assert rest.result(20).ok
    assert all((buffers[i] == payload(i, CHUNK)).all() for i in range(COUNT))
    for transfer in (stream, again):
        with transfer.result(20) as lease:
            assert lease.result.ok
    assert not told.wrong
    assert not late.wrong
    assert store.stats()["disk.bytes_read"] == COUNT * CHUNK, "each chunk is read once for all"


def test_more_than_dram_holds_keeps_its_head(stored: Any, keys: Any, payload: Any) -> None:
    store = stored(dram=4 * CHUNK)
    told = Told(payload)
    with store.read(keys(COUNT), on_progress=told).result(20) as lease:
        assert lease.result.status.tolist() == [Status.HIT] * 4 + [Status.REFUSED] * 2
        assert lease.result.reason[-1] == Reason.NO_SPACE
    assert not told.wrong


def test_who_is_told_may_fail(stored: Any, keys: Any, payload: Any) -> None:
    def fails(i: int, view: Any, nbytes: int) -> None:
        raise RuntimeError("of the caller's own")

    with stored().read(keys(COUNT), on_progress=fails).result(20) as lease:
        assert lease.result.ok


def test_a_device_that_fails_in_mid_stream(stored: Any, device: Any, keys: Any, payload: Any) -> None:
    store = stored(io_window=CHUNK, **IN_ORDER)
    device.inject(Fault(op="read", file="slab", nth=COUNT * 2, errno=errno.EIO))
    told = Told(payload)
    with store.read(keys(COUNT), on_progress=told).result(20) as lease:
        assert lease.result.prefix == 0
        assert set(lease.result.reason.tolist()) <= {Reason.IO_ERROR, Reason.TIER_DOWN}
    assert not told.wrong


def test_a_store_that_closes_in_mid_stream(stored: Any, device: Any, keys: Any, payload: Any) -> None:
    store = stored(io_window=CHUNK)
    device.inject(Fault(op="read", file="slab", delay=0.005))
    begun = threading.Event()
    transfer = store.read(keys(COUNT), on_progress=lambda i, view, nbytes: begun.set())
    assert begun.wait(20)
    store.close()
    lease = transfer.result(20)
    assert Reason.CLOSED in lease.result.reason
    lease.release()


@pytest.mark.parametrize(("dram", "check_dram"), [(4, False), (4, True), (0, False)])
def test_streams_gets_and_cancels_in_any_order(
    stored: Any, device: Any, keys: Any, payload: Any, dram: int, check_dram: bool
) -> None:
    """Never a wrong byte, each read ends, and at the end (the fixture looks) no slot is pinned."""
    store = stored(dram=dram * CHUNK, landing=4 * CHUNK, io_window=CHUNK, check_dram=check_dram)
    device.inject(Fault(op="read", file="slab", delay=0.001, probability=0.5))
    device.inject(Fault(op="read", file="slab", errno=errno.EIO, probability=0.01, count=2))
    wrong: list[object] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(12):
            some = draw.sample(range(COUNT), draw.randint(1, COUNT))
            wanted = [keys(COUNT)[i] for i in some]

            def look(n: int, view: Any, nbytes: int, some: list[int] = some) -> None:
                if nbytes > 0 and not (view[:nbytes] == payload(some[n], CHUNK)[:nbytes]).all():
                    wrong.append((some[n], nbytes))

            timeout = draw.choice([0.005, 20.0])
            if draw.random() < 0.3:
                buffers = np.zeros((len(some), CHUNK), np.uint8)
                hits = store.get(wanted, into=buffers, timeout=timeout).result(30).status == Status.HIT
                wrong.extend(
                    i for n, i in enumerate(some) if hits[n] and (buffers[n] != payload(i, CHUNK)).any()
                )
                continue
            transfer = store.read(wanted, on_progress=look, timeout=timeout)
            if draw.random() < 0.3:
                time.sleep(draw.random() * 0.01)
                transfer.cancel()
            with transfer.result(30) as lease:
                for n, view in enumerate(lease.views):
                    if view is not None and (view != payload(some[n], CHUNK)).any():
                        wrong.append(some[n])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    device.clear_faults()
    assert not wrong
