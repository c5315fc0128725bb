"""One store per process, forked children, dropped connectors, and an import that costs nothing."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

import kvtier
from engine_sim import blocks, compute, connector_of, engine_tensors, prompt
from kvtier.connector import shared_store
from kvtier.errors import InvalidRequest, StoreClosed
from small_stores import SMALL

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = prompt(300)


def connector_threads() -> int:
    return sum(thread.name == "kvtier-connector" for thread in threading.enumerate())


def test_importing_the_connector_does_not_import_torch() -> None:
    code = "import sys, kvtier.connector; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_one_store_serves_all_who_ask_for_the_same(tmp_path: Path) -> None:
    settings = {**SMALL, "quotas": {"acme": "1MiB"}}
    first = shared_store(tmp_path, **settings)
    with shared_store(str(tmp_path), **settings) as store:
        assert store is first.store
        with connector_of(store, engine_tensors()) as one, connector_of(store, engine_tensors()) as two:
            table = blocks(19)
            compute(engine_tensors(), TOKENS, table)
            with one.request(TOKENS) as saved, two.request(TOKENS) as found:
                assert one.save(saved, table).result(20).ok
                assert two.match(found) == 256
    first.store.match([])
    first.close()
    first.close()
    with pytest.raises(StoreClosed):
        first.store.match([])
    with shared_store(tmp_path, **SMALL) as store, kvtier.open(None, dram="1MiB", chunk_bytes=65536):
        assert store is not first.store


def test_other_settings_for_a_directory_that_is_open_are_refused(tmp_path: Path) -> None:
    with shared_store(tmp_path / "a", **SMALL):
        with pytest.raises(InvalidRequest, match=r"open in this process with other settings \(dram\)"):
            shared_store(tmp_path / "b" / ".." / "a", **{**SMALL, "dram": 1 << 20})
        with shared_store(tmp_path / "b", **{**SMALL, "dram": 1 << 20}):
            pass
    with shared_store(tmp_path / "a", **{**SMALL, "dram": 1 << 20}):
        pass


def test_a_store_that_somebody_closed_is_opened_again(tmp_path: Path) -> None:
    first = shared_store(tmp_path, **SMALL)
    first.store.close()
    with shared_store(tmp_path, **SMALL) as store:
        store.match([])
        first.close()
        store.match([])


def test_a_forked_child_has_no_connector_and_no_shared_store(tmp_path: Path) -> None:
    with shared_store(tmp_path, **SMALL) as store, connector_of(store, engine_tensors()) as connector:
        table = blocks(19)
        with connector.request(TOKENS) as request:
            connector.match(request)
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    for call in (lambda: connector.match(request), lambda: connector.save(request, table)):
                        with pytest.raises(StoreClosed):
                            call()
                    connector.close()
                    request.close()
                    with shared_store(tmp_path / "child", **SMALL) as own:
                        own.match([])
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert connector.save(request, table).result(20).ok


def test_a_dropped_connector_ends_its_thread(open_store: Any, eventually: Any) -> None:
    store = open_store()
    before = connector_threads()
    connector = connector_of(store, engine_tensors())
    with connector.request(TOKENS) as request:
        connector.match(request)
        assert connector.save(request, blocks(19)).result(20).ok
    assert connector_threads() == before + 1
    del connector, request
    gc.collect()
    eventually(lambda: connector_threads() == before)


def test_a_close_lets_saves_be_copied(open_store: Any) -> None:
    store = open_store()
    tensors = engine_tensors()
    connector = connector_of(store, tensors)
    saves = []
    for seed in range(4):
        tokens = prompt(300, seed)
        table = blocks(64)[seed * 16 : seed * 16 + 16]
        compute(tensors, tokens[:256], table)
        saves.append(connector.save(connector.request(tokens), table))
    connector.close()
    assert all(save.copied for save in saves)
    assert all(save.result(20).ok for save in saves)
