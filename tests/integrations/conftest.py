"""What the integrations' tests share: one tiny model, and a store in DRAM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import kvtier

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Models this small only lose by sharing work between threads."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def llama() -> Any:
    from hf_models import tiny  # skips where there is no transformers

    return tiny()


@pytest.fixture
def store() -> Iterator[Any]:
    with kvtier.open(dram="64MiB", chunk_bytes="1MiB") as store:
        yield store
