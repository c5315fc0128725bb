"""The store against a dict of owners, times and quotas: nobody sees, loses or keeps what he should not."""

from __future__ import annotations

import math
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import kvtier
from kvtier import Owner, Reason, Status
from kvtier.config import KIB, MIB, StoreConfig
from small_stores import WallClock

SIZE = 64 * KIB
ACME, ACME2, BETA, FREE = (
    Owner(bytes([1]) * 32, "acme"), Owner(bytes([2]) * 32, "acme"), Owner(tenant="beta"), Owner(tenant="free")
)  # fmt: skip
OWNERS = [ACME, ACME2, BETA, FREE, Owner()]
QUOTAS = {"acme": 6 * SIZE, "beta": 3 * SIZE}
KEYS = {owner: [bytes([i, j]) * 16 for j in range(10)] for i, owner in enumerate(OWNERS)}
numbers = st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True)
owners = st.sampled_from(OWNERS)
until = st.sampled_from(["dram", "disk"])


@dataclass
class Chunk:
    value: Any
    ends: float
    on_disk: bool


class Model(RuleBasedStateMachine):
    """A disk with room for all: whoever has no quota misses nothing before its time."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="kvtier-tenants-"))
        self.wall = WallClock()
        self.held: dict[bytes, Chunk] = {}
        self.seed = 0

    @initialize(dram=st.sampled_from([0, MIB]), paths=st.sampled_from([1, 2]))
    def start(self, dram: int, paths: int) -> None:
        self.config = StoreConfig(
            paths=tuple(self.home / str(i) for i in range(paths)), capacity=paths * 6 * MIB, dram=dram,
            landing=MIB, chunk_bytes=SIZE, part_bytes=64 * KIB, io_threads=2, get_timeout=20, put_timeout=20,
            quotas=QUOTAS if paths == 1 else {name: 2 * quota for name, quota in QUOTAS.items()},
        )  # fmt: skip
        self.store = kvtier.Store(self.config, wall=self.wall)

    def is_there(self, key: bytes) -> bool:
        """Whether the model holds it; it may have made room within its tenant's quota."""
        return key in self.held and self.held[key].ends > self.wall.now

    def must_be_there(self, owner: Owner, key: bytes) -> bool:
        return self.is_there(key) and owner.tenant not in QUOTAS and self.held[key].on_disk

    @rule(
        owner=owners, picks=numbers, ttl=st.sampled_from([0, 5, 20]), until=st.sampled_from(["dram", "disk"])
    )
    def put(self, owner: Owner, picks: list[int], ttl: int, until: Any) -> None:
        keys = [KEYS[owner][i] for i in picks]
        self.seed += 1
        values = [np.random.default_rng((self.seed, i)).integers(0, 256, SIZE, np.uint8) for i in picks]
        known = [self.store.match([key]) for key in keys]
        result = self.store.put(keys, values, owner=owner, ttl=ttl, until=until).result(20)
        ends = math.ceil(self.wall.now + ttl) if ttl else math.inf
        for key, value, status, reason, was in zip(
            keys, values, result.status.tolist(), result.reason.tolist(), known, strict=True
        ):
            if status == Status.KNOWN:
                assert self.is_there(key), "KNOWN, but its time is over, or it was deleted"
                self.held[key].on_disk |= until == "disk"
            elif status == Status.STORED:
                assert not was or owner.tenant in QUOTAS, "stored again"
                self.held[key] = Chunk(value, ends, until == "disk")
            else:
                assert (status, reason) == (Status.REFUSED, Reason.QUOTA)
                assert owner.tenant in QUOTAS
        if until == "disk" and len(picks) <= 3:
            assert result.ok, "there is room in the quota, and nothing of it is in use"
            assert self.store.match(keys) == len(keys)

    @rule(owner=owners, picks=numbers)
    def get(self, owner: Owner, picks: list[int]) -> None:
        keys = [KEYS[owner][i] for i in picks]
        targets = np.zeros((len(keys), SIZE), np.uint8)
        result = self.store.get(keys, into=targets).result(20)
        for key, target, status, reason in zip(
            keys, targets, result.status.tolist(), result.reason.tolist(), strict=True
        ):
            if status == Status.HIT:
                assert self.is_there(key), "its time is over, or it was deleted"
                assert (target == self.held[key].value).all()
            else:
                assert (status, reason) == (Status.MISS, Reason.ABSENT)
                assert not self.must_be_there(owner, key)

    @rule(owner=owners, picks=numbers)
    def look(self, owner: Owner, picks: list[int]) -> None:
        """match, pin, read, prefetch and reserve agree with the model, and with each other."""
        keys = [KEYS[owner][i] for i in picks]
        with self.store.pin(keys) as count:
            assert self.store.match(keys) == count
            assert all(self.is_there(key) for key in keys[:count])
            assert count == len(keys) or not self.must_be_there(owner, keys[count])
            with self.store.read(keys[:1]).result(20) as lease:
                assert (lease.views[0] is not None) == (count > 0)
                assert count == 0 or (lease.views[0] == self.held[keys[0]].value).all()
        with self.store.reserve(keys, SIZE, owner=owner) as reservation:
            for key, status in zip(keys, reservation.result.status.tolist(), strict=True):
                assert status != Status.KNOWN or self.is_there(key)
                assert status != Status.STORED or not self.must_be_there(owner, key)

    @rule(seconds=st.sampled_from([0.5, 1, 3, 5, 30, -2, -40]))
    def wait(self, seconds: float) -> None:
        """A clock that is set back brings nothing back that was found to be over."""
        if seconds < 0:
            for key in [key for key in self.held if not self.is_there(key)]:
                self.store.delete([key]).result(20)
                del self.held[key]
        self.wall.now += seconds
        self.store._core.sweeper.step()

    @rule(which=st.sampled_from([
        {"tenant": "acme"}, {"tenant": "beta"}, {"tenant": "free"}, {"namespace": ACME.namespace},
        {"namespace": ACME2.name.namespace.hex(), "tenant": "acme"}, {"tenant": "beta", "namespace": b""},
    ]))  # fmt: skip
    def delete_all(self, which: dict[str, Any]) -> None:
        gone = [
            owner for owner in OWNERS
            if which.get("tenant", owner.tenant) == owner.tenant
            and which.get("namespace", owner.namespace) in (owner.namespace, owner.name.namespace.hex())
        ]  # fmt: skip
        there = sum(self.store.match([key]) for owner in gone for key in KEYS[owner])
        assert self.store.delete_all(**which).result(20) == there
        for owner in gone:
            for key in KEYS[owner]:
                assert self.store.match([key]) == 0
                self.held.pop(key, None)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        for chunk in self.held.values():
            chunk.on_disk = True  # close finishes what was accepted
        self.store = kvtier.Store(self.config, wall=self.wall)

    @invariant()
    def counts_are_exact_and_quotas_hold(self) -> None:
        if not hasattr(self, "store"):
            return
        core = self.store._core
        assert self.store.flush().result(20).synced
        with core.lock:
            for tier in core.tiers:
                index = tier.index
                held: dict[int, int] = {}
                for row in index.table.rows().tolist():
                    size = index.slots.size_at(index.offset[row])
                    held[index.owner[row]] = held.get(index.owner[row], 0) + size
                held.pop(0, None)
                assert index.holdings.by_owner == held
                for tenant, nbytes in index.holdings.by_tenant.items():
                    own = [owner.id for owner in OWNERS if owner.tenant == tenant]
                    assert nbytes == sum(held.get(owner, 0) for owner in own)
                    assert nbytes <= index.holdings.limits[tenant]
        stats = self.store.stats()
        for tenant, quota in self.config.quotas.items():
            assert stats[f"tenant.{tenant}.disk_bytes"] <= quota
        shown = {row.id: row.chunks for row in self.store.owners() if row.tier == "disk"}
        assert sum(shown.values()) == stats["disk.chunks"]

    @invariant()
    def whoever_has_no_quota_loses_nothing(self) -> None:
        if hasattr(self, "store"):
            for owner in OWNERS:
                for key in KEYS[owner]:
                    there = self.store.match([key])
                    assert not there or self.is_there(key)
                    assert there or not self.must_be_there(owner, key)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.flush().result(20)
            stats = self.store.stats()
            self.store.close()
            assert [stats[f"{tier}.pinned_slots"] for tier in ("dram", "disk", "landing")] == [0] * 3
        shutil.rmtree(self.home)


TestTenants = Model.TestCase
TestTenants.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
