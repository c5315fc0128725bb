"""Processes: one store to a directory, forks, and what the end of a process finishes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtier
from small_stores import CHUNK
from store_calls import put_and_get
from store_scripts import run, script

if TYPE_CHECKING:
    from pathlib import Path


# One directory, one store.


def test_invariant_11_a_second_store_in_this_process(open_store: Any, key: Any, payload: Any) -> None:
    store = open_store()
    with pytest.raises(kvtier.StoreInUse, match=rf"process {os.getpid()}\b"):
        open_store()
    put_and_get(store, key(1), payload(1))
    store.close()
    open_store()


def test_invariant_11_a_second_process_is_told_the_first_ones_pid(
    open_store: Any, tmp_path: Path, key: Any, payload: Any
) -> None:
    path = tmp_path / "store"
    with script("store = open(); print('open', flush=True); sys.stdin.read(); store.close()", path) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "open\n"
            with pytest.raises(kvtier.StoreInUse, match=rf"process {owner.pid}\b.*directory of its own"):
                open_store(path)
            owner.communicate("", timeout=20)
        finally:
            owner.kill()
    put_and_get(open_store(path), key(1), payload(1))


def test_a_killed_owner_leaves_no_lock(open_store: Any, tmp_path: Path, key: Any) -> None:
    path = tmp_path / "store"
    body = """
    store = open()
    store.put([key(1)], [payload(1)], until="disk").result()
    print("open", flush=True)
    sys.stdin.read()
    """
    with script(body, path) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "open\n"
        owner.kill()
        owner.wait(10)
    assert open_store(path).match([key(1)]) == 1


# Fork.


def test_invariant_9_a_forked_child_is_closed_and_the_parent_untouched(tmp_path: Path) -> None:
    out = run(
        """
        store = open()
        store.put([key(1)], [payload(1)], until="disk").result()
        lease = store.read([key(1)]).result()
        for how in ("_exit", "exit"):
            pid = os.fork()
            if pid == 0:
                wrong = []
                calls = dict(
                    match=lambda: store.match([key(1)]), put=lambda: store.put([key(2)], [payload(2)]),
                    get=lambda: store.get([key(1)], into=[payload(0)]), read=lambda: store.read([key(1)]),
                    flush=lambda: store.flush(), delete=lambda: store.delete([key(1)]),
                    reserve=lambda: store.reserve([key(3)], 100), owners=lambda: store.owners(),
                    delete_all=lambda: store.delete_all(tenant="a"),
                    pin=lambda: store.pin([key(1)]).__enter__())
                for name, call in calls.items():
                    try:
                        call()
                        wrong.append(name)
                    except kvtier.StoreClosed:
                        pass
                store.close()
                lease.release()
                fds = [os.readlink(f"/proc/self/fd/{f}") for f in os.listdir("/proc/self/fd")
                       if os.path.exists(f"/proc/self/fd/{f}")]
                wrong += [fd for fd in fds if fd.startswith(path)]
                if wrong:
                    print("child:", wrong, flush=True)
                if how == "_exit":
                    os._exit(0)
                sys.exit(0)
            deadline = time.monotonic() + 20
            while (done := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
                time.sleep(0.01)
            print(how, os.waitstatus_to_exitcode(done[1]) if done[0] else "the child hangs", flush=True)
            assert done[0]
            assert (lease.views[0] == 1).all()
            value = payload(7)
            assert store.put([key(10 + len(how))], [value], until="disk").result(10).ok
            target = np.empty_like(value)
            assert store.get([key(10 + len(how))], into=[target]).result(10).ok
            assert (target == value).all()
        lease.release()
        try:
            open()
        except kvtier.StoreInUse:
            print("still mine")
        store.close()
        open().close()
        """,
        tmp_path / "store",
    )
    assert out == "_exit 0\nexit 0\nstill mine\n"


def test_a_fork_under_load(tmp_path: Path) -> None:
    """Whatever the threads are doing at the fork, the child gets StoreClosed and ends, the parent goes on."""
    out = run(
        """
        store = open(dram=0)
        stop = threading.Event()
        def work(n):
            i = 0
            while not stop.is_set():
                i += 1
                k = key(n * 1000 + i % 50)
                store.put([k], [payload(n)], until="disk").result(20)
                store.get([k], into=[payload(0)]).result(20)
        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads: thread.start()
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                try:
                    store.match([key(1)])
                except kvtier.StoreClosed:
                    os._exit(0)
                os._exit(1)
            deadline = time.monotonic() + 20
            while (done := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
                time.sleep(0.001)
            assert done == (pid, 0), done
        stop.set()
        for thread in threads: thread.join()
        assert store.flush().result(20).synced
        store.close()
        print("done")
        """,
        tmp_path / "store",
    )
    assert out == "done\n"


# The end of the process.


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_the_end_of_the_interpreter_finishes_what_was_accepted(
    open_store: Any, tmp_path: Path, key: Any, engine: str
) -> None:
    run(
        f"""
        store = open(engine={engine!r})
        payloads = [payload(i) for i in range(20)]
        store.put([key(i) for i in range(20)], payloads, until="disk")
        """,
        tmp_path / "store",
    )
    store = open_store(tmp_path / "store", engine=engine)
    assert store.match([key(i) for i in range(20)]) == 20
    target = np.empty((20, CHUNK), np.uint8)
    assert store.get([key(i) for i in range(20)], into=target).result(10).ok
    assert (target == np.arange(20)[:, None]).all()


def test_a_store_that_was_dropped_finishes_what_it_accepted(
    open_store: Any, tmp_path: Path, key: Any
) -> None:
    run(
        """
        def work():
            store = open()
            store.put([key(i) for i in range(20)], [payload(i) for i in range(20)], until="disk")
        work()
        """,
        tmp_path / "store",
    )
    assert open_store(tmp_path / "store").match([key(i) for i in range(20)]) == 20
