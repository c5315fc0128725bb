"""Expiry, quotas and deletion of what a slow device is still at, and who owns what after `kill -9`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtier
from kvtier import Owner, Reason, Status
from kvtier.config import MIB
from small_stores import CHUNK, SMALL, WallClock, numbered_key
from store_calls import HIT, KNOWN, STORED, got, outcome

if TYPE_CHECKING:
    from pathlib import Path

ACME, BETA = Owner(bytes([1]) * 32, "acme"), Owner(tenant="beta")


@pytest.mark.parametrize("late", ["first", "second"])
@pytest.mark.parametrize("dram", [0, MIB])
def test_what_expires_on_its_way_to_disk_is_put_anew(
    open_held: Any, key: Any, payload: Any, eventually: Any, dram: int, late: str
) -> None:
    wall = WallClock()
    store, device = open_held(dram=dram, wall=wall)
    device.hold_writes()
    first = store.put([key(1)], [payload(1)], until="disk", ttl=10)
    eventually(lambda: device.held)
    assert store.put([key(1)], [payload(1)]).result(20).status.tolist() == [KNOWN]
    wall.now += 10
    second = store.put([key(1)], [payload(2)], until="disk", ttl=100)
    eventually(lambda: len(device.held) == 2)
    early = second if late == "first" else first
    device.release_one(1 if late == "first" else 0)
    assert early.result(20).status.tolist() == [STORED]
    device.release()
    assert [put.result(20).status.tolist() for put in (first, second)] == [[STORED]] * 2
    assert store.flush().result(20).synced
    assert store.stats()["disk.chunks"] == 1
    for _ in range(2):
        result, targets = got(store, [key(1)])
        assert outcome(result) == (HIT, Reason.NONE)
        assert (targets[0] == payload(2)).all()
        store.close()
        store = kvtier.Store(store.config, wall=wall)
    store.close()


def test_nobody_joins_the_read_of_what_has_expired(open_held: Any, key: Any, payload: Any) -> None:
    wall = WallClock()
    store, device = open_held(wall=wall)
    assert store.put([key(1)], [payload(1)], until="disk", ttl=10).result(20).ok
    device.hold_reads()
    target = np.zeros(CHUNK, np.uint8)
    early = store.get([key(1)], into=[target])
    wall.now += 10
    with store.read([key(1)]).result(20) as late:
        assert outcome(late.result) == (Status.MISS, Reason.ABSENT)
    device.release()
    assert early.result(20).ok, "it was asked for in time"
    assert (target == payload(1)).all()
    assert store.match([key(1)]) == 0


def test_a_tenant_whose_quota_is_on_its_way_holds_up_nobody_else(
    open_held: Any, key: Any, payload: Any, eventually: Any
) -> None:
    store, device = open_held(quotas={"acme": CHUNK})
    device.hold_writes()
    acme = [store.put([key(i)], [payload(i)], until="disk", owner=ACME) for i in range(3)]
    eventually(lambda: device.held)
    beta = store.put([key(10)], [payload(10)], until="disk", owner=BETA)
    eventually(lambda: len(device.held) == 2)
    device.release()
    assert beta.result(20).ok
    assert [put.result(20).status.tolist() for put in acme] == [[STORED]] * 3
    assert [store.match([key(i)]) for i in (0, 1, 2, 10)] == [0, 0, 1, 1]
    assert store.stats()["tenant.acme.disk_bytes"] == CHUNK


def test_a_tenants_writes_in_the_kernel_are_deleted_too(
    open_held: Any, key: Any, payload: Any, eventually: Any
) -> None:
    store, device = open_held(dram=MIB)
    device.hold_writes()
    acme = store.put([key(1), key(2)], [payload(1), payload(2)], until="disk", owner=ACME)
    beta = store.put([key(3)], [payload(3)], until="disk", owner=BETA)
    eventually(lambda: sum(len(batch.ops) for batch in device.held) == 3)
    assert store.delete_all(namespace=ACME.namespace).result(20) == 2
    assert store.match([key(1)]) == 0
    device.release()
    assert {outcome(acme.result(20), i) for i in range(2)} == {(Status.FAILED, Reason.DELETED)}
    assert beta.result(20).ok
    assert [store.match([key(i)]) for i in (1, 2, 3)] == [0, 0, 1]
    assert store.stats()["disk.chunks"] == 1


SCRIPT = """
import os, signal, sys
import numpy as np
import kvtier
from kvtier import Owner
from small_stores import CHUNK, SMALL, numbered_key
store = kvtier.open(sys.argv[1], **SMALL, quotas={"acme": 8 * CHUNK})
owners = [Owner(bytes([1]) * 32, "acme"), Owner(tenant="beta"), Owner()]
for i in range(60):
    k = [numbered_key(3 * i + j) for j in range(3)]
    for key, owner in zip(k, owners):
        store.put([key], [np.full(CHUNK, i, np.uint8)], until="disk", owner=owner, ttl=3600).result(20)
store.delete_all(tenant="beta").result(20)
store.put([numbered_key(1000)], [np.zeros(CHUNK, np.uint8)], until="disk", owner=owners[1]).result(20)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_owners_times_and_quotas_are_there_after_a_kill(tmp_path: Path) -> None:
    """With a journal so small that it was rewritten on the way."""
    path = tmp_path / "store"
    support = os.pathsep.join([os.fspath(p) for p in sys.path if p])
    died = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path)], timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": support},
    )  # fmt: skip
    assert died.returncode == -signal.SIGKILL
    with kvtier.open(path, **SMALL, quotas={"acme": 8 * CHUNK}) as store:
        found = {(row.namespace, row.tenant): row.chunks for row in store.owners()}
        assert found == {
            (ACME.name.namespace.hex(), "acme"): 8, ("", "beta"): 1, ("", ""): found["", ""],
        }  # fmt: skip
        assert store.match([numbered_key(1000)]) == 1
        assert store.match([numbered_key(3 * 59)]) == 1
        assert store.stats()["tenant.acme.disk_bytes"] == 8 * CHUNK
        index = store._core.paths[0].tier.index
        with store._core.lock:
            acme = index.rows_of({ACME.id})
            assert all(index.expires_at[row] - index.stored_at[row] in (3600, 3601) for row in acme)
        assert store.delete_all(tenant="acme").result(20) == 8
