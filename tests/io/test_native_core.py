"""The native core against the reference implementations it must equal."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xxhash

from kvtier import _native
from kvtier.io.base import CHECKSUM, OP, SHORT, Batch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvtier.io.native import NativeEngine

core: Any = _native.core
pytestmark = pytest.mark.skipif(core is None, reason=_native.why_not)

PAGE = 4096
MIB = 1 << 20
PATHS = ["portable", "avx2", "avx512"]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    try:
        core.set_checksum_path(request.param)
    except ValueError:
        pytest.skip(f"no {request.param} here")
    yield request.param
    core.set_checksum_path("auto")


def digest(data: np.ndarray[Any, Any], seed: int) -> int:
    return xxhash.xxh3_64_intdigest(data.data, seed % 2**64)


def aligned(nbytes: int) -> np.ndarray[Any, Any]:
    """Page-aligned random bytes."""
    raw = np.frombuffer(bytearray(random.Random(nbytes).randbytes(nbytes + PAGE)), np.uint8)
    start = -raw.ctypes.data % PAGE
    return raw[start : start + nbytes]


def test_xxh3_equals_the_reference(path: str) -> None:
    assert core.checksum_path() == path
    rng = random.Random(7)
    data = aligned(4 * MIB)
    lengths = [241, 1023, 1024, 1025, PAGE, 2 * PAGE, MIB, 4 * MIB]
    lengths += [rng.randrange(1, 1024) * PAGE for _ in range(40)]
    lengths += [rng.randrange(241, MIB) for _ in range(40)]
    for length in lengths:
        start = rng.randrange(data.nbytes - length + 1)
        for seed in (0, 2**64 - 1, rng.getrandbits(64)):
            expected = digest(data[start : start + length], seed)
            assert core.xxh3_64(data.ctypes.data + start, length, seed) == expected


def test_parts_are_seeded_in_turn(path: str) -> None:
    data = aligned(5 * PAGE)
    sums = np.zeros(3, np.uint64)
    seed = 2**64 - 2  # wraps at part 2
    core.xxh3_parts(data.ctypes.data, data.nbytes, 2 * PAGE, seed, sums)
    parts = [data[: 2 * PAGE], data[2 * PAGE : 4 * PAGE], data[4 * PAGE :]]
    assert sums.tolist() == [digest(part, seed + j) for j, part in enumerate(parts)]


@pytest.mark.parametrize(("length", "part"), [(PAGE, 0), (PAGE + 100, PAGE), (PAGE, 100)])
def test_short_parts_are_refused(length: int, part: int) -> None:
    with pytest.raises(ValueError, match="240"):
        core.xxh3_parts(aligned(2 * PAGE).ctypes.data, length, part, 0, np.zeros(64, np.uint64))


def test_copy_many_copies_exactly_the_pieces(path: str) -> None:
    rng = random.Random(3)
    source = aligned(8 * MIB)
    target = np.zeros_like(source)
    expected = target.copy()
    lengths = [0, 1, 63, 64, PAGE, 256 << 10, (256 << 10) + 1, MIB + 77, 2 * MIB]
    slots = [0]  # disjoint targets, odd ones too
    for length in lengths:
        slots.append(slots[-1] + length + rng.randrange(130))
    starts = [rng.randrange(source.nbytes - length) for length in lengths]
    for start, slot, length in zip(starts, slots, lengths, strict=False):
        expected[slot : slot + length] = source[start : start + length]
    core.copy_many(
        np.array(starts, np.uint64) + np.uint64(source.ctypes.data),
        np.array(slots[:-1], np.uint64) + np.uint64(target.ctypes.data),
        np.array(lengths, np.uint64),
    )
    assert np.array_equal(target, expected)


def test_copy_many_wants_equal_counts() -> None:
    one, two = np.zeros(1, np.uint64), np.zeros(2, np.uint64)
    with pytest.raises(ValueError, match="one length"):
        core.copy_many(one, two, two)
    with pytest.raises(TypeError):
        core.copy_many(one.astype(np.int32), one, one)


def test_features_say_what_is_there() -> None:
    features = core.features()
    assert features["checksum"] in PATHS
    assert features["uring"] == ("yes" if core.probe_uring() == "" else f"no: {core.probe_uring()}")
    if not core.has_uring:
        assert core.probe_uring() == "built without liburing"


def make_engine(kind: str, depth: int = 3) -> NativeEngine:
    from kvtier.io import native

    if kind == "uring" and core.probe_uring():
        pytest.skip(core.probe_uring())
    return native.UringEngine(depth, 8 * MIB) if kind == "uring" else native.NativeThreadEngine(depth)


@pytest.fixture(params=["uring", "threads"])
def engine(request: pytest.FixtureRequest) -> Iterator[NativeEngine]:
    made = make_engine(request.param)
    yield made
    assert made.close(5)


def ops_on(fd: int, data: np.ndarray[Any, Any], count: int, part: int, write: bool) -> np.ndarray[Any, Any]:
    """`count` operations that cover `data`, from file offset 0."""
    ops = np.zeros(count, OP)
    each = data.nbytes // count
    ops["offset"] = np.arange(count) * each
    ops["address"] = data.ctypes.data + ops["offset"]
    ops["length"], ops["part_bytes"], ops["fd"], ops["write"] = each, part, fd, write
    ops["sums"] = np.arange(count) * -(-each // part)
    ops["seed"] = 11 * np.arange(count)
    return ops


def run(engine: NativeEngine, ops: np.ndarray[Any, Any], sums: np.ndarray[Any, Any]) -> list[int]:
    done = threading.Event()
    batch = Batch(ops, sums, lambda _: done.set())
    engine.submit(batch)
    assert done.wait(20)
    return list(batch.results)


@pytest.mark.parametrize("registered", [False, True])
def test_what_was_written_is_read(engine: NativeEngine, tmp_path: Path, registered: bool) -> None:
    source, target = aligned(40 * 3 * PAGE), aligned(40 * 3 * PAGE)
    target[:] = 0
    if registered and not engine.register(target.ctypes.data, target.nbytes):
        pytest.skip("no registered memory")
    sums = np.zeros(40 * 2, np.uint64)
    fd = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT)
    assert run(engine, ops_on(fd, source, 40, 2 * PAGE, write=True), sums) == [0] * 40
    assert sums[0] == digest(source[: 2 * PAGE], 0)
    reads = ops_on(fd, target, 40, 2 * PAGE, write=False)
    assert run(engine, reads, sums) == [0] * 40
    assert np.array_equal(source, target)
    sums[3] ^= np.uint64(1)
    assert run(engine, reads, sums) == [0, CHECKSUM, *[0] * 38]
    os.truncate(fd, 39 * 3 * PAGE + 5000)
    assert run(engine, reads, sums)[-2:] == [0, SHORT]
    os.close(fd)


def test_a_refused_batch_leaves_nothing_behind(engine: NativeEngine) -> None:
    data = aligned(PAGE)
    ops = ops_on(0, data, 1, PAGE, write=False)
    batch = Batch(ops, np.zeros(0, np.uint64), lambda _: None)
    with pytest.raises(ValueError, match="sums"):
        engine.submit(batch)
    assert not engine._running
    assert engine.close(5)
    batch.sums = np.zeros(1, np.uint64)
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(batch)
    assert not engine._running


@pytest.mark.parametrize("kind", ["uring", "threads"])
def test_an_engine_that_gets_no_thread_leaves_none(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though whoever catches the error, and with it the engine, keeps it."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = len(os.listdir("/proc/self/task"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread") as kept:
            make_engine(kind)
    end = time.monotonic() + 10
    while len(os.listdir("/proc/self/task")) > before:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert kept.value.__traceback__ is not None


def test_a_raising_callback_is_logged(engine: NativeEngine, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Batch) -> None:
        raise RuntimeError("no")

    engine.submit(Batch(np.zeros(0, OP), np.zeros(0, np.uint64), fail))
    assert run(engine, ops_on(-1, aligned(PAGE), 1, PAGE, write=False), np.zeros(1, np.uint64)) == [9]
    assert "on_done of batch" in caplog.text


def test_a_hanging_read_leaves_its_memory_to_the_kernel() -> None:
    """A read from an empty pipe stands for a device that does not answer."""
    engine = make_engine("uring", depth=1)
    reader, writer = os.pipe()
    data = aligned(2 * PAGE)
    done = threading.Event()
    batch = Batch(ops_on(reader, data, 2, PAGE, write=False), np.zeros(2, np.uint64), lambda _: done.set())
    batch.ops["offset"] = 2**64 - 1  # a pipe has no offsets
    engine.submit(batch)
    assert not engine.close(0.1)
    assert not done.is_set()
    os.write(writer, b"x" * 64)
    os.close(writer)
    assert done.wait(5)
    assert engine.close(5)
    os.close(reader)


@pytest.mark.parametrize("kind", ["uring", "threads"])
@pytest.mark.parametrize("end", ["pass", "del engine", "os.fork() or os._exit(0)", "os.fork()"])
def test_an_engine_nobody_closes_ends_quietly(kind: str, end: str) -> None:
    make_engine(kind).close(1)
    make = "UringEngine(2, 1 << 20)" if kind == "uring" else "NativeThreadEngine(2)"
    code = f"import os; from kvtier.io.native import *; engine = {make}; {end}"
    ended = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=20)
    assert (ended.returncode, ended.stderr) == (0, "")
