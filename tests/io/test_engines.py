"""One contract for every I/O engine."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xxhash

from kvtier import _native
from kvtier.config import StoreConfig
from kvtier.errors import TierUnavailable
from kvtier.io import open_engine, uring_obstacle
from kvtier.io.aio import AioEngine
from kvtier.io.base import CHECKSUM, OP, SHORT, Batch, IOEngine
from kvtier.io.threads import ThreadEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PAGE = 4096
PART = 64 << 10
NAMES = ["uring", "threads", "threads-python", "aio"]
WAIT = 30


class Completion:
    """Counts calls of on_done and waits for the first."""

    def __init__(self) -> None:
        self.calls = 0
        self._done = threading.Event()

    def __call__(self, batch: Batch) -> None:
        self.calls += 1
        self.thread = threading.current_thread()
        self._done.set()

    def wait(self) -> None:
        assert self._done.wait(WAIT), "the batch never ended"


@pytest.fixture(params=["direct", "buffered"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """An open file of 1 MiB of known bytes."""
    path = tmp_path / "file"
    path.write_bytes(content(1 << 20).tobytes())
    flags = os.O_RDWR | (os.O_DIRECT if request.param == "direct" else 0)
    try:
        fd = os.open(path, flags)
    except OSError:
        pytest.skip("no O_DIRECT here")
    yield fd
    os.close(fd)


def content(nbytes: int) -> np.ndarray:
    return np.random.default_rng(11).integers(0, 256, nbytes, np.uint8)


def digests(data: np.ndarray, seed: int, part: int = PART) -> list[int]:
    return [
        xxhash.xxh3_64_intdigest(data[start : start + part].tobytes(), (seed + i) % 2**64)
        for i, start in enumerate(range(0, len(data), part))
    ]


def op(
    fd: int,
    memory: np.ndarray,
    offset: int,
    *,
    write: bool = False,
    seed: int = 9,
    first_sum: int = 0,
    part: int = PART,
) -> tuple[int, ...]:
    return (offset, memory.ctypes.data, seed, memory.nbytes, part, first_sum, fd, int(write), 0)


def run(engine: IOEngine, ops: list[tuple[int, ...]], sums: list[int]) -> Batch:
    done = Completion()
    batch = Batch(np.array(ops, OP), np.array(sums, np.uint64), done)
    engine.submit(batch)
    done.wait()
    return batch


@pytest.mark.parametrize("seed", [0, 9, 2**64 - 1])
@pytest.mark.parametrize(("offset", "nbytes"), [(0, PAGE), (PAGE, 3 * PART + PAGE), (0, 1 << 20)])
def test_reads_what_is_there(
    engine: IOEngine, file: int, aligned: Callable[[int], np.ndarray], seed: int, offset: int, nbytes: int
) -> None:
    memory = aligned(nbytes)
    expected = content(1 << 20)[offset : offset + nbytes]
    batch = run(engine, [op(file, memory, offset, seed=seed)], digests(expected, seed))
    assert batch.results.tolist() == [0]
    assert (memory == expected).all()


@pytest.mark.parametrize("nbytes", [PAGE, 3 * PART + PAGE])
def test_writes_and_hands_back_the_sums(
    engine: IOEngine, file: int, aligned: Callable[[int], np.ndarray], nbytes: int
) -> None:
    memory = aligned(nbytes)
    memory[:] = np.random.default_rng(2).integers(0, 256, nbytes, np.uint8)
    before = memory.copy()
    expected = digests(memory, 2**64 - 2)
    batch = run(
        engine, [op(file, memory, PAGE, write=True, seed=2**64 - 2, first_sum=1)], [77] * (len(expected) + 2)
    )
    assert batch.results.tolist() == [0]
    assert batch.sums.tolist() == [77, *expected, 77]
    assert (memory == before).all()
    with open(f"/proc/self/fd/{file}", "rb") as reader:
        written = reader.read()
    whole = content(1 << 20)
    whole[PAGE : PAGE + nbytes] = before
    assert written == whole.tobytes()


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_invariant_1_a_part_that_does_not_match_is_a_checksum_failure(
    engine: IOEngine, file: int, aligned: Callable[[int], np.ndarray], wrong: int
) -> None:
    memory = aligned(3 * PART + PAGE)
    sums = digests(content(1 << 20)[: len(memory)], 9)
    sums[wrong] ^= 1
    assert run(engine, [op(file, memory, 0)], sums).results.tolist() == [CHECKSUM]


@pytest.mark.parametrize("seed", [8, 10])
def test_invariant_1_another_seed_is_a_checksum_failure(
    engine: IOEngine, file: int, aligned: Callable[[int], np.ndarray], seed: int
) -> None:
    memory = aligned(PART)
    sums = digests(content(1 << 20)[:PART], 9)
    assert run(engine, [op(file, memory, 0, seed=seed)], sums).results.tolist() == [CHECKSUM]


def test_a_read_that_collects_hands_back_the_sums(
    engine: IOEngine, file: int, aligned: Callable[[int], np.ndarray]
) -> None:
    memory = aligned(3 * PART + PAGE)
    expected = content(1 << 20)[PAGE : PAGE + memory.nbytes]
    sums = digests(expected, 5)
    batch = run(engine, [(*op(file, memory, PAGE, seed=5, first_sum=1)[:-1], 1)], [77] * (len(sums) + 2))
    assert batch.results.tolist() == [0]
    assert batch.sums.tolist() == [77, *sums, 77]
    assert (memory == expected).all()


def test_a_read_that_collects_and_ends_too_early_is_short(
    engine: IOEngine, file: int, aligned: Callable[[int], np.ndarray]
) -> None:
    memory = aligned(2 * PART)
    batch = run(engine, [(*op(file, memory, (1 << 20) - PART)[:-1], 1)], [0, 0])
    assert batch.results.tolist() == [SHORT]


@pytest.mark.parametrize("left", [0, PAGE, PART, PART + 512, PART + 1])
def test_invariant_1_a_file_that_ends_too_early_is_a_short_read(
    engine: IOEngine, file: int, aligned: Callable[[int], np.ndarray], left: int
) -> None:
    os.ftruncate(file, left)
    memory = aligned(2 * PART)
    sums = digests(content(1 << 20)[: len(memory)], 9)
    assert run(engine, [op(file, memory, 0)], sums).results.tolist() == [SHORT]


def test_a_read_behind_the_end_is_short(
    engine: IOEngine, file: int, aligned: Callable[[int], np.ndarray]
) -> None:
    assert run(engine, [op(file, aligned(PAGE), 1 << 30)], [0]).results.tolist() == [SHORT]


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("fd", [1 << 20, -1])
def test_a_bad_descriptor_is_its_errno(
    engine: IOEngine, aligned: Callable[[int], np.ndarray], write: bool, fd: int
) -> None:
    batch = run(engine, [op(fd, aligned(PAGE), 0, write=write)], [0])
    assert batch.results.tolist() == [errno.EBADF]


def test_a_write_that_the_file_does_not_allow_is_its_errno(
    engine: IOEngine, tmp_path: Path, aligned: Callable[[int], np.ndarray]
) -> None:
    (tmp_path / "file").write_bytes(bytes(PAGE))
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    batch = run(engine, [op(fd, aligned(PAGE), 0, write=True)], [0])
    os.close(fd)
    assert batch.results.tolist() == [errno.EBADF]


def test_a_full_device_is_its_errno(engine: IOEngine, aligned: Callable[[int], np.ndarray]) -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    batch = run(engine, [op(fd, aligned(PAGE), 0, write=True)], [0])
    os.close(fd)
    assert batch.results.tolist() == [errno.ENOSPC]


def test_one_failure_does_not_touch_the_other_operations(
    engine: IOEngine, file: int, aligned: Callable[[int], np.ndarray]
) -> None:
    memory = aligned(4 * PAGE).reshape(4, PAGE)
    whole = content(1 << 20).reshape(-1, PAGE)
    sums = [digests(whole[i], 9)[0] for i in range(4)]
    sums[1] ^= 1 << 63
    fds = [file, file, 1 << 20, file]
    ops = [op(fds[i], memory[i], i * PAGE, first_sum=i) for i in range(4)]
    batch = run(engine, ops, sums)
    assert batch.results.tolist() == [0, CHECKSUM, errno.EBADF, 0]
    assert (memory[[0, 3]] == whole[[0, 3]]).all()


def test_many_operations_in_one_batch(
    engine: IOEngine, file: int, aligned: Callable[[int], np.ndarray]
) -> None:
    rng = np.random.default_rng(4)
    whole = content(1 << 20).reshape(-1, PAGE)
    pages = rng.integers(0, len(whole), 3000).tolist()
    memory = aligned(3000 * PAGE).reshape(3000, PAGE)
    sums = [digests(whole[page], 9)[0] for page in pages]
    ops = [op(file, memory[i], page * PAGE, first_sum=i) for i, page in enumerate(pages)]
    batch = run(engine, ops, sums)
    assert not batch.results.any()
    assert (memory == whole[pages]).all()


def test_batches_from_several_threads_end_once_each(
    engine: IOEngine, file: int, aligned: Callable[[int], np.ndarray]
) -> None:
    whole = content(1 << 20).reshape(-1, PAGE)
    sums = [digests(page, 9)[0] for page in whole]
    ended: Counter[int] = Counter()
    wrong: list[Any] = []
    left = threading.Semaphore(0)

    def on_done(batch: Batch) -> None:
        ended[batch.context] += 1
        if batch.results.any():
            wrong.append(batch.results)
        left.release()

    batches = []
    for number in range(200):
        memory = aligned(2 * PAGE).reshape(2, PAGE)
        at = [number % 256, (7 * number) % 256]
        ops = np.array([op(file, memory[i], at[i] * PAGE, first_sum=i) for i in range(2)], OP)
        batch = Batch(ops, np.array([sums[page] for page in at], np.uint64), on_done, number)
        batches.append((batch, memory, at))

    def submit(own: list[tuple[Batch, np.ndarray, list[int]]]) -> None:
        for batch, _, _ in own:
            engine.submit(batch)

    threads = [threading.Thread(target=submit, args=(batches[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(left.acquire(timeout=WAIT) for _ in batches)
    assert engine.close(WAIT)
    assert ended == Counter(range(200))
    assert wrong == []
    assert all((memory == whole[at]).all() for _, memory, at in batches)


def test_on_done_runs_on_a_thread_of_the_engine(
    engine: IOEngine, file: int, aligned: Callable[[int], np.ndarray]
) -> None:
    done = Completion()
    memory = aligned(PAGE)
    engine.submit(Batch(np.array([op(file, memory, 0)], OP), np.zeros(1, np.uint64), done))
    done.wait()
    assert done.thread is not threading.current_thread()
    assert done.thread.name.startswith("kvtier-")


def test_an_on_done_that_raises_harms_no_other_batch(
    engine: IOEngine,
    file: int,
    aligned: Callable[[int], np.ndarray],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(batch: Batch) -> None:
        raise RuntimeError("the submitter's fault")

    memory = aligned(PAGE)
    for _ in range(6):  # more than there are threads
        engine.submit(Batch(np.array([op(file, memory, 0)], OP), np.zeros(1, np.uint64), fail))
    expected = content(1 << 20)[:PAGE]
    assert run(engine, [op(file, memory, 0)], digests(expected, 9)).results.tolist() == [0]
    assert engine.close(WAIT)
    assert "the submitter's fault" in caplog.text


@pytest.mark.parametrize("name", NAMES)
def test_close_waits_for_what_is_running(
    engine_maker: Callable[..., IOEngine],
    tmp_path: Path,
    aligned: Callable[[int], np.ndarray],
    name: str,
) -> None:
    engine = engine_maker(name, 2)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    memory = aligned(8 << 20)
    memory[:] = 3
    dones = [Completion() for _ in range(6)]
    batches = [
        Batch(
            np.array([op(fd, memory, i * memory.nbytes, write=True)], OP),
            np.zeros(memory.nbytes // PART, np.uint64),
            done,
        )
        for i, done in enumerate(dones)
    ]
    for batch in batches:
        engine.submit(batch)
    assert engine.close(WAIT)
    assert [done.calls for done in dones] == [1] * 6
    assert not any(batch.results.any() for batch in batches)
    assert os.fstat(fd).st_size == 6 * memory.nbytes
    os.close(fd)
    assert engine.close(WAIT)
    assert engine.close(0)


@pytest.mark.parametrize("name", NAMES)
def test_close_gives_up_in_time_and_succeeds_later(
    engine_maker: Callable[..., IOEngine], aligned: Callable[[int], np.ndarray], name: str
) -> None:
    engine = engine_maker(name, 1)
    memory = aligned(1 << 20)
    done = Completion()
    gate = threading.Event()

    def block(batch: Batch) -> None:
        gate.wait(WAIT)
        done(batch)

    fd = os.open("/dev/null", os.O_WRONLY)
    engine.submit(Batch(np.array([op(fd, memory, 0, write=True)], OP), np.zeros(16, np.uint64), block))
    first = engine.close(0.05)
    gate.set()
    done.wait()
    assert engine.close(WAIT)
    os.close(fd)
    assert done.calls == 1
    if name == "threads-python":
        assert not first, "its on_done had not returned"


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_leaves_no_thread_behind(engine_maker: Callable[..., IOEngine], name: str) -> None:
    before = threading.active_count()
    engine = engine_maker(name)
    assert threading.active_count() > before
    assert engine.close(WAIT)
    assert threading.active_count() == before


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_operations_ends(engine_maker: Callable[..., IOEngine], name: str) -> None:
    engine = engine_maker(name)
    done = Completion()
    engine.submit(Batch(np.empty(0, OP), np.empty(0, np.uint64), done))
    drained = engine.close(1)
    assert drained
    assert done.calls == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_closed_engine_takes_no_batch(
    engine_maker: Callable[..., IOEngine],
    aligned: Callable[[int], np.ndarray],
    name: str,
) -> None:
    engine = engine_maker(name)
    assert engine.close(WAIT)
    with pytest.raises(RuntimeError):
        engine.submit(Batch(np.array([op(0, aligned(PAGE), 0)], OP), np.zeros(1, np.uint64), Completion()))


def test_settings_choose_the_engine(tmp_path: Path) -> None:
    def name_of(**settings: Any) -> tuple[str, type]:
        engine = open_engine(StoreConfig(paths=(tmp_path,), io_threads=2, **settings))
        assert engine.close(WAIT)
        return engine.name, type(engine)

    assert name_of(engine="threads")[0] == "threads"
    if _native.core is None:
        assert name_of(engine="threads")[1] is ThreadEngine
    if uring_obstacle():
        assert name_of()[0] == "threads"
        with pytest.raises(TierUnavailable, match="engine is 'uring', but"):
            name_of(engine="uring")
    else:
        assert name_of()[0] == name_of(engine="uring")[0] == "uring"


def test_what_stands_in_the_way_of_uring_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_native, "core", None)
    monkeypatch.setattr(_native, "why_not", "because")
    assert "because" in uring_obstacle()
    with pytest.raises(TierUnavailable, match=r"because.*'auto'"):
        open_engine(StoreConfig(paths=(tmp_path,), engine="uring"))


def test_aio_keeps_no_more_files_open_than_it_uses_at_once(
    engine_maker: Callable[..., IOEngine], tmp_path: Path, aligned: Callable[[int], np.ndarray]
) -> None:
    engine = engine_maker("aio", 2)
    before = len(os.listdir("/proc/self/fd"))
    memory = aligned(PAGE)
    for i in range(20):
        path = tmp_path / str(i)
        path.write_bytes(bytes(PAGE))
        fd = os.open(path, os.O_RDONLY)
        batch = run(engine, [op(fd, memory, 0, part=0)], [])
        os.close(fd)
        assert batch.results.tolist() == [0]
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert engine.close(10)


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_threads_that_cannot_all_be_had_are_let_go(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    real = threading.Thread.start
    started: list[threading.Thread] = []

    def third_fails(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise error
        started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", third_fails)
    with pytest.raises(type(error)):
        ThreadEngine(4)
    assert [thread.is_alive() for thread in started] == [False, False]


def test_an_event_loop_without_a_thread_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though whoever catches the error, and with it the engine, keeps it."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread") as kept:
        AioEngine(4)
    assert len(os.listdir("/proc/self/fd")) == before
    assert kept.value.__traceback__ is not None
