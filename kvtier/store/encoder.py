"""Payloads made smaller on their way to disk: a stage of its own, which holds nobody up but itself."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvtier.codec import Codec, encode
from kvtier.config import PAGE, page_up
from kvtier.store.worker import Worker
from kvtier.tiers.dram import DramTier

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.store.core import Core
    from kvtier.store.put import WriteThrough

_log = logging.getLogger(__name__)
_ENOUGH_CHUNKS = 64
_LEAST_SAVING = 0.03
"""A codec that saves less over that many chunks is not worth its time, and the log says so once."""


class Encoder:
    """Encodes one write after the other and hands it on.

    Its thread, and memory of its own for what is encoded and not yet written, as much as `landing`,
    come with the first write: slots that others hold could be waiting for it.
    """

    def __init__(self, core: Core, hand_on: Callable[[WriteThrough], None]) -> None:
        """`hand_on` is called without the store's lock, whatever came of it."""
        self._core = core
        self._hand_on = hand_on
        self._worker: Worker | None = None
        self._slots: DramTier | None = None
        self._told = False
        self._stopped = False

    def submit(self, write: WriteThrough) -> None:
        """Queue a write. Called with the lock held."""
        if self._worker is None:
            config = self._core.config
            self._slots = DramTier(config.landing, config.chunk_bytes)
            self._worker = Worker("kvtier-encode")
        self._worker.submit(lambda: self._encode(write))

    def pinned(self) -> int:
        """Number of slots in use. Called with the lock held."""
        return self._slots.index.pinned() if self._slots else 0

    def stop(self) -> None:
        """End the thread once it is done with the chunk it is at; what is queued stays where it is."""
        with self._core.lock:
            self._stopped = True
            self._core.changed.notify_all()
        if self._worker is not None:
            self._worker.stop()

    def _encode(self, write: WriteThrough) -> None:
        if not self._stopped:
            try:
                self._try(write)
            finally:
                self._hand_on(write)

    def _try(self, write: WriteThrough) -> None:
        assert self._slots is not None, "made with the first write"
        core, slots, room = self._core, self._slots, page_up(write.nbytes) - PAGE
        offset = self._reserve(slots, room) if room and not write.deleted else None
        nbytes = None
        try:
            if offset is not None:
                payload = write.tier.view(write.offset, write.nbytes)
                nbytes = encode(write.codec, payload, slots.view(offset, room))
        finally:
            with core.lock:
                self._count(write, nbytes)
                if offset is not None and nbytes is not None:
                    write.encoded = (slots, offset, page_up(nbytes))
                else:
                    write.codec = Codec.RAW
                    if offset is not None:
                        slots.release(offset)
        if write.encoded is not None and nbytes is not None:
            slots.address_to_fill(write.encoded[1], nbytes)

    def _reserve(self, slots: DramTier, nbytes: int) -> int | None:
        """A slot to encode into, once a write has freed one; None if the store closes first."""
        core = self._core
        with core.lock:
            while (offset := slots.reserve(nbytes)) is None and not self._stopped:
                core.changed.wait()
        return offset

    def _count(self, write: WriteThrough, nbytes: int | None) -> None:
        counters = self._core.counters
        counters["codec.chunks"] += 1
        counters["codec.not_smaller"] += nbytes is None
        counters["codec.payload_bytes"] += page_up(write.nbytes)
        counters["codec.stored_bytes"] += page_up(write.nbytes if nbytes is None else nbytes)
        saved = 1 - counters["codec.stored_bytes"] / counters["codec.payload_bytes"]
        if not self._told and counters["codec.chunks"] >= _ENOUGH_CHUNKS and saved < _LEAST_SAVING:
            self._told = True
            _log.warning(
                "codec %r saves only %.1f %% of the bytes, and costs time: put with codec='raw'",
                write.codec.label,
                100 * saved,
            )
