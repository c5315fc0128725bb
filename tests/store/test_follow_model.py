"""Followers against `Store.match`: at quiet moments the picture of what is stored is what a match finds."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import kvtier
from kvtier import Owner
from kvtier.settings import load
from small_stores import CHUNK, SMALL, WallClock, numbered_key, random_payload

KEYS = [numbered_key(i) for i in range(40)]
numbers = st.lists(st.integers(0, len(KEYS) - 1), max_size=8, unique=True)
tenants = st.sampled_from(["", "acme", "beta"])


class Model(RuleBasedStateMachine):
    """Tiers that hold fewer chunks than there are, followed by two who take at different times."""

    kind = "slab"

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="kvtier-follow-"))
        self.wall = WallClock()

    @initialize(dram=st.sampled_from([0, 4, 16]), paths=st.integers(0, 2), quota=st.booleans())
    def start(self, dram: int, paths: int, quota: bool) -> None:
        changes: dict[str, Any] = {"kind": self.kind, "dram": dram * CHUNK, "capacity": 24 * CHUNK}
        if paths:
            source = [self.home / str(i) for i in range(paths)]
        else:
            source = None
            changes["dram"] = 16 * CHUNK
        config = {**SMALL, **changes}
        if not paths:
            del config["capacity"]
        elif quota:
            config["quotas"] = {"acme": 6 * CHUNK}
        self.config = load(source, config)
        self.open()

    def open(self) -> None:
        self.store = kvtier.Store(self.config, wall=self.wall)
        self.followers = [self.store.follow(), self.store.follow()]
        self.pictures: list[set[bytes]] = [set(), set()]

    @rule(
        picks=numbers,
        tenant=tenants,
        ttl=st.sampled_from([0, 0, 5, 20]),
        until=st.sampled_from(["dram", "disk"]),
    )
    def put(self, picks: list[int], tenant: str, ttl: int, until: Any) -> None:
        self.store.put(
            [KEYS[i] for i in picks], [random_payload(i) for i in picks], owner=Owner(tenant=tenant), ttl=ttl,
            until=until if self.config.paths else "dram",
        ).result(20)  # fmt: skip

    @rule(picks=numbers)
    def get(self, picks: list[int]) -> None:
        self.store.prefetch([KEYS[i] for i in picks]).result(20)

    @rule(picks=numbers)
    def delete(self, picks: list[int]) -> None:
        self.store.delete([KEYS[i] for i in picks]).result(20)

    @rule(tenant=st.sampled_from(["acme", "beta"]))
    def delete_all(self, tenant: str) -> None:
        self.store.delete_all(tenant=tenant).result(20)

    @rule(seconds=st.sampled_from([1, 5, 30]))
    def wait(self, seconds: int) -> None:
        self.wall.now += seconds

    @rule(who=st.integers(0, 1))
    def look(self, who: int) -> None:
        self.store.flush().result(20)
        changes, picture = self.followers[who].take(), self.pictures[who]
        added, removed = set(changes.added), set(changes.removed)
        assert removed <= picture
        assert not added & picture
        assert len(changes.added) == len(added)
        picture -= removed
        picture |= added
        assert picture == {key for key in KEYS if self.store.match([key])}

    @rule(who=st.integers(0, 1))
    def follow_anew(self, who: int) -> None:
        self.followers[who].close()
        self.followers[who] = self.store.follow()
        self.pictures[who] = set()

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.look(0)
            self.look(1)
            self.store.close()
        shutil.rmtree(self.home)


class FilesModel(Model):
    kind = "files"


TestSlab = Model.TestCase
TestSlab.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestFiles = FilesModel.TestCase
TestFiles.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
