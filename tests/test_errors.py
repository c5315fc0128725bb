"""The errors: what they are, and that they travel between processes."""

from __future__ import annotations

import copy
import pickle

import pytest

import kvtier
from kvtier import errors
from kvtier.format import DamagedHeader

ALL = [
    value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)
] + [DamagedHeader]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_is_one_of_ours_and_pickles(kind: type[Exception]) -> None:
    error = kind("what was wrong: what to do")
    assert isinstance(error, kvtier.KVTierError)
    for back in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(back) is kind
        assert str(back) == "what was wrong: what to do"
        assert back.args == error.args


def test_every_error_can_be_imported_from_the_package() -> None:
    for kind in ALL:
        if kind is not DamagedHeader:
            assert getattr(kvtier, kind.__name__) is kind
            assert kind.__name__ in kvtier.__all__


def test_a_wrong_call_is_a_value_error() -> None:
    assert issubclass(kvtier.InvalidRequest, ValueError)
    others = {kind for kind in ALL if issubclass(kind, ValueError | OSError)}
    assert others == {kvtier.InvalidRequest}


def test_a_damaged_header_counts_as_incompatible() -> None:
    assert issubclass(DamagedHeader, kvtier.IncompatibleStore)
