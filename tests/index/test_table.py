"""KeyTable against a dict."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier._native import core, why_not
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


@pytest.fixture(params=["native", "python"])
def lookups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr("kvtier.index.table.core", None)
    elif core is None:
        pytest.skip(why_not)


@pytest.mark.usefixtures("lookups")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds=st.lists(st.lists(st.integers(0, 59), unique=True, max_size=40), max_size=12))
def test_many_at_a_time_are_as_many_one_by_one(rounds: list[list[int]]) -> None:
    """All keys collide often in a table of 64 places that is filled to two thirds."""
    table, model = KeyTable(), {}
    for row, key in enumerate(KEYS[100:142]):
        table.insert(key, row)
        model[key] = row
    for numbers in rounds:
        new = [key for key in (KEYS[number] for number in numbers) if key not in model][:20]
        old = list(model)[: len(new)]
        bound = [model.pop(key) for key in old]
        table.replace_all(bound, new)
        model.update(zip(new, bound, strict=True))
        assert table.find_all([*model, *old]) == [*model.values(), *[EMPTY] * len(old)]
        assert [table.find(key) for key in model] == list(model.values())
        assert [table.key(row) for row in model.values()] == list(model)


@pytest.mark.skipif(core is None, reason=why_not)
def test_wrong_calls_of_the_native_lookups_raise() -> None:
    table = KeyTable()
    table.insert(KEYS[0], 0)
    for keys in ([b"short"], ["x" * 32], [None]):
        with pytest.raises(ValueError, match="32 bytes"):
            table.find_all(keys)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="32 bytes"):
            table.replace_all([0], keys)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one length"):
        table.replace_all([0, 1], [KEYS[1]])
    for row in (1, -5):
        with pytest.raises(IndexError, match="beyond"):
            table.replace_all([row], [KEYS[1]])
    assert table.find_all([KEYS[0], KEYS[1]]) == [0, EMPTY]
