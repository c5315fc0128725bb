"""The store against a dict: whatever is done to it, a HIT is what was put, and nothing is forgotten."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any, get_args

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvtier
from kvtier import Reason, Status, TierName
from kvtier.config import PolicyName
from small_stores import bytes_on_disk

KIB, MIB = 1 << 10, 1 << 20
SIZES = [1, 4096, 5000, 20 * KIB, 64 * KIB - 1, 64 * KIB, 128 * KIB + 1, 200 * KIB]
KEYS = [bytes([i]) * 32 for i in range(24)]
numbers = st.integers(0, len(KEYS) - 1)
batches = st.lists(numbers, max_size=8)
sizes = st.sampled_from(SIZES)
until = st.sampled_from(["dram", "disk"])


codecs = st.sampled_from(["raw", "lz4", "lz4-16bit"])


def payload(seed: int, nbytes: int) -> Any:
    """Bytes of which every other seed's can be made smaller."""
    return np.random.default_rng((seed, nbytes)).integers(0, 256 if seed % 2 else 3, nbytes, np.uint8)


class Model(RuleBasedStateMachine):
    """Tiers so small that chunks are evicted all the time: what is there must be right."""

    kind = "slab"
    capacity = 3 * MIB
    evicts = True

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="kvtier-model-"))
        self.held: dict[bytes, Any] = {}  # what a HIT of the key must be
        self.safe: set[bytes] = set()  # reported on disk
        self.leases: list[tuple[kvtier.Lease, list[tuple[Any, Any]]]] = []
        self.seed = 0

    @initialize(
        dram=st.sampled_from([0, MIB, 2 * MIB]), paths=st.sampled_from([1, 3]),
        policies=st.tuples(*2 * [st.sampled_from(get_args(PolicyName))]),
    )  # fmt: skip
    def start(self, dram: int, paths: int, policies: tuple[str, str]) -> None:
        self.dram, self.policies = dram, policies
        self.paths = [self.home / f"store{i}" for i in range(paths)]
        self.open()

    def open(self) -> None:
        self.store = kvtier.open(
            self.paths, kind=self.kind, capacity=self.capacity, dram=self.dram, landing=2 * MIB,
            chunk_bytes=224 * KIB, part_bytes=64 * KIB, io_threads=2, get_timeout=20, put_timeout=20,
            policy=self.policies[0], dram_policy=self.policies[1],
        )  # fmt: skip
        self.requested = {"get": 0, "put": 0}
        self.hits = np.zeros(len(TierName), np.int64)

    def count_hits(self, result: kvtier.BatchResult) -> None:
        assert ((result.tier == TierName.NONE) == (result.status != Status.HIT)).all()
        self.hits += np.bincount(result.tier, minlength=len(TierName))

    def settle_put(
        self, keys: list[bytes], values: list[Any], result: Any, known: set[bytes], on_disk: bool,
        refusable: bool = False,
    ) -> None:  # fmt: skip
        """Learn from the outcome of a put; `known` are the keys that were there before."""
        self.requested["put"] += len(keys)
        assert not result.tier.any()
        stored: dict[bytes, list[Any]] = {}
        for key, value, status in zip(keys, values, result.status.tolist(), strict=True):
            if status == Status.STORED:
                assert key not in known or self.evicts, "a chunk that was there was stored again"
                stored.setdefault(key, []).append(value)
            elif status == Status.KNOWN:
                assert key in self.held or key in stored, "KNOWN, but nobody put it"
            else:
                assert status == Status.REFUSED
                assert refusable or self.evicts or self.leases
            if on_disk and status <= Status.KNOWN:
                self.safe.add(key)
        for key, choice in stored.items():
            # One that was only in DRAM is written to disk again as it is, unless it was evicted first.
            choice += [self.held[key]] if key in known else []
            self.held[key] = choice[0] if len(choice) == 1 else self.chosen(key, choice)
            if self.held[key] is None:
                self.forget(key)

    def chosen(self, key: bytes, choice: list[Any]) -> Any:
        """Which of these payloads the store took; None if it has evicted the chunk already."""
        self.requested["get"] += 1
        with self.store.read([key]).result(30) as lease:
            self.count_hits(lease.result)
            if lease.views[0] is None:
                return None
            taken = [value for value in choice if np.array_equal(value, lease.views[0])]
            assert taken, "neither the first payload nor the second"
            return taken[0]

    def known(self, keys: list[bytes]) -> set[bytes]:
        return {key for key in keys if self.store.match([key])}

    def values(self, keys: list[bytes], nbytes: int) -> list[Any]:
        """A payload per key, that no other put had."""
        self.seed += 1
        return [payload(self.seed * 100 + i, nbytes) for i in range(len(keys))]

    @rule(picks=batches, nbytes=sizes, until=until, codec=codecs)
    def put(self, picks: list[int], nbytes: int, until: Any, codec: str) -> None:
        keys = [KEYS[i] for i in picks]
        values = self.values(keys, nbytes)
        known = self.known(keys)
        result = self.store.put(keys, values, until=until, codec=codec).result(30)
        self.settle_put(keys, values, result, known, until == "disk")

    @rule(picks=st.lists(numbers, max_size=6, unique=True), nbytes=sizes, until=until, commit=st.booleans())
    def reserve(self, picks: list[int], nbytes: int, until: Any, commit: bool) -> None:
        keys = [KEYS[i] for i in picks]
        values = self.values(keys, nbytes)
        known = self.known(keys)
        with self.store.reserve(keys, nbytes) as reservation:
            for view, value in zip(reservation.views, values, strict=True):
                if view is not None:
                    view[:] = value
            if commit:
                result = reservation.commit(until=until).result(30)
                # A reservation takes what memory there is now, the rest is refused.
                self.settle_put(keys, values, result, known, until == "disk", refusable=True)

    @rule(picks=batches)
    def get(self, picks: list[int]) -> None:
        keys = [KEYS[i] for i in picks]
        targets = [np.empty(len(self.held[k]) if k in self.held else 10, np.uint8) for k in keys]
        result = self.store.get(keys, into=targets).result(30)
        self.requested["get"] += len(keys)
        self.count_hits(result)
        for key, target, status, reason in zip(
            keys, targets, result.status.tolist(), result.reason.tolist(), strict=True
        ):
            if status == Status.HIT:
                assert (target == self.held[key]).all()
            elif reason == Reason.NO_SPACE:
                assert self.leases
            else:
                assert (status, reason) == (Status.MISS, Reason.ABSENT)
                assert key not in self.held or self.evicts
                self.forget(key)

    @rule(picks=batches)
    def lease(self, picks: list[int]) -> None:
        keys = [KEYS[i] for i in picks]
        lease = self.store.read(keys).result(30)
        self.requested["get"] += len(keys)
        self.count_hits(lease.result)
        for key, view, status, reason in zip(
            keys, lease.views, lease.result.status.tolist(), lease.result.reason.tolist(), strict=True
        ):
            assert (view is not None) == (status == Status.HIT)
            if view is not None:
                assert (view == self.held[key]).all()
            elif reason == Reason.ABSENT:
                assert key not in self.held or self.evicts
                self.forget(key)
            else:
                assert (status, reason) == (Status.REFUSED, Reason.NO_SPACE)
        self.leases.append(
            (lease, [(v, self.held[k]) for k, v in zip(keys, lease.views, strict=True) if v is not None])
        )

    @precondition(lambda self: self.leases)
    @rule()
    def release(self) -> None:
        lease, views = self.leases.pop(0)
        for view, value in views:
            assert (view == value).all(), "a leased view changed"
        lease.release()

    @rule(picks=batches)
    def delete(self, picks: list[int]) -> None:
        keys = [KEYS[i] for i in picks]
        there = len({key for key in keys if self.store.match([key])})
        assert self.store.delete(keys).result(30) == there
        for key in keys:
            assert self.store.match([key]) == 0
            self.forget(key)

    @rule(picks=batches)
    def match(self, picks: list[int]) -> None:
        keys = [KEYS[i] for i in picks]
        count = self.store.match(keys)
        assert all(key in self.held for key in keys[:count])
        if not self.evicts and count < len(keys):
            assert keys[count] not in self.held

    @rule(pinned=batches, picks=batches, nbytes=sizes)
    def pin(self, pinned: list[int], picks: list[int], nbytes: int) -> None:
        keys = [KEYS[i] for i in pinned]
        with self.store.pin(keys) as count:
            self.put(picks, nbytes, "disk", "raw")
            assert self.store.match(keys) >= count

    @rule()
    def flush(self) -> None:
        flushed = self.store.flush().result(30)
        assert flushed.synced
        if not self.evicts:
            assert flushed.failed == 0
            self.safe |= self.held.keys()

    @rule()
    def reopen(self) -> None:
        while self.leases:
            self.release()
        self.check_idle()
        self.store.close()
        if not self.evicts:
            self.safe |= self.held.keys()  # close finishes what was accepted
        self.open()
        for key in list(self.held):
            if self.store.match([key]) == 0:
                assert self.evicts or key not in self.safe, "reported on disk, and gone"
                self.forget(key)
        if self.held:
            self.get([i for i, key in enumerate(KEYS) if key in self.held])

    def forget(self, key: bytes) -> None:
        self.held.pop(key, None)
        self.safe.discard(key)

    @invariant()
    def counters_add_up(self) -> None:
        """Invariant 10."""
        if not hasattr(self, "store"):
            return
        stats = self.store.stats()
        for call, good in (("get", ("dram.hits", "disk.hits")), ("put", ("put.stored", "put.known"))):
            reasons = sum(stats[f"{call}.{reason.name.lower()}"] for reason in Reason if reason)
            assert stats[f"{call}.requested"] == self.requested[call]
            assert self.requested[call] == sum(stats[name] for name in good) + reasons
        assert [stats["dram.hits"], stats["disk.hits"]] == self.hits[1:].tolist()
        assert stats["get.checksum"] == stats["get.io_error"] == stats["get.short_read"] == 0
        assert stats["disk.write_failures"] == stats["disk.journal_failures"] == 0
        assert sum(map(bytes_on_disk, self.paths)) <= self.capacity  # invariant 5

    def check_idle(self) -> None:
        """Invariant 8."""
        self.store.flush().result(30)
        stats = self.store.stats()
        assert [stats[f"{tier}.pinned_slots"] for tier in ("dram", "disk", "landing", "codec")] == [0] * 4

    def teardown(self) -> None:
        try:
            if hasattr(self, "store"):
                while self.leases:
                    self.release()
                self.check_idle()
        finally:
            if hasattr(self, "store"):
                self.store.close()
            shutil.rmtree(self.home)


class Roomy(Model):
    """A disk that holds everything there is to put: nothing may ever be missing."""

    capacity = 24 * MIB
    evicts = False


class Files(Model):
    """The same of a file per chunk."""

    kind = "files"


class RoomyFiles(Roomy):
    kind = "files"


few = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestEvictingStore = Model.TestCase
TestEvictingStore.settings = few
TestRoomyStore = Roomy.TestCase
TestRoomyStore.settings = few
TestEvictingFiles = Files.TestCase
TestEvictingFiles.settings = few
TestRoomyFiles = RoomyFiles.TestCase
TestRoomyFiles.settings = few
