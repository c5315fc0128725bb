"""KeyTable against a dict."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.index.table import EMPTY, KeyTable

if TYPE_CHECKING:
    from collections.abc import Callable

KEYS = [hashlib.sha256(b"%d" % i).digest() for i in range(400)]


class TableMachine(RuleBasedStateMachine):
    """Rows are dealt out as a cache does: spare ones first, else the next."""

    def __init__(self) -> None:
        super().__init__()
        self.table = KeyTable()
        self.model: dict[bytes, int] = {}
        self.spare: list[int] = []
        self.next = 0

    @rule(count=st.integers(1, 150))
    def insert(self, count: int) -> None:
        for key in [key for key in KEYS if key not in self.model][:count]:
            if self.spare:
                row = self.spare.pop()
            else:
                row, self.next = self.next, self.next + 1
            self.table.insert(key, row)
            self.model[key] = row

    @precondition(lambda self: self.model)
    @rule(data=st.data(), count=st.integers(1, 100))
    def remove(self, data: Any, count: int) -> None:
        for _ in range(min(count, len(self.model))):
            names = sorted(self.model)
            key = names[data.draw(st.integers(0, len(names) - 1))] if count < 4 else names[count % len(names)]
            self.table.remove(key)
            self.spare.append(self.model.pop(key))

    @precondition(lambda self: not self.next)
    @rule(count=st.integers(0, 200), expected=st.integers(0, 300))
    def load(self, count: int, expected: int) -> None:
        self.table = KeyTable(expected)
        self.table.load(b"".join(KEYS[:count]))
        self.model = dict(zip(KEYS, range(count), strict=False))
        self.next = count

    @invariant()
    def agrees(self) -> None:
        assert len(self.table) == len(self.model)
        for key in KEYS:
            assert self.table.find(key) == self.model.get(key, EMPTY)
        assert sorted(self.table.rows().tolist()) == sorted(self.model.values())
        for key, row in self.model.items():
            assert self.table.key(row) == key


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=30, stateful_step_count=20)


@pytest.mark.parametrize("expected", [0, 1, 100, 5000])
def test_it_grows_as_needed(keys: Callable[..., list[bytes]], expected: int) -> None:
    table = KeyTable(expected)
    many = keys(5000)
    for row, key in enumerate(many):
        table.insert(key, row)
    assert [table.find(key) for key in many] == list(range(5000))
    for key in many[::2]:
        table.remove(key)
    assert [table.find(key) for key in many[::2]] == [EMPTY] * 2500
    assert [table.find(key) for key in many[1::2]] == list(range(1, 5000, 2))


def test_keys_that_collide_are_told_apart(keys: Callable[..., list[bytes]]) -> None:
    alike = sorted(keys(3000), key=lambda key: hash(key) & 63)[:40]
    table = KeyTable()
    for row, key in enumerate(alike):
        table.insert(key, row)
    for key in alike[:20]:
        table.remove(key)
    assert [table.find(key) for key in alike] == [EMPTY] * 20 + list(range(20, 40))


def test_an_empty_table_finds_nothing() -> None:
    table = KeyTable()
    table.load(b"")
    assert len(table) == 0
    assert table.find(bytes(32)) == EMPTY
    assert table.rows().size == 0
