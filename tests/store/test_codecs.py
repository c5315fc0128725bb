"""Payloads stored smaller than they are."""

from __future__ import annotations

import logging
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtier
from kvtier.codec import Codec
from kvtier.config import KIB, MIB
from small_stores import CHUNK
from store_calls import HIT, MISS, STORED, got, idle

if TYPE_CHECKING:
    import numpy.typing as npt

CODECS = ("lz4", "lz4-16bit")


def smooth(i: int, nbytes: int = CHUNK) -> npt.NDArray[np.uint8]:
    """float16 numbers of a few exponents, with mantissas of few bits: both codecs make them smaller."""
    noise = np.random.default_rng(i).integers(0, 8, nbytes // 2).astype(np.float16)
    return np.append((1 + noise / 8).view(np.uint8), np.zeros(nbytes % 2, np.uint8))


def smooth_chunks(count: int) -> npt.NDArray[np.uint8]:
    return np.stack([smooth(i) for i in range(count)])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dram", [0, 2 * MIB])
def test_invariant_1_what_was_encoded_comes_back_exactly(
    open_store: Any, keys: Any, codec: str, dram: int
) -> None:
    store = open_store(dram=dram)
    assert store.put(keys(20), smooth_chunks(20), codec=codec, until="disk").result(20).ok
    stats = store.stats()
    assert (stats["codec.chunks"], stats["codec.not_smaller"]) == (20, 0)
    assert stats["codec.payload_bytes"] == 20 * CHUNK
    assert stats["disk.bytes_written"] == stats["codec.stored_bytes"] < 15 * CHUNK
    store.close()
    for lend in (False, True):
        store = open_store(dram=dram)
        assert store.match(keys(20)) == 20
        with kvtier_buffer(20) as targets:
            assert store.get(keys(20), into=targets, lend=lend).result(20).status.tolist() == [HIT] * 20
            assert (targets == smooth_chunks(20)).all()
        assert store.stats()["disk.bytes_read"] == stats["codec.stored_bytes"]
        assert (got(store, keys(20))[1] == smooth_chunks(20)).all()
        idle(store)
        store.close()


class kvtier_buffer:
    """Page-aligned memory for `count` chunks, as lending wants it."""

    def __init__(self, count: int) -> None:
        raw = np.zeros(count * CHUNK + 4096, np.uint8)
        start = -raw.ctypes.data % 4096
        self._chunks = raw[start : start + count * CHUNK].reshape(count, CHUNK)

    def __enter__(self) -> npt.NDArray[np.uint8]:
        return self._chunks

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("dram", [0, 2 * MIB])
def test_leases_see_the_payload(open_store: Any, keys: Any, dram: int) -> None:
    store = open_store(dram=dram)
    store.put(keys(6), smooth_chunks(6), codec="lz4", until="disk").result(20)
    store.close()
    store = open_store(dram=dram)
    with store.read(keys(6)).result(20) as lease:
        assert all((view == smooth(i)).all() for i, view in enumerate(lease.views))
    idle(store)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 8192, 30_001, CHUNK - 1])
def test_every_length_comes_back(open_store: Any, key: Any, codec: str, nbytes: int) -> None:
    store = open_store(dram=0)
    payload = smooth(1, nbytes)
    store.put([key(1)], [payload], codec=codec, until="disk").result(20)
    target = np.zeros(nbytes, np.uint8)
    assert store.get([key(1)], into=[target]).result(20).ok
    assert (target == payload).all()


def test_what_does_not_get_smaller_is_stored_raw_and_said(
    open_store: Any, keys: Any, payloads: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store()
    with caplog.at_level(logging.WARNING, "kvtier"):
        assert store.put(keys(70), payloads(70), codec="lz4-16bit", until="disk").result(20).ok
    stats = store.stats()
    assert stats["codec.chunks"] == stats["codec.not_smaller"] == 70
    assert stats["disk.bytes_written"] == 70 * CHUNK
    assert (got(store, keys(70))[1] == payloads(70)).all()
    told = [record.message for record in caplog.records if "saves only 0.0 %" in record.message]
    assert len(told) == 1
    assert "codec 'lz4-16bit'" in told[0]


def test_more_fits_on_the_disk(open_store: Any, keys: Any) -> None:
    raw = open_store(dram=0, capacity=4 * MIB)
    head = raw.put(keys(400), smooth_chunks(400), until="disk").result(20).prefix
    raw.close()
    shutil.rmtree(raw.config.path)
    encoded = open_store(dram=0, capacity=4 * MIB)
    more = encoded.put(keys(400), smooth_chunks(400), codec="lz4-16bit", until="disk").result(20).prefix
    assert more > 1.8 * head
    assert encoded.match(keys(400)) == more


def test_raw_and_encoded_chunks_live_side_by_side(open_store: Any, keys: Any, payloads: Any) -> None:
    store = open_store(dram=0)
    for i, codec in enumerate(("raw", "lz4", "lz4-16bit", "raw")):
        some = slice(4 * i, 4 * i + 4)
        store.put(keys(16)[some], smooth_chunks(16)[some], codec=codec, until="disk").result(20)
    store.close()
    store = open_store(dram=0)
    assert (got(store, keys(16))[1] == smooth_chunks(16)).all()
    index = store._core.paths[0].tier.index
    codecs = [index.codec[index.find(key)] for key in keys(16)]
    assert codecs == [Codec.RAW] * 4 + [Codec.LZ4] * 4 + [Codec.LZ4_16BIT] * 4 + [Codec.RAW] * 4


def test_a_reservation_may_be_encoded_too(open_store: Any, keys: Any) -> None:
    store = open_store()
    with store.reserve(keys(3), CHUNK) as reservation:
        for i, view in enumerate(reservation.views):
            view[:] = smooth(i)
        assert reservation.commit(until="disk", codec="lz4").result(20).status.tolist() == [STORED] * 3
    assert store.stats()["codec.chunks"] == 3
    store.close()
    assert (got(open_store(), keys(3))[1] == smooth_chunks(3)).all()


@pytest.mark.parametrize("kind", ["slab"])  # the other has no journal
def test_encoded_forms_survive_a_rewrite_of_the_journal(open_store: Any, keys: Any) -> None:
    store = open_store(dram=0)
    store.put(keys(8), smooth_chunks(8), codec="lz4", until="disk").result(20)
    tier = store._core.paths[0].tier
    tier.compactor.compact()
    store.close()
    assert (got(open_store(dram=0), keys(8))[1] == smooth_chunks(8)).all()


def test_invariant_1_a_wrong_encoded_form_is_a_miss(
    open_store: Any, keys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checksums hold, yet it does not decode to the payload's length."""
    store = open_store(dram=0)
    monkeypatch.setattr("kvtier.store.encoder.encode", lambda codec, payload, out: 100)
    store.put(keys(2), smooth_chunks(2), codec="lz4", until="disk").result(20)
    result, _ = got(store, keys(2))
    assert result.status.tolist() == [MISS, MISS]
    assert store.stats()["get.checksum"] == 2
    assert store.match(keys(2)) == 0
    monkeypatch.undo()
    assert (
        store.put(keys(2), smooth_chunks(2), codec="lz4", until="disk").result(20).status.tolist()
        == [STORED] * 2
    )
    assert (got(store, keys(2))[1] == smooth_chunks(2)).all()


def test_without_the_codec_chunks_are_kept_for_a_store_that_has_it(
    open_store: Any, keys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(dram=0)
    store.put(keys(4), smooth_chunks(4), codec="lz4", until="disk").result(20)
    with monkeypatch.context() as patch:
        patch.setattr("kvtier.store.flight.codec_obstacle", lambda codec: "lz4 is missing")
        result, _ = got(store, keys(4))
        assert result.reason.tolist() == [kvtier.Reason.IO_ERROR] * 4
        assert store.match(keys(4)) == 0, "what cannot be read does not count"
    assert (got(store, keys(4))[1] == smooth_chunks(4)).all()


def test_a_chunk_cached_decoded_is_written_again_as_it_was(open_store: Any, key: Any) -> None:
    """The bytes behind a decoded payload are zeros, as behind one that was put."""
    store = open_store(dram=MIB)
    store.put([key(1)], [smooth(1, 9001)], codec="lz4", until="disk").result(20)
    store.close()
    store = open_store(dram=MIB)
    assert store.prefetch([key(1)]).result(20).ok
    path = store._core.paths[0]
    with store._core.lock:
        path.tier.discard(path.tier.find(key(1)))
    assert store.put([key(1)], [smooth(1, 9001)], until="disk").result(20).ok
    store.close()
    target = np.zeros(9001, np.uint8)
    assert open_store(dram=0).get([key(1)], into=[target]).result(20).ok
    assert (target == smooth(1, 9001)).all()


def test_more_than_there_is_memory_for_waits_for_the_disk(open_store: Any, keys: Any) -> None:
    store = open_store(landing=2 * CHUNK, dram=0)
    assert store.put(keys(40), smooth_chunks(40), codec="lz4", until="disk").result(20).ok
    assert store.stats()["codec.chunks"] == 40
    assert store.stats()["codec.pinned_slots"] == 0
    assert (got(store, keys(40))[1] == smooth_chunks(40)).all()


def test_a_close_does_not_wait_for_all_that_could_be_encoded(
    open_store: Any, keys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    begun, go_on = threading.Event(), threading.Event()

    def slow(codec: Any, payload: Any, out: Any) -> None:
        begun.set()
        go_on.wait(20)

    monkeypatch.setattr("kvtier.store.encoder.encode", slow)
    store = open_store(close_timeout=0.2)
    transfer = store.put(keys(10), smooth_chunks(10), codec="lz4", until="disk")
    assert begun.wait(10)
    closing = threading.Thread(target=store.close)
    closing.start()
    go_on.set()
    closing.join(20)
    assert not closing.is_alive()
    result = transfer.result(5)
    assert all(
        status == STORED or reason == kvtier.Reason.CLOSED
        for status, reason in zip(result.status.tolist(), result.reason.tolist(), strict=True)
    )


def test_a_wrong_codec_is_refused_by_name(open_store: Any, keys: Any) -> None:
    store = open_store()
    with pytest.raises(kvtier.InvalidRequest, match="codec is 'zip', needs one of raw, lz4, lz4-16bit"):
        store.put(keys(1), smooth_chunks(1), codec="zip")
    with (
        store.reserve(keys(1), 4 * KIB) as reservation,
        pytest.raises(kvtier.InvalidRequest, match="codec is 'zip'"),
    ):
        reservation.commit(codec="zip")
    assert store.match(keys(1)) == 0
