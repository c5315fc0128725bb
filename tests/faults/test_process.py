"""Processes, file systems and devices that fail: clear errors at open, outcomes with reasons after it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtier
from kvtier import Reason, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

KIB, MIB = 1 << 10, 1 << 20
CHUNK = 64 * KIB
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system takes root")

PROLOGUE = """
import os, sys, threading, time
import numpy as np, kvtier
path = sys.argv[1]
def key(i): return i.to_bytes(32, "little")
def payload(i): return np.full(65536, i, np.uint8)
def open(**more):
    settings = dict(capacity="8MiB", dram="1MiB", landing="1MiB", chunk_bytes="64KiB", io_threads=2)
    return kvtier.open(path, **{**settings, **more})
"""


def script(body: str, *args: object, wrapper: tuple[str, ...] = (), **kwargs: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*wrapper, sys.executable, "-c", PROLOGUE + textwrap.dedent(body), *map(str, args)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs,
    )  # fmt: skip


def run(body: str, *args: object, **kwargs: Any) -> str:
    """What a script prints; it must end well, in time, and without a word on stderr."""
    with script(body, *args, **kwargs) as process:
        try:
            out, err = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert (process.returncode, err) == (0, ""), out + err
    return out


def outcome(result: kvtier.BatchResult, i: int = 0) -> tuple[Status, Reason]:
    return Status(result.status[i]), Reason(result.reason[i])


def put_and_get(store: kvtier.Store, key: kvtier.ChunkKey, value: Any) -> None:
    assert store.put([key], [value], until="disk").result(10).ok
    target = np.empty_like(value)
    assert store.get([key], into=[target]).result(10).ok
    assert (target == value).all()


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
                    reserve=lambda: store.reserve([key(3)], 100),
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


# File systems.


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """`mount(*arguments, **kw)`: what mount(8) makes of them, in a new directory; skips where it cannot."""
    points: list[Path] = []

    def make(*arguments: str) -> Path:
        point = tmp_path / f"mnt{len(points)}"
        point.mkdir()
        done = subprocess.run(["mount", *arguments, str(point)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount here: {done.stderr.strip()}")
        points.append(point)
        return point

    yield make
    for point in points:
        subprocess.run(["umount", str(point)], check=True)


@pytest.fixture
def small_fs(mount: Callable[..., Path], tmp_path: Path) -> Callable[[str, int], Path]:
    """`small_fs(kind, nbytes)`: a small tmpfs, or an ext2 or ext4 in a file."""

    def make(kind: str, nbytes: int) -> Path:
        if kind == "tmpfs":
            return mount("-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs")
        if shutil.which(f"mkfs.{kind}") is None:
            pytest.skip(f"no mkfs.{kind}")
        image = tmp_path / "image"
        image.write_bytes(b"")
        os.truncate(image, nbytes)
        subprocess.run([f"mkfs.{kind}", "-q", "-F", "-m0", str(image)], check=True, capture_output=True)
        return mount("-o", "loop", str(image))

    return make


def test_a_capacity_above_the_free_space_says_so(open_store: Any, tmp_path: Path) -> None:
    with pytest.raises(kvtier.TierUnavailable, match=r"capacity is \d+ bytes.*left for it: lower capacity"):
        open_store(capacity=1 << 60)
    open_store().close()


@needs_root
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_capacity_above_a_small_file_system(open_store: Any, small_fs: Any, kind: str) -> None:
    path = small_fs(kind, 16 * MIB) / "store"
    with pytest.raises(kvtier.TierUnavailable, match="lower capacity"):
        open_store(path, capacity=32 * MIB)
    assert not (path / "slab").exists()
    store = open_store(path, capacity=8 * MIB)
    with pytest.raises(kvtier.StoreInUse):
        open_store(path, capacity=8 * MIB)
    store.close()
    with pytest.raises(kvtier.TierUnavailable, match="lower capacity"):
        open_store(path, capacity=32 * MIB)
    open_store(path, capacity=8 * MIB).close()


@pytest.mark.parametrize("inside", ["store", "a/b"])
def test_a_directory_below_a_file(open_store: Any, tmp_path: Path, inside: str) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(kvtier.TierUnavailable, match="cannot write to the store directory"):
        open_store(tmp_path / "file" / inside)


@needs_root
def test_a_read_only_file_system(open_store: Any, mount: Callable[..., Path]) -> None:
    point = mount("-t", "tmpfs", "-o", "ro", "tmpfs")
    for path in (point, point / "store"):
        with pytest.raises(kvtier.TierUnavailable, match=r"Read-only.*another directory"):
            open_store(path)


UNPRIVILEGED = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


def readable_by_all() -> bool:
    """Whether an unprivileged user can run this Python with this package."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return False
    probe = [*UNPRIVILEGED, sys.executable, "-c", "import numpy, kvtier"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@needs_root
def test_a_directory_of_another_user(open_store: Any, tmp_path: Path) -> None:
    if not readable_by_all():
        pytest.skip("an unprivileged user cannot run this Python")
    open_store(tmp_path / "store").close()
    os.chmod(tmp_path, 0o755)
    body = """
    try: open()
    except kvtier.TierUnavailable as error: print(error)
    """
    with mode_of_parents(tmp_path):
        out = run(body, tmp_path / "store", wrapper=UNPRIVILEGED)
    assert "Permission denied" in out
    assert "mend its permissions" in out


@needs_root
def test_a_small_locked_memory_limit(tmp_path: Path) -> None:
    if not readable_by_all():
        pytest.skip("an unprivileged user cannot run this Python")
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    body = """
    import resource
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    store = open(dram="64MiB")
    assert store._core.wait_until_populated(20)
    for i in range(20):
        assert store.put([key(i)], [payload(i)], until="disk").result(20).ok
    store.close()
    store = open(dram="64MiB")
    target = np.empty((20, 65536), np.uint8)
    assert store.get([key(i) for i in range(20)], into=target).result(20).ok
    assert (target == np.arange(20)[:, None]).all()
    print(store.stats()["disk.hits"])
    store.close()
    """
    with mode_of_parents(tmp_path):
        assert run(body, home / "store", wrapper=UNPRIVILEGED) == "20\n"


@contextlib.contextmanager
def mode_of_parents(path: Path) -> Iterator[None]:
    """Let everybody pass through the directories above, which pytest makes private."""
    closed = [
        p for p in (path, *path.parents) if p.stat().st_uid == os.geteuid() and not p.stat().st_mode & 1
    ]
    modes = {p: p.stat().st_mode for p in closed}
    for p in closed:
        p.chmod(modes[p] | 0o011)
    try:
        yield
    finally:
        for p, mode in modes.items():
            p.chmod(mode)


def eat(path: Path) -> None:
    """Take all that is free on the file system."""
    with (path / "eaten").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(64 * KIB))
    with (path / "crumbs").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(512))


@needs_root
@pytest.mark.parametrize("kind", ["tmpfs", "ext2"])
def test_a_full_disk_refuses_and_recovers(
    open_store: Any, small_fs: Any, kind: str, monkeypatch: pytest.MonkeyPatch, payload: Any, key: Any
) -> None:
    """Space that could not be reserved is gone when it is wanted: ENOSPC, from the kernel."""
    if kind == "tmpfs":  # which can reserve; make it one that cannot
        monkeypatch.setattr("kvtier.tiers.slab.directory._reserve", lambda fd, nbytes: False)
    point = small_fs(kind, 16 * MIB)
    store = open_store(point / "store", capacity=12 * MIB)
    assert store.stats()["disk.reserved"] is False
    put_and_get(store, key(0), payload(0))
    eat(point)
    keys = [key(i) for i in range(1, 21)]
    result = store.put(keys, [payload(i) for i in range(1, 21)], until="disk").result(10)
    refused = [i for i in range(20) if result.status[i] == Status.REFUSED]
    assert refused, "where did it write to?"
    assert all(outcome(result, i) == (Status.REFUSED, Reason.NO_SPACE) for i in refused)
    assert store.stats()["disk.write_failures"] >= len(refused)
    assert store.stats()["put.no_space"] == len(refused)
    target = np.empty(CHUNK, np.uint8)
    assert store.get([key(0)], into=[target]).result(10).ok
    assert (target == payload(0)).all()
    (point / "eaten").unlink()
    (point / "crumbs").unlink()
    assert store.put(keys, [payload(i) for i in range(1, 21)], until="disk").result(10).ok
    targets = np.empty((20, CHUNK), np.uint8)
    assert store.get(keys, into=targets).result(10).ok
    assert all((targets[i] == payload(i + 1)).all() for i in range(20))
    store.close()


@needs_root
def test_a_journal_without_space(open_store: Any, small_fs: Any, payload: Any, key: Any) -> None:
    """The slab is reserved, the journal grows: when it cannot, puts are refused, and found again later."""
    point = small_fs("tmpfs", 16 * MIB)
    store = open_store(point / "store", capacity=8 * MIB)
    assert store.stats()["disk.reserved"] is True
    put_and_get(store, key(0), payload(0))
    eat(point)
    count = 0
    while count < 60:  # until the journal's last page is full
        count += 1
        result = store.put([key(count)], [payload(count)], until="disk").result(10)
        if not result.ok:
            break
    assert outcome(result) == (Status.REFUSED, Reason.NO_SPACE)
    assert store.stats()["disk.journal_failures"] == 1
    assert store.match([key(i) for i in range(count + 1)]) == count
    store.close()
    (point / "eaten").unlink()
    (point / "crumbs").unlink()
    store = open_store(point / "store", capacity=8 * MIB)
    assert store.match([key(i) for i in range(count + 1)]) == count
    put_and_get(store, key(count), payload(count))
    store.close()


# Devices that return errors.


@contextlib.contextmanager
def broken(store: kvtier.Store, flags: int) -> Iterator[None]:
    """The slab's descriptor, exchanged for one that cannot do everything."""
    disk: Any = store._core.disk
    fd = disk._file.fd
    good = os.dup(fd)
    bad = os.open(store.config.path / "slab", flags | os.O_DIRECT)
    os.dup2(bad, fd)
    os.close(bad)
    try:
        yield
    finally:
        os.dup2(good, fd)
        os.close(good)


@pytest.mark.parametrize("lend", [False, True])
def test_invariant_2_a_device_that_cannot_read(open_store: Any, payload: Any, key: Any, lend: bool) -> None:
    store = open_store()
    put_and_get(store, key(1), payload(1))
    raw = np.empty(CHUNK + 4096, np.uint8)
    target = raw[-raw.ctypes.data % 4096 :][:CHUNK]
    with broken(store, os.O_WRONLY):
        transfer = store.get([key(1)], into=[target], lend=lend)
        assert outcome(transfer.result(10)) == (Status.FAILED, Reason.IO_ERROR)
        assert transfer.wait_released(10)
        lease = store.read([key(1)]).result(10)
        assert outcome(lease.result) == (Status.FAILED, Reason.IO_ERROR)
        assert lease.views[0] is None
        lease.release()
    assert store.stats()["get.io_error"] == 2
    assert store.get([key(1)], into=[target], lend=lend).result(10).ok, (
        "the device is back, and so is the chunk"
    )
    assert (target == payload(1)).all()


def test_a_chunk_that_cannot_be_read_is_put_again(open_store: Any, payload: Any, key: Any) -> None:
    store = open_store()
    put_and_get(store, key(1), payload(1))
    target = np.empty(CHUNK, np.uint8)
    with broken(store, os.O_WRONLY):
        store.get([key(1)], into=[target]).result(10)
        again = store.put([key(1)], [payload(1)], until="disk").result(10)
        assert outcome(again) == (Status.STORED, Reason.NONE)
    assert store.get([key(1)], into=[target]).result(10).ok
    assert (target == payload(1)).all()


def test_a_chunk_that_cannot_be_read_is_reserved_again(open_store: Any, payload: Any, key: Any) -> None:
    store = open_store()
    put_and_get(store, key(1), payload(1))
    target = np.empty(CHUNK, np.uint8)
    with broken(store, os.O_WRONLY):
        store.get([key(1)], into=[target]).result(10)
    with store.reserve([key(1)], CHUNK) as reservation:
        if reservation.views[0] is not None:
            reservation.views[0][:] = payload(1)
        assert reservation.commit(until="disk").result(10).ok
    assert store.get([key(1)], into=[target]).result(10).ok


def test_a_device_that_cannot_write(open_store: Any, payload: Any, key: Any) -> None:
    store = open_store(dram=MIB)
    with broken(store, os.O_RDONLY):
        result = store.put([key(1)], [payload(1)], until="disk").result(10)
        assert outcome(result) == (Status.FAILED, Reason.IO_ERROR)
        assert store.put([key(2)], [payload(2)]).result(10).ok, "DRAM has it"
        assert store.flush().result(10).failed == 2
        assert store.flush().result(10).failed == 0, "counted once"
        target = np.empty(CHUNK, np.uint8)
        assert store.get([key(2)], into=[target]).result(10).ok
    assert store.stats()["disk.write_failures"] == 2
    assert store.put([key(1), key(2)], [payload(1), payload(2)], until="disk").result(10).ok
    store.close()
    assert open_store(dram=MIB).match([key(1), key(2)]) == 2


def test_a_journal_that_cannot_be_written(open_store: Any, payload: Any, key: Any) -> None:
    store = open_store()
    put_and_get(store, key(1), payload(1))
    journal = store._core.disk.journal
    good = os.dup(journal._fd)
    bad = os.open(os.devnull, os.O_RDONLY)
    os.dup2(bad, journal._fd)
    os.close(bad)
    result = store.put([key(2)], [payload(2)], until="disk").result(10)
    assert outcome(result) == (Status.FAILED, Reason.IO_ERROR)
    assert store.match([key(2)]) == 0
    assert store.delete([key(1)]).result(10) == 1
    os.dup2(good, journal._fd)
    os.close(good)
    put_and_get(store, key(2), payload(2))
    store.close()
    store = open_store()
    assert store.match([key(1)]) == 0, "its tombstone was written later"
    assert store.match([key(2)]) == 1
