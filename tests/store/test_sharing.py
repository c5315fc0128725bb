"""Kind `files`: what processes that share a directory see of each other, and what they may take up."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtier
from kvtier import Reason
from kvtier.config import KIB, MIB
from kvtier.errors import TierUnavailable
from kvtier.store import watcher
from kvtier.testing.emulated import EmulatedDevice
from kvtier.testing.faults import Fault
from kvtier.tiers.files import owners
from kvtier.tiers.files.directory import OWNERS
from kvtier.tiers.files.format import parse_owner
from sharing_process import Process
from small_stores import CHUNK, bytes_on_disk, numbered_key, random_payload
from store_calls import HIT, KNOWN, MISS, STORED, got, idle, outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PATIENCE = 20.0
"""Seconds that a loaded machine gets for what takes a second."""


@pytest.fixture(params=["files"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """`process(**settings)`: another process on the directory that `open_store` opens."""
    started: list[Process] = []

    def make(path: Path = tmp_path / "store", **settings: Any) -> Process:
        started.append(Process(path, **settings))
        return started[-1]

    yield make
    for one in started:
        one.kill()


def until(condition: Callable[[], bool]) -> None:
    """Wait until it is so."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came to be so"
        time.sleep(0.01)


def test_others_are_looked_at_often_enough_for_a_second() -> None:
    assert watcher._EVERY <= 0.25


def test_what_one_process_puts_is_a_hit_in_the_other(
    open_store: Any, process: Callable[..., Process], keys: Any, payloads: Any
) -> None:
    store, other = open_store(dram=0), process()
    assert other.do("put", 0, 20, CHUNK) == {"STORED": 20}
    until(lambda: store.match(keys(20)) == 20)
    result, targets = got(store, keys(20))
    assert result.ok
    assert all((targets[i] == random_payload(i)).all() for i in range(20))
    assert store.put(keys(30), [random_payload(i) for i in range(30)], until="disk").result(20).ok
    until(lambda: other.do("match", 0, 30) == 30)
    assert other.do("get", 0, 30, CHUNK) == {"HIT": 30}
    stats = store.stats()
    assert stats["put.known"] == 20, "what another process has stored is not stored again"
    assert stats["disk.bytes_in_directory"] == bytes_on_disk(store.config.path)


def test_a_miss_costs_no_io(open_store: Any, process: Callable[..., Process], keys: Any) -> None:
    """Invariant 3, though the directory is shared: what is there is known in memory."""
    store = open_store()
    process()
    before = store.stats()["disk.bytes_read"]
    opened = []
    directory = store._core.paths[0].tier._directory
    directory.open_chunk = opened.append
    result, _ = got(store, keys(20))
    assert set(result.reason.tolist()) == {Reason.ABSENT}
    assert not opened
    assert store.stats()["disk.bytes_read"] == before


def test_deletes_reach_the_others_and_their_dram(
    open_store: Any, process: Callable[..., Process], keys: Any
) -> None:
    store, other = open_store(), process()
    other.do("put", 0, 10, CHUNK)
    until(lambda: store.match(keys(10)) == 10)
    assert got(store, keys(10))[0].ok
    assert store.stats()["dram.chunks"] == 10
    assert other.do("delete", 0, 10) == 10
    until(lambda: store.match(keys(10)[:1]) == 0)
    until(lambda: store.stats()["dram.chunks"] == store.stats()["disk.chunks"] == 0)
    assert got(store, keys(10))[0].status.tolist() == [MISS] * 10


def test_tenants_are_known_by_name_to_all(
    open_store: Any, process: Callable[..., Process], keys: Any
) -> None:
    """To those that come later, and to those that were there when a tenant put its first chunk."""
    early = process(quotas={"acme": 64 * CHUNK})
    other = process()
    assert other.do("put_owned", 0, 10, CHUNK, "acme")
    assert other.do("put_owned", 10, 5, CHUNK, "beta")
    store = open_store(quotas={"acme": 8 * CHUNK})
    until(lambda: early.do("match", 0, 15) == 15)
    assert early.do("stats")["tenant.acme.disk_bytes"] == 10 * CHUNK
    assert {(row.tenant, row.chunks) for row in store.owners()} == {("acme", 10), ("beta", 5)}
    assert store.stats()["tenant.acme.disk_bytes"] == 10 * CHUNK
    owner = kvtier.Owner(tenant="acme")
    assert store.put(keys(21)[20:], [random_payload(20)], until="disk", owner=owner).result(20).ok
    assert store.stats()["tenant.acme.disk_bytes"] == 8 * CHUNK, "the quota reaches what others have put"
    assert store.match(keys(15)[10:]) == 5
    assert early.do("delete_all", "beta") == 5
    until(lambda: store.match(keys(15)[10:]) == 0)
    until(lambda: other.do("match", 10, 5) == 0)


def test_names_of_tenants_who_have_nothing_left_do_not_pile_up(
    open_store: Any, keys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners, "_MANY", 8)
    store = open_store()
    tier, path = store._core.paths[0].tier, store.config.path / OWNERS
    for i in range(8):
        owner = kvtier.Owner(tenant=f"tenant {i}")
        assert store.put([numbered_key(i)], [random_payload(i)], until="disk", owner=owner).result(20).ok
        if i != 5:
            assert store.delete([numbered_key(i)]).result(20) == 1
    assert len(list(path.iterdir())) == 8
    store.flush().result(20)
    tier._sweep()
    left = [parse_owner(file.name) for file in path.iterdir()]
    assert left == [kvtier.Owner(tenant="tenant 5").name]
    store.delete(keys(8)).result(20)
    store.flush().result(20)
    store.close()
    open_store()
    assert list(path.iterdir()) == []


def test_what_is_deleted_can_be_put_again_by_anybody(
    open_store: Any, process: Callable[..., Process], keys: Any, payloads: Any
) -> None:
    store, other = open_store(dram=0), process()
    for _ in range(3):
        assert store.put(keys(5), payloads(5), until="disk").result(20).ok
        until(lambda: other.do("match", 0, 5) == 5)
        assert other.do("delete", 0, 5) == 5
        assert other.do("match", 0, 1) == 0
        assert other.do("put", 0, 5, CHUNK) == {"STORED": 5}
        until(lambda: store.match(keys(5)) == 5)
        assert store.delete(keys(5)).result(20) == 5
        until(lambda: other.do("match", 0, 1) == 0)


def test_a_process_that_comes_later_finds_everything(
    open_store: Any, process: Callable[..., Process], keys: Any, payloads: Any
) -> None:
    store = open_store()
    assert store.put(keys(20), payloads(20), until="disk").result(20).ok
    assert process().do("get", 0, 20, CHUNK) == {"HIT": 20}


def test_descriptors_do_not_run_out(open_store: Any, payload: Any) -> None:
    """As many files are open at a time as a path may have, however many chunks a call is about."""
    store = open_store(dram=0, chunk_bytes=4 * KIB, capacity=16 * MIB)
    directory = store._core.paths[0].tier._directory
    most = [0, 0]

    def count(i: int, call: Any, *args: Any) -> Any:
        result = call(*args)
        most[i] = max(most[i], len(directory.open_files))
        return result

    for i, name in enumerate(("create", "open_chunk")):
        setattr(directory, name, partial(count, i, getattr(directory, name)))
    some = [numbered_key(i) for i in range(600)]
    values = [payload(i, 4 * KIB) for i in range(600)]
    assert store.put(some, values, until="disk").result(60).ok
    targets = np.zeros((600, 4 * KIB), np.uint8)
    assert store.get(some, into=targets).result(60).ok
    assert (targets == np.stack(values)).all()
    assert min(most) > 0
    assert max(most) <= 256
    assert not directory.open_files


def test_two_stores_of_one_process(open_store: Any, keys: Any, payloads: Any) -> None:
    one, two = open_store(dram=0), open_store(dram=0)
    assert one.put(keys(10), payloads(10), until="disk").result(20).ok
    until(lambda: two.match(keys(10)) == 10)
    assert (got(two, keys(10))[1] == payloads(10)).all()
    assert two.delete(keys(10)[:5]).result(20) == 5
    until(lambda: one.match(keys(10)) == 0)
    assert one.match(keys(10)[5:]) == 5
    one.close()
    assert two.put(keys(5), payloads(5), until="disk").result(20).ok


def test_the_same_chunks_put_by_all_at_once_are_stored_once(
    open_store: Any, process: Callable[..., Process], keys: Any
) -> None:
    others = [process() for _ in range(3)]
    for other in others:
        other.start("put", 0, 60, CHUNK)
    outcomes = [other.receive() for other in others]
    assert all(set(outcome) <= {"STORED", "KNOWN"} for outcome in outcomes)
    store = open_store(dram=0)
    assert store.stats()["disk.chunks"] == 60
    assert [other.do("get", 0, 60, CHUNK) for other in others] == [{"HIT": 60}] * 3


def test_two_processes_have_full_hits_on_each_others_32_sessions(
    process: Callable[..., Process], tmp_path: Path
) -> None:
    """32 sessions of 8 chunks each, and a directory with room for all."""
    settings = {"capacity": 64 * MIB, "dram": 0, "landing": 8 * MIB}
    one, two = process(**settings), process(**settings)
    one.start("put", 0, 256, CHUNK, 8)
    two.start("put", 1000, 256, CHUNK, 8)
    assert one.receive() == two.receive() == {"STORED": 256}
    until(lambda: one.do("match", 1000, 256) == two.do("match", 0, 256) == 256)
    full = 0
    for session in range(32):
        one.start("get", 1000 + 8 * session, 8, CHUNK)
        two.start("get", 8 * session, 8, CHUNK)
        full += (one.receive() == {"HIT": 8}) + (two.receive() == {"HIT": 8})
    assert full == 64
    one.end()
    two.end()


def test_invariant_5_processes_that_put_at_once_never_exceed_the_capacity(
    process: Callable[..., Process],
) -> None:
    """By their sizes, whenever somebody looks; and the device never holds more than that and what the kernel
    has not let go of yet: it keeps a removed file's room until the last descriptor's end is through.
    """
    capacity, late = 6 * MIB, 2 * MIB
    try:
        device = EmulatedDevice("instant", size="64MiB")
    except TierUnavailable as error:
        pytest.skip(str(error))
    with device:
        path = device.paths[0] / "store"
        others = [process(path, capacity=capacity, chunk_bytes=2 * CHUNK) for _ in range(4)]
        guard = device.inject(Fault(op="any", errno=errno.EIO, capacity=capacity + late))
        sizes = (CHUNK, 3 * CHUNK // 2, 100, 2 * CHUNK)
        for i, other in enumerate(others):
            other.start("put", 1000 * i, 150, sizes[i])
        most = looks = 0
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(other.receive) for other in others]
            while not all(answer.done() for answer in answers):
                most, looks = max(most, bytes_on_disk(path)), looks + 1
        outcomes = [answer.result() for answer in answers]
        assert all(set(outcome) <= {"STORED", "REFUSED"} for outcome in outcomes), outcomes
        assert sum(outcome["STORED"] for outcome in outcomes) > 200
        assert capacity // 2 < most <= capacity
        assert looks > 10
        assert guard.hits == 0
        for other in others:
            other.end()
        for file in path.glob("**/*"):
            assert file.stat().st_mode & 0o077 == 0


def test_a_reader_beside_puts_evictions_and_deletes_sees_no_wrong_byte(
    process: Callable[..., Process],
) -> None:
    settings = {"capacity": 3 * MIB, "dram": 0}
    writers = [process(**settings) for _ in range(2)]
    reader = process(**settings)
    for i, writer in enumerate(writers):
        writer.start("churn", 30 * i, 40, CHUNK, 4.0)
    reader.start("look", 0, 70, CHUNK, 4.0)
    seen = reader.receive()
    assert all(writer.receive() > 0 for writer in writers)
    assert set(seen) == {"HIT", "MISS"}, seen
    stats = reader.do("stats")
    assert stats["get.checksum"] == stats["get.io_error"] == stats["get.short_read"] == 0


def test_what_another_process_uses_outlives_what_nobody_uses(
    open_store: Any, process: Callable[..., Process], keys: Any, payloads: Any
) -> None:
    store = open_store(capacity=2 * MIB, dram=0)
    assert store.put(keys(20), payloads(20), until="disk").result(20).ok
    other = process(capacity=2 * MIB)
    tier = store._core.paths[0].tier
    long_ago = time.time_ns() - 3600 * 10**9
    for name in os.listdir(tier.path / "chunks"):
        os.utime(tier.path / "chunks" / name, ns=(long_ago, long_ago))
    other.end()
    user = process(capacity=2 * MIB)  # it sees old files, and marks what it uses
    assert user.do("get", 0, 10, CHUNK) == {"HIT": 10}
    chunks = [tier._name(tier._catalog.file(tier.find(key))) for key in keys(10)]
    until(lambda: all(os.stat(tier.path / "chunks" / n).st_mtime_ns > long_ago for n in chunks))
    for row in tier.index.table.rows().tolist():
        tier._catalog.saw(row, long_ago)
    fresh = [numbered_key(i) for i in range(100, 115)]
    assert store.put(fresh, payloads(15), until="disk").result(20).ok
    assert store.match(keys(10)) == 10
    assert store.match(keys(20)[10:]) < 10


def test_the_capacity_that_the_last_opener_gave_counts_for_all(
    open_store: Any, process: Callable[..., Process], keys: Any, payloads: Any
) -> None:
    store = open_store(capacity=8 * MIB, dram=0)
    assert store.put(keys(100), payloads(100), until="disk").result(20).ok
    process(capacity=4 * MIB)
    assert bytes_on_disk(store.config.path) <= 4 * MIB
    until(lambda: store.stats()["disk.capacity"] == 4 * MIB)
    until(lambda: store.stats()["disk.bytes"] < 4 * MIB)
    result, targets = got(store, keys(100))
    hits = result.status == HIT
    assert 50 < hits.sum() < 64
    assert (targets[hits] == payloads(100)[hits]).all()
    assert store.put(keys(40), payloads(40), until="disk").result(20).ok
    assert bytes_on_disk(store.config.path) <= 4 * MIB


def test_more_events_than_the_ledger_remembers(
    open_store: Any, process: Callable[..., Process], keys: Any
) -> None:
    """The directory is listed then, and the index is right again."""
    store = open_store(dram=0, capacity=32 * MIB, chunk_bytes=4 * KIB)
    tier = store._core.paths[0].tier
    with tier._ledger._mutex:  # its watcher sees nothing meanwhile
        other = process(capacity=32 * MIB)
        assert other.do("put", 0, 300, 4 * KIB, 100) == {"STORED": 300}
        assert other.do("delete", 0, 100) == 100
        assert other.do("put", 300, 300, 4 * KIB, 100) == {"STORED": 300}
    until(lambda: store.match([numbered_key(i) for i in range(100, 600)]) == 500)
    assert store.stats()["disk.chunks"] == 500
    assert store.match(keys(1)) == 0


def test_put_of_what_is_known_elsewhere_costs_no_room(
    open_store: Any, process: Callable[..., Process], keys: Any, payloads: Any
) -> None:
    """Put by both before either knows: the second to finish keeps the file that is there."""
    store = open_store(dram=0)
    tier = store._core.paths[0].tier
    other = process()
    prepare = tier.prepare

    def prepare_late(plan: Any) -> None:
        prepare(plan)
        other.do("put", 0, 4, CHUNK)

    tier.prepare = prepare_late
    result = store.put(keys(4), payloads(4), until="disk").result(20)
    assert result.status.tolist() == [STORED] * 4
    assert store.put(keys(4), payloads(4), until="disk").result(20).status.tolist() == [KNOWN] * 4
    idle(store)
    assert store.stats()["disk.chunks"] == 4
    assert bytes_on_disk(store.config.path) == 4 * CHUNK + tier._ledger.nbytes
    assert (got(store, keys(4))[1] == payloads(4)).all()


def test_a_process_that_is_killed_harms_nobody(
    open_store: Any, process: Callable[..., Process], keys: Any, payloads: Any
) -> None:
    store = open_store(capacity=3 * MIB, dram=0)

    def put_and_got() -> bool:
        """Not at once: what the other removed last is KNOWN until that is noticed."""
        assert store.put(keys(20), payloads(20), until="disk").result(20).ok
        result, targets = got(store, keys(20))
        assert set(result.reason.tolist()) <= {Reason.NONE, Reason.ABSENT}
        return bool((targets == payloads(20)).all())

    for i in range(5):
        other = process(capacity=3 * MIB)
        other.start("churn", 0, 60, CHUNK, 30.0)
        time.sleep(0.3 + 0.1 * i)
        other.kill()
        until(put_and_got)
        assert store.delete(keys(20)).result(20) == 20
        assert bytes_on_disk(store.config.path) <= 3 * MIB


def test_a_process_that_is_stopped_costs_puts_and_no_reads(open_store: Any, keys: Any, payloads: Any) -> None:
    """It may hold the ledger's lock: what others put meanwhile waits, and what is there is read."""
    store = open_store(dram=0)
    assert store.put(keys(3), payloads(3), until="disk").result(20).ok
    with (store.config.path / "ledger").open() as ledger:
        fcntl.flock(ledger, fcntl.LOCK_EX)
        transfer = store.put(keys(5)[3:], payloads(5)[3:], until="disk", timeout=5)
        while not transfer.done():
            assert got(store, keys(3))[0].ok
            assert not store.stats()["disk.down"]
            time.sleep(0.1)
        assert outcome(transfer.result(1)) == (kvtier.Status.FAILED, Reason.DEADLINE)
        assert got(store, keys(3))[0].ok
    assert store.put(keys(5), payloads(5), until="disk").result(20).ok
    assert got(store, keys(5))[0].ok


def test_a_forked_child_leaves_the_parents_files_alone(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store(dram=0)
    assert store.put(keys(3), payloads(3), until="disk").result(20).ok
    pid = os.fork()
    if pid == 0:
        held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)]
        os._exit(any(str(store.config.path) in name for name in held))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert store.put(keys(6), payloads(6), until="disk").result(20).ok
    into = np.zeros((6, CHUNK), np.uint8)
    assert store.get(keys(6), into=into).result(20).ok
    with pytest.raises(kvtier.InvalidRequest):
        store.get(keys(1), into=[])


def _is_link(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")
