"""Kind `files` on a device that fails or hangs where only this kind asks it for something."""

from __future__ import annotations

import errno
import os
import random
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtier
from devices import instant_device
from kvtier import Reason, Status
from kvtier.testing.faults import Fault
from kvtier.tiers.files import inspection
from small_stores import CHUNK, SMALL, numbered_key, pinned_slots, random_payload
from store_calls import HIT, got, outcome

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvtier.testing.emulated import EmulatedDevice

FILES = {**SMALL, "kind": "files", "dram": 0}
KEYS = [numbered_key(i) for i in range(10)]


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    yield from instant_device("64MiB")


@pytest.fixture
def store(device: EmulatedDevice) -> Iterator[kvtier.Store]:
    """A store with ten chunks."""
    with kvtier.open(device.paths[0] / "store", **FILES) as opened:
        put_all(opened)
        yield opened
        device.clear_faults()
        assert not pinned_slots(opened)


def put_all(store: kvtier.Store) -> None:
    result = store.put(KEYS, [random_payload(i) for i in range(10)], until="disk").result(20)
    assert result.ok


def check_all_works(store: kvtier.Store) -> None:
    put_all(store)
    end = time.monotonic() + 10
    while store.stats()["disk.down"]:  # it is asked again after a while
        assert time.monotonic() < end
        got(store, KEYS[:1])
        time.sleep(0.05)
    put_all(store)
    result, targets = got(store, KEYS)
    assert result.ok
    assert all((targets[i] == random_payload(i)).all() for i in range(10))


def open_chunks(path: Path) -> list[str]:
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    names = [os.readlink(link) for link in links if os.path.islink(link)]
    return [name for name in names if name.startswith((f"{path}/chunks/", f"{path}/incoming/"))]


def test_a_get_does_not_wait_for_an_open_that_hangs(device: EmulatedDevice, store: kvtier.Store) -> None:
    device.inject(Fault(op="open", file="*.kv1", hang=True))
    start = time.monotonic()
    result, _ = got(store, KEYS, timeout=0.5)
    assert time.monotonic() - start < 3
    assert {outcome(result, i) for i in range(10)} == {(Status.FAILED, Reason.DEADLINE)}
    assert store.match(KEYS) == 10
    assert got(store, [numbered_key(99)])[0].reason[0] == Reason.ABSENT
    device.clear_faults()
    check_all_works(store)


@pytest.mark.parametrize("op", ["open", "metadata"])
def test_a_put_does_not_wait_for_a_name_that_hangs(
    device: EmulatedDevice, store: kvtier.Store, op: Any
) -> None:
    device.inject(Fault(op=op, file="*incoming*", hang=True))
    new = [numbered_key(50)]
    start = time.monotonic()
    result = store.put(new, [random_payload(50)], until="disk", timeout=0.5).result(5)
    assert time.monotonic() - start < 3
    assert outcome(result) == (Status.FAILED, Reason.DEADLINE)
    assert got(store, KEYS)[0].ok
    device.clear_faults()
    check_all_works(store)


def test_closing_is_bounded_while_the_ledger_hangs(device: EmulatedDevice) -> None:
    store = kvtier.open(device.paths[0] / "store", **{**FILES, "close_timeout": 1.0})
    put_all(store)
    device.inject(Fault(op="read", file="ledger", hang=True))
    device.inject(Fault(op="metadata", file="*", hang=True))
    time.sleep(0.5)  # the watcher looks
    start = time.monotonic()
    store.close()
    assert time.monotonic() - start < 5
    device.clear_faults()


@pytest.mark.parametrize(
    ("op", "file"),
    [("open", "*.kv1"), ("read", "*.kv1")],
)
def test_what_cannot_be_opened_is_no_miss_and_is_put_again(
    device: EmulatedDevice, store: kvtier.Store, op: Any, file: str
) -> None:
    device.inject(Fault(op=op, file=file, errno=errno.EIO))
    result, _ = got(store, KEYS[:2])
    assert outcome(result) == (Status.FAILED, Reason.IO_ERROR)
    assert store.match(KEYS[:1]) == 0, "the device failed to read it"
    device.clear_faults()
    check_all_works(store)
    assert not open_chunks(device.paths[0] / "store")


@pytest.mark.parametrize("op", ["open", "metadata", "fallocate", "write", "ftruncate"])
@pytest.mark.parametrize("nth", [1, 2, 5, 9])
def test_a_put_that_fails_anywhere_leaves_no_temporary_and_no_room_lost(
    device: EmulatedDevice, store: kvtier.Store, op: Any, nth: int
) -> None:
    path = device.paths[0] / "store"
    fault = device.inject(Fault(op=op, errno=errno.EIO, nth=nth, count=1))
    new = [numbered_key(50 + i) for i in range(5)]
    result = store.put(new, [random_payload(50 + i) for i in range(5)], until="disk").result(20)
    assert {outcome(result, i) for i in range(5)} <= {
        (Status.STORED, Reason.NONE), (Status.FAILED, Reason.IO_ERROR), (Status.FAILED, Reason.TIER_DOWN)
    }  # fmt: skip
    fault.remove()
    check_all_works(store)
    assert not open_chunks(path)
    assert store.delete(KEYS).result(20) == 10
    found = inspection.inspect(path)
    assert found.header is not None
    assert found.header.used == found.bytes_on_disk
    assert found.temporaries == 0


def test_a_full_device_is_a_refusal(device: EmulatedDevice, store: kvtier.Store) -> None:
    device.inject(Fault(op="fallocate", errno=errno.ENOSPC))
    result = store.put([numbered_key(50)], [random_payload(50)], until="disk").result(20)
    assert outcome(result) == (Status.REFUSED, Reason.NO_SPACE)
    assert not store.stats()["disk.down"]
    device.clear_faults()
    check_all_works(store)


@pytest.mark.parametrize("seed", range(20))
def test_invariant_1_whatever_happens_to_the_files(tmp_path: Path, seed: int) -> None:
    """Bits flipped, ranges overwritten, files cut, swapped, renamed and removed, the ledger included."""
    rng = random.Random(seed)
    path = tmp_path / "store"
    sizes = [1, 5000, CHUNK, 3 * CHUNK + 100, 2 * CHUNK, CHUNK - 1]
    values = [random_payload(i, sizes[i % 6]) for i in range(10)]
    settings = {**FILES, "chunk_bytes": 4 * CHUNK}
    with kvtier.open(path, **settings) as store:
        assert store.put(KEYS, values, until="disk", codec=rng.choice(["raw", "lz4"])).result(20).ok
    store = kvtier.open(path, **settings) if seed % 2 else None
    for _ in range(rng.randint(1, 4)):
        damage(path, rng)
    for _ in range(2):
        store = store or kvtier.open(path, **settings)
        with store:
            targets = [np.zeros(len(value), np.uint8) for value in values]
            result = store.get(KEYS, into=targets).result(20)
            for target, value, status in zip(targets, values, result.status.tolist(), strict=True):
                assert status in (Status.HIT, Status.MISS)
                assert status == Status.MISS or (target == value).all(), "wrong bytes"
            assert store.put(KEYS, values, until="disk").result(20).ok
            assert store.get(KEYS, into=targets).result(20).status.tolist() == [HIT] * 10
            assert all((target == value).all() for target, value in zip(targets, values, strict=True))
        store = None


def damage(path: Path, rng: random.Random) -> None:
    files = [f for f in (path / "ledger", *sorted((path / "chunks").iterdir())) if f.exists()]
    file, other = rng.choice(files), rng.choice(files)
    how = rng.choice(["flip", "overwrite", "cut", "grow", "remove", "replace", "rename", "swap"])
    size = max(1, file.stat().st_size)
    if how in ("flip", "overwrite"):
        data = bytearray(file.read_bytes() or b"0")
        at = rng.randrange(size)
        data[at : at + 1] = bytes([data[at] ^ 1 << rng.randrange(8)])
        if how == "overwrite":
            data[at : at + 4096] = rng.randbytes(min(4096, size - at))
        with file.open("r+b") as target:
            target.write(data)
    elif how in ("cut", "grow"):
        os.truncate(file, rng.randrange(size) if how == "cut" else size + 4096)
    elif how == "remove":
        file.unlink()
    elif how == "replace":
        file.write_bytes(rng.randbytes(size))
    elif how == "rename" and file.name != "ledger":
        at = rng.randrange(len(file.name) - 4)
        file.rename(file.with_name(file.name[:at] + rng.choice("0123456789abcdef") + file.name[at + 1 :]))
    elif file.name != "ledger" and other.name != "ledger" and file != other:
        one, two = file.read_bytes(), other.read_bytes()
        file.write_bytes(two)
        other.write_bytes(one)
