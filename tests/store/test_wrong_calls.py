"""Every wrong call raises before anything happens, and says which argument is wrong."""

from __future__ import annotations

import collections
import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvtier import InvalidRequest, StoreClosed

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier import Store

CHUNK = 64 << 10
K = [bytes([i]) * 32 for i in range(4)]


def buffer() -> Any:
    return np.zeros(CHUNK, np.uint8)


def read_only() -> Any:
    array = buffer()
    array.flags.writeable = False
    return array


def torch_tensor(make: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: make(pytest.importorskip("torch"))


BAD_BUFFERS: dict[str, Callable[[], Any]] = {
    "no buffer": lambda: 5,
    "none": lambda: None,
    "text": lambda: "x" * CHUNK,
    "list of numbers": lambda: [1, 2, 3],
    "every other byte": lambda: np.zeros(2 * CHUNK, np.uint8)[::2],
    "columns": lambda: np.zeros((256, 512), np.uint8)[:, :256],
    "transposed": lambda: np.zeros((128, 512), np.uint8).T,
    "empty": lambda: np.zeros(0, np.uint8),
    "empty bytearray": lambda: bytearray(),
    "objects": lambda: np.zeros(8, object),
    "memoryview with a step": lambda: memoryview(bytearray(2 * CHUNK))[::2],
    "torch, transposed": torch_tensor(lambda torch: torch.zeros(128, 512, dtype=torch.uint8).t()),
    "torch, no memory": torch_tensor(lambda torch: torch.zeros(CHUNK, device="meta")),
    "torch, sparse": torch_tensor(lambda torch: torch.eye(64).to_sparse()),
    "torch, empty": torch_tensor(lambda torch: torch.zeros(0)),
}


@pytest.mark.parametrize("name", BAD_BUFFERS)
def test_a_bad_source_is_named(open_store: Any, name: str) -> None:
    store = open_store()
    with pytest.raises(InvalidRequest, match=r"source\[1\]"):
        store.put(K[:2], [buffer(), BAD_BUFFERS[name]()])
    assert store.stats()["put.requested"] == 0
    assert store.match(K[:1]) == 0


@pytest.mark.parametrize("name", [*BAD_BUFFERS, "read-only", "bytes", "read-only memoryview"])
def test_a_bad_target_is_named(open_store: Any, name: str) -> None:
    store = open_store()
    writable: dict[str, Callable[[], Any]] = {
        "read-only": read_only,
        "bytes": lambda: bytes(CHUNK),
        "read-only memoryview": lambda: memoryview(bytes(CHUNK)),
    }
    with pytest.raises(InvalidRequest, match=r"into\[1\]"):
        store.get(K[:2], into=[buffer(), {**BAD_BUFFERS, **writable}[name]()])
    assert store.stats()["get.requested"] == 0


@pytest.mark.parametrize("buffers", [b"x" * 2, bytearray(2), memoryview(b"xx"), 5, None])
def test_a_single_buffer_is_not_a_sequence_of_them(open_store: Any, buffers: Any) -> None:
    store = open_store()
    with pytest.raises(InvalidRequest, match=r"^source is \w+, needs a sequence"):
        store.put(K[:2], buffers)
    with pytest.raises(InvalidRequest, match=r"^into is \w+, needs a sequence"):
        store.get(K[:2], into=buffers)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_as_many_buffers_as_keys(open_store: Any, count: int) -> None:
    store = open_store()
    with pytest.raises(InvalidRequest, match=rf"source has {count} buffers.*2 keys"):
        store.put(K[:2], [buffer()] * count)
    with pytest.raises(InvalidRequest, match=rf"into has {count} buffers.*2 keys"):
        store.get(K[:2], into=np.zeros((count, CHUNK), np.uint8))


def calls(store: Store, keys: Any) -> dict[str, Callable[[], Any]]:
    count = len(keys) if hasattr(keys, "__len__") else 1
    return {
        "match": lambda: store.match(keys),
        "get": lambda: store.get(keys, into=[buffer() for _ in range(count)]),
        "read": lambda: store.read(keys),
        "prefetch": lambda: store.prefetch(keys),
        "put": lambda: store.put(keys, [buffer() for _ in range(count)]),
        "reserve": lambda: store.reserve(keys, 100),
        "pin": lambda: contextlib.ExitStack().enter_context(store.pin(keys)),
        "delete": lambda: store.delete(keys),
    }


METHODS = ["match", "get", "read", "prefetch", "put", "reserve", "pin", "delete"]
BAD_KEYS: dict[str, Any] = {
    "too short": [K[0], b"x" * 31],
    "too long": [K[0], b"x" * 33],
    "text": [K[0], "x" * 32],
    "number": [K[0], 7],
    "bytearray": [K[0], bytearray(32)],
    "nested": [K[0], [K[1]]],
    "none": [K[0], None],
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", BAD_KEYS)
def test_a_bad_key_is_named(open_store: Any, name: str, method: str) -> None:
    store = open_store()
    with pytest.raises(InvalidRequest, match=r"keys\[1\]"):
        calls(store, BAD_KEYS[name])[method]()
    stats = store.stats()
    assert stats["get.requested"] == stats["put.requested"] == 0


@pytest.mark.parametrize("method", METHODS)
def test_one_key_is_not_a_batch(open_store: Any, method: str) -> None:
    with pytest.raises(InvalidRequest, match="keys"):
        calls(open_store(), K[0])[method]()


BAD_BATCHES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "number": lambda: 5,
    "generator": lambda: (key for key in K),
    "set": lambda: set(K[:2]),
    "dict": lambda: dict.fromkeys(K[:2]),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", BAD_BATCHES)
def test_keys_must_be_a_sequence(open_store: Any, name: str) -> None:
    store = open_store(close_timeout=0.2)
    raised = {}
    for method in METHODS:
        try:
            result = calls(store, BAD_BATCHES[name]())[method]()
            raised[method] = f"returned {type(result).__name__}"
        except Exception as error:
            raised[method] = type(error).__name__
    assert raised == dict.fromkeys(METHODS, "InvalidRequest")
    assert store.put(K[:1], [buffer()]).result(2).ok


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("-inf"), "1", True, [1]])
def test_a_bad_timeout_is_named(open_store: Any, timeout: Any) -> None:
    store = open_store()
    reservation = store.reserve(K[:1], CHUNK)
    for call in (
        lambda: store.get(K[:1], into=[buffer()], timeout=timeout),
        lambda: store.read(K[:1], timeout=timeout),
        lambda: store.put(K[:1], [buffer()], timeout=timeout),
        lambda: reservation.commit(timeout=timeout),
    ):
        with pytest.raises(InvalidRequest, match="timeout"):
            call()
    assert reservation.commit(timeout=float("inf")).result(5).ok, "a refused commit leaves it open"


@pytest.mark.parametrize("until", ["Disk", "", None, "gpu", 1])
def test_a_bad_until_is_named(open_store: Any, until: Any) -> None:
    store = open_store()
    with pytest.raises(InvalidRequest, match="until"):
        store.put(K[:1], [buffer()], until=until)
    with store.reserve(K[:1], CHUNK) as reservation, pytest.raises(InvalidRequest, match="until"):
        reservation.commit(until=until)
    assert store.match(K[:1]) == 0


def test_until_disk_needs_a_disk(open_store: Any) -> None:
    store = open_store(path=False)
    with pytest.raises(InvalidRequest, match="no disk tier"):
        store.put(K[:1], [buffer()], until="disk")


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, "64KiB", True, None])
def test_a_bad_size_is_named(open_store: Any, nbytes: Any) -> None:
    with pytest.raises(InvalidRequest, match="nbytes"):
        open_store().reserve(K[:1], nbytes)


def test_a_payload_above_the_largest_is_refused(open_store: Any) -> None:
    store = open_store()
    largest = store._core.largest_payload
    with pytest.raises(InvalidRequest, match=rf"source\[1\] is {largest + 1} bytes.*{largest}"):
        store.put(K[:2], [buffer(), np.zeros(largest + 1, np.uint8)])
    with pytest.raises(InvalidRequest, match=rf"nbytes is {largest + 1} bytes.*{largest}"):
        store.reserve(K[:1], largest + 1)
    assert store.put(K[:1], [np.zeros(largest, np.uint8)], until="disk").result(5).ok


@pytest.mark.parametrize("tier", ["dram", "disk"])
@pytest.mark.parametrize("nbytes", [1, CHUNK - 1, CHUNK + 1, 2 * CHUNK])
def test_a_target_has_the_size_of_its_chunk(open_store: Any, tier: str, nbytes: int) -> None:
    store = open_store(dram=0 if tier == "disk" else 1 << 20)
    assert store.put(K[:2], [buffer(), buffer()], until="disk").result(5).ok
    with pytest.raises(InvalidRequest, match=rf"into\[1\] has {nbytes} bytes, needs the {CHUNK}"):
        store.get(K[:2], into=[buffer(), np.zeros(nbytes, np.uint8)])
    assert store.stats()["get.requested"] == 0


def test_a_loan_is_aligned(open_store: Any) -> None:
    store = open_store()
    memory = np.zeros(3 * CHUNK, np.uint8)
    start = -memory.ctypes.data % 4096
    for bad in (memory[start + 1 :][:CHUNK], memory[start:][: CHUNK - 1]):
        with pytest.raises(InvalidRequest, match=r"into\[0\] is .*4096"):
            store.get(K[:1], into=[bad], lend=True)


def test_rows_of_an_array_that_overlap_are_refused(open_store: Any) -> None:
    rows = np.lib.stride_tricks.as_strided(np.zeros(2 * CHUNK, np.uint8), (2, CHUNK), (100, 1))
    with pytest.raises(InvalidRequest, match=r"into.*overlap"):
        open_store().get(K[:2], into=rows)


def test_a_reservation_is_over_after_commit_and_abort(open_store: Any) -> None:
    store = open_store()
    committed, aborted = store.reserve(K[:1], CHUNK), store.reserve(K[1:2], CHUNK)
    assert committed.commit().result(5).ok
    aborted.abort()
    for reservation in (committed, aborted):
        with pytest.raises(InvalidRequest, match="over"):
            reservation.commit()
    assert store.match(K[:2]) == 1


def test_a_closed_store_says_so(open_store: Any) -> None:
    store = open_store()
    reservation = store.reserve(K[:1], CHUNK)
    store.close()
    store.close()
    methods = {**calls(store, K[:1]), "flush": store.flush, "commit": reservation.commit}
    for name, call in methods.items():
        with pytest.raises(StoreClosed):
            pytest.fail(f"{name} returned {call()}")


def test_a_closed_store_tells_nothing_of_owners(open_store: Any) -> None:
    store = open_store()
    store.close()
    for call in (store.owners, lambda: store.delete_all(tenant="a")):
        with pytest.raises(StoreClosed):
            call()


def test_a_closed_store_has_no_stats(open_store: Any) -> None:
    store = open_store()
    store.close()
    with pytest.raises(StoreClosed):
        store.stats()


# What is not wrong, but was taken wrongly.


def test_any_sequence_of_keys_will_do(open_store: Any) -> None:
    store = open_store()
    target = buffer()
    assert store.put(tuple(K[:2]), (buffer() + 1, buffer() + 2)).result(5).ok
    assert store.get(tuple(K[1:2]), into=(target,)).result(5).ok
    assert (target == 2).all()
    with contextlib.suppress(InvalidRequest):
        assert store.put(collections.deque(K[2:]), [buffer(), buffer()]).result(5).ok
    assert store.put(K[:1], [buffer()]).result(5).ok


def test_invariant_1_the_list_of_keys_may_be_used_again(open_store: Any) -> None:
    store = open_store()
    keys = [K[0]]
    transfer = put_behind(store, keys)
    keys[0] = K[1]
    transfer.result(5)
    assert (store.match(K[:1]), store.match(K[1:2])) == (1, 0)


def put_behind(store: Store, keys: list[bytes]) -> Any:
    """A put that waits in the queue while a large one before it is copied."""
    many = [b"%032d" % i for i in range(64)]
    store.put(many, np.zeros((64, CHUNK), np.uint8))
    return store.put(keys, [buffer() + 1])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_list_of_keys_may_be_cleared(open_store: Any) -> None:
    store = open_store(close_timeout=0.2)
    keys = [K[0]]
    transfer = put_behind(store, keys)
    keys.clear()
    assert transfer.result(2).ok
    assert store.match(K[:1]) == 1


def test_invariant_1_an_array_of_one_axis_has_an_entry_per_key(open_store: Any) -> None:
    store = open_store()
    source = np.arange(1, 5, dtype=np.float64)
    target = np.zeros((4, 1))
    try:
        assert store.put(K, source).result(5).ok
    except InvalidRequest:
        return
    assert store.get(K, into=target).result(5).ok
    assert target[:, 0].tolist() == source.tolist()


def test_a_reservation_says_what_there_is_to_fill(open_store: Any) -> None:
    with open_store().reserve(K[:2], CHUNK) as reservation:
        assert reservation.result.status.tolist() == [1, 1]
        assert reservation.result.ok


def test_a_committed_slot_has_zeros_behind_its_payload(open_store: Any) -> None:
    store = open_store(dram=1 << 20)
    for i in range(32):  # all of DRAM has seen it
        assert store.put([b"%032d" % i], [np.full(CHUNK, 0xAA, np.uint8)], until="disk").result(5).ok
    store.delete([b"%032d" % i for i in range(32)]).result(5)
    reservation = store.reserve(K[:1], CHUNK - 100)
    reservation.views[0][:] = 0x55
    assert reservation.commit(until="disk").result(5).ok
    files = [path.read_bytes() for path in store.config.path.glob("**/*") if path.is_file()]
    found = next(data for data in files if b"\x55" * (CHUNK - 100) in data)
    end = found.index(b"\x55" * (CHUNK - 100)) + CHUNK - 100
    assert found[end : end + 100] == bytes(100)


def test_invariant_7_a_flush_tells_what_did_not_get_to_disk(open_store: Any) -> None:
    store = open_store(capacity=1 << 20, dram=8 << 20)
    keys = [b"%032d" % i for i in range(40)]
    assert store.put(keys, np.zeros((40, CHUNK), np.uint8)).result(5).ok
    flushed = store.flush().result(5)
    assert store.stats()["disk.chunks"] + flushed.failed == 40
