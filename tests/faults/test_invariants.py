"""What must always hold, for every I/O engine and kind of disk tier, on a device that fails as it is told.

Numbered as in the design. Each has deeper tests elsewhere, named after it too; here nothing depends on
which engine reads and how the tier keeps its chunks.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtier
from kvtier import Reason, Status
from kvtier.config import MIB
from kvtier.io import uring_obstacle
from kvtier.settings import load
from kvtier.testing.build import obstacle
from kvtier.testing.emulated import EmulatedDevice
from kvtier.testing.faults import Fault
from sharing_process import Process
from small_stores import CHUNK, SMALL, bytes_on_disk, numbered_key, pinned_slots, random_payload
from store_calls import got, idle, outcome, put_and_get

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

KEYS = [numbered_key(i) for i in range(8)]
PAYLOADS = np.stack([random_payload(i) for i in range(8)])
CONTENT = {"slab": "slab", "files": "*.kv1"}
"""Where the payloads are."""

pytestmark = [
    pytest.mark.parametrize("engine", ["uring", "threads", "aio"]),
    pytest.mark.parametrize("kind", ["slab", "files"]),
]


@pytest.fixture(autouse=True)
def _what_this_machine_has(engine: str) -> None:
    if engine == "uring" and (reason := uring_obstacle()):
        pytest.skip(reason)


@pytest.fixture(scope="module")
def one_device() -> Iterator[EmulatedDevice]:
    if reason := obstacle():
        pytest.skip(reason)
    with EmulatedDevice("instant", size="64MiB") as emulated:
        yield emulated


@pytest.fixture
def device(one_device: EmulatedDevice) -> Iterator[EmulatedDevice]:
    yield one_device
    one_device.clear_faults()
    one_device.release_hangs()


@pytest.fixture
def place(device: EmulatedDevice) -> Iterator[Path]:
    path = device.paths[0] / "store"
    yield path
    device.clear_faults()
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def open_store(
    device: EmulatedDevice, place: Path, kind: str, engine: str
) -> Iterator[Callable[..., kvtier.Store]]:
    opened: list[kvtier.Store] = []

    def make(**settings: Any) -> kvtier.Store:
        settings = {**SMALL, "kind": kind, "engine": engine, "dram": 0, **settings}
        opened.append(kvtier.Store(load(place, settings)))
        return opened[-1]

    yield make
    device.clear_faults()
    device.release_hangs()
    for store in opened:
        store.close()


def filled(store: kvtier.Store) -> kvtier.Store:
    assert store.put(KEYS, PAYLOADS, until="disk").result(20).ok
    idle(store)
    return store


@pytest.mark.parametrize("fault", [{"flip_bit": 4097}, {"short": 4096}], ids=["flipped bit", "short"])
def test_invariant_1_a_hit_is_exactly_what_was_put(
    open_store: Any, device: EmulatedDevice, kind: str, fault: dict[str, int]
) -> None:
    store = filled(open_store())
    device.inject(Fault(op="read", file=CONTENT[kind], **fault))
    result, targets = got(store, KEYS)
    hits = [i for i in range(8) if result.status[i] == Status.HIT]
    assert all((targets[i] == PAYLOADS[i]).all() for i in hits)
    assert (len(hits) < 8) == ("flip_bit" in fault), "what is read in pieces is read on"
    counted = Counter(Reason(code).name.lower() for code in result.reason.tolist() if code)
    stats = store.stats()
    assert all(stats[f"get.{reason}"] == count for reason, count in counted.items())
    device.clear_faults()
    for i in range(8):
        put_and_get(store, KEYS[i], PAYLOADS[i])


def test_invariant_2_a_get_never_raises_nor_outlives_its_deadline(
    open_store: Any, device: EmulatedDevice, kind: str
) -> None:
    store = filled(open_store())
    for error in (errno.EIO, errno.ENODEV, errno.ENOMEM):
        device.inject(Fault(op="read", file=CONTENT[kind], errno=error))
        result, _ = got(store, KEYS[:1])
        assert result.status[0] in (Status.FAILED, Status.MISS)
        assert result.reason[0]
        device.clear_faults()
    put_and_get(store, KEYS[7], PAYLOADS[7])
    device.inject(Fault(op="read", file=CONTENT[kind], hang=True))
    result, _ = got(store, KEYS[7:], timeout=0.2)
    assert outcome(result) == (Status.FAILED, Reason.DEADLINE)


def test_invariant_3_a_miss_costs_no_memory_and_no_io(open_store: Any, device: EmulatedDevice) -> None:
    store = filled(open_store())
    before, reads = store.stats(), device.stats()[0].reads
    result, _ = got(store, [numbered_key(100 + i) for i in range(50)])
    assert set(result.reason.tolist()) == {Reason.ABSENT}
    after = store.stats()
    assert device.stats()[0].reads == reads
    for name in ("disk.bytes_read", "landing.pinned_slots", "dram.chunks"):
        assert after[name] == before[name]


def test_invariant_4_a_known_key_moves_nothing(open_store: Any, device: EmulatedDevice, kind: str) -> None:
    store = filled(open_store())
    written = device.stats()[0].written_bytes
    result = store.put(KEYS, PAYLOADS[::-1].copy(), until="disk").result(20)
    assert result.status.tolist() == [Status.KNOWN] * 8
    assert device.stats()[0].written_bytes - written < CHUNK
    result, targets = got(store, KEYS)
    assert result.ok
    assert (targets == PAYLOADS).all()


def test_invariant_5_the_capacity_holds_at_every_instant(open_store: Any, place: Path) -> None:
    """Over a restart with a smaller one, too."""
    most, done = [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            most[0] = max(most[0], bytes_on_disk(place))

    first = 0
    for capacity in (4 * MIB, 2 * MIB):
        store = open_store(capacity=capacity)
        most[0] = 0
        done.clear()
        watcher = threading.Thread(target=watch)
        watcher.start()
        for start in range(first, first + 96, 8):
            keys = [numbered_key(i) for i in range(start, start + 8)]
            assert store.put(keys, PAYLOADS, until="disk").result(20).ok
        first += 96
        done.set()
        watcher.join()
        assert capacity // 2 < most[0] <= capacity
        store.close()
        assert bytes_on_disk(place) <= capacity


def test_invariant_6_what_is_reported_stored_survives_a_kill(
    open_store: Any, place: Path, kind: str, engine: str
) -> None:
    process = Process(place, kind=kind, engine=engine)
    assert process.do("put", 0, 20, CHUNK) == {"STORED": 20}
    process.start("put", 20, 40, CHUNK)
    process.kill()
    store = open_store()
    keys = [numbered_key(i) for i in range(60)]
    for first in range(0, 60, 10):
        result, targets = got(store, keys[first : first + 10])
        for i, status in enumerate(result.status.tolist()):
            assert status == Status.HIT or first >= 20, outcome(result, i)
            assert status != Status.HIT or (targets[i] == random_payload(first + i)).all()


def test_invariant_7_what_is_refused_has_a_reason_and_a_counter(
    open_store: Any, device: EmulatedDevice, kind: str
) -> None:
    store = open_store(max_queued_chunks=4)
    result = store.put(KEYS, PAYLOADS, until="disk").result(20)
    refused = Counter(result.reason.tolist())[Reason.QUEUE_FULL]
    assert refused > 0
    assert store.stats()["put.queue_full"] == refused
    temporary = "*-*" if kind == "files" else "slab"
    device.inject(Fault(op="write", file=temporary, errno=errno.ENOSPC))
    result = store.put([numbered_key(50)], PAYLOADS[:1], until="disk").result(20)
    assert not result.ok
    assert outcome(result)[1] is not Reason.NONE
    assert store.stats()[f"put.{outcome(result)[1].name.lower()}"] == 1


def test_invariant_8_after_a_failure_everything_is_back(
    open_store: Any, device: EmulatedDevice, place: Path
) -> None:
    threads = threading.active_count()
    store = filled(open_store(dram=MIB))
    for op in ("read", "write"):
        device.inject(Fault(op=op, errno=errno.EIO, probability=0.5, seed=2))
        got(store, KEYS, timeout=5)
        store.put([numbered_key(i) for i in range(20, 28)], PAYLOADS, until="disk", timeout=5).result(20)
        device.clear_faults()
    assert pinned_slots(store) == []
    store.close()
    assert threading.active_count() == threads
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd != "3"
             and os.path.exists(f"/proc/self/fd/{fd}")]  # fmt: skip
    assert not [link for link in links if link.startswith(str(place))]


def test_invariant_9_a_forked_child_is_closed_and_the_parent_goes_on(
    tmp_path: Path, kind: str, engine: str
) -> None:
    script = f"""
        import os, numpy as np, kvtier
        value, key = np.full(65536, 7, np.uint8), kvtier.ChunkKey(bytes(32))
        store = kvtier.open({str(tmp_path / "store")!r}, capacity="8MiB", dram=0, landing="1MiB",
                            chunk_bytes=65536, kind={kind!r}, engine={engine!r})
        assert store.put([key], [value], until="disk").result(20).ok
        pid = os.fork()
        if pid == 0:
            try:
                store.get([key], into=[value])
            except kvtier.StoreClosed:
                os._exit(5)
            os._exit(6)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
        target = np.zeros_like(value)
        assert store.get([key], into=[target]).result(20).ok and (target == 7).all()
        store.close()
        """
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_invariant_10_the_counters_of_a_request_add_up_to_it(
    open_store: Any, device: EmulatedDevice, kind: str
) -> None:
    store = filled(open_store(dram=4 * CHUNK))
    idle(store)
    before = store.stats()
    device.inject(Fault(op="read", file=CONTENT[kind], errno=errno.EIO, count=1))
    result, _ = got(store, [*KEYS, numbered_key(90)])
    after = store.stats()

    def grown(name: str) -> Any:
        return after[name] - before[name]

    outcomes = Counter(Status(status).name for status in result.status.tolist())
    reasons = Counter(Reason(code).name.lower() for code in result.reason.tolist() if code)
    assert grown("get.requested") == 9
    assert grown("dram.hits") + grown("disk.hits") == outcomes["HIT"]
    assert outcomes["HIT"] + reasons.total() == 9
    assert all(grown(f"get.{reason}") == count for reason, count in reasons.items())


def test_invariant_11_a_slab_is_one_store_s(open_store: Any, kind: str) -> None:
    store = filled(open_store())
    if kind == "files":
        other = open_store()
        assert other.match(KEYS) == 8
        return
    with pytest.raises(kvtier.StoreInUse, match=str(os.getpid())):
        open_store()
    assert got(store, KEYS)[0].ok


def test_invariant_12_no_salt_no_chunk(open_store: Any) -> None:
    layout = kvtier.KVLayout(layers=1, planes=2, kv_heads=1, head_dim=8, dtype="float16", chunk_tokens=16)
    mine, other = (
        kvtier.Namespace(model="m", weights=bytes(32), layout=layout, salt=salt) for salt in ("secret", "")
    )
    tokens = list(range(128))
    store = open_store()
    assert store.put(mine.chunk_keys(tokens), PAYLOADS, until="disk").result(20).ok
    assert store.match(other.chunk_keys(tokens)) == 0
    assert set(got(store, other.chunk_keys(tokens))[0].reason.tolist()) == {Reason.ABSENT}
    result, targets = got(store, mine.chunk_keys(tokens))
    assert result.ok
    assert (targets == PAYLOADS).all()
