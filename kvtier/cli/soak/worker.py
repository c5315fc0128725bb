"""One thread of the load: it alone uses its keys, and knows what the store may say of each."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier import Reason, Status
from kvtier.cli.soak.content import Contents, key_of

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Sequence

    import kvtier

HANG = 30.0
"""Seconds after which a call that should have ended long ago counts as hanging."""
LATE = 3.0
"""Seconds that a read may outlive its deadline on a loaded machine."""
_CODECS = ("raw", "raw", "lz4", "lz4-16bit")


class Violation(Exception):
    """The store broke a promise."""


class Worker:
    """Puts, gets, leases, pins, deletes. What it knows of a number:

    in `deleted`, a finished delete was the last thing that happened to it, so it must be a miss; else it
    may be there, with its own bytes, or not. In `failed`, a put of it failed, so it must work later.
    """

    def __init__(self, numbers: Sequence[int], seed: int, contents: Contents | None = None) -> None:
        self.numbers = numbers
        contents = contents or Contents()
        self._content, self._size_of = contents.content, contents.size_of
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.deleted: set[int] = set(numbers)  # never put
        self.failed: set[int] = set()
        self.why: dict[int, str] = {}  # reason, of what was last not stored
        self.disturbed = False
        """Whether the device may fail now."""

    def work(self, store: kvtier.Store, stop: threading.Event) -> None:
        """Until told to stop. Raises Violation."""
        calls: dict[Callable[[kvtier.Store], Any], int] = {
            self.put: 4, self.get: 6, self.lend: 2, self.lease: 2, self.prefetch: 1, self.delete: 1,
            self.pin: 1, self.reserve: 1, self.flush: 1,
        }  # fmt: skip
        while not stop.is_set():
            (call,) = self.rng.choices(list(calls), list(calls.values()))
            call(store)
            self.counts[getattr(call, "__name__", "")] += 1

    def some(self, most: int = 8) -> list[int]:
        """Up to `most` neighbours of its numbers."""
        first = self.rng.randrange(len(self.numbers))
        return list(self.numbers[first : first + self.rng.randint(1, most)])

    # Writing.

    def put(self, store: kvtier.Store, numbers: list[int] | None = None, until: Any = None) -> list[int]:
        """Returns those that are there now."""
        numbers = numbers or self.some()
        self.deleted -= set(numbers)
        until, codec = until or self.rng.choice(["disk", "dram"]), self.rng.choice(_CODECS)
        sources = [np.frombuffer(self._content(i), np.uint8) for i in numbers]
        transfer = store.put(list(map(key_of, numbers)), sources, until=until, codec=codec)
        return self._note_put(numbers, transfer)

    def reserve(self, store: kvtier.Store) -> None:
        """Write one chunk in place, or let it be."""
        number = self.some(1)[0]
        with store.reserve([key_of(number)], self._size_of(number)) as reservation:
            if self.rng.random() < 0.2 or reservation.views[0] is None:
                return
            self.deleted.discard(number)
            reservation.views[0][:] = np.frombuffer(self._content(number), np.uint8)
            self._note_put([number], reservation.commit(until="disk", codec=self.rng.choice(_CODECS)))

    def _note_put(self, numbers: list[int], transfer: Any) -> list[int]:
        result = self.finished(transfer, "put")
        there = []
        for number, status, reason in zip(
            numbers, result.status.tolist(), result.reason.tolist(), strict=True
        ):
            self.counts[f"put.{Status(status).name.lower()}"] += 1
            if status in (Status.STORED, Status.KNOWN):
                there.append(number)
            else:
                self.failed.add(number)
                self.why[number] = Reason(reason).name.lower()
        return there

    def delete(self, store: kvtier.Store) -> None:
        """From then on they must be misses."""
        numbers = self.some(4)
        self.finished(store.delete(list(map(key_of, numbers))), "delete")
        self.deleted |= set(numbers)

    def flush(self, store: kvtier.Store) -> None:
        """Sync what was put."""
        self.finished(store.flush(), "flush")

    # Reading.

    def get(self, store: kvtier.Store, numbers: list[int] | None = None) -> list[int]:
        """Returns the hits."""
        numbers = numbers or self.some()
        targets = [np.full(self._size_of(i), 0xAA, np.uint8) for i in numbers]
        result = self.finished_read(store, store.get(list(map(key_of, numbers)), into=targets), "get")
        return self.check(numbers, result, targets)

    def lend(self, store: kvtier.Store) -> None:
        """The disk writes into the targets, so they are whole pages, and kept until they are released."""
        numbers = [i for i in self.some() if self._size_of(i) % 4096 == 0]
        if not numbers:
            return
        memory = np.full(sum(map(self._size_of, numbers)) + 4096, 0xAA, np.uint8)
        place = -memory.ctypes.data % 4096
        targets = []
        for number in numbers:
            targets.append(memory[place : place + self._size_of(number)])
            place += self._size_of(number)
        transfer = store.get(list(map(key_of, numbers)), into=targets, lend=True)
        self.check(numbers, self.finished_read(store, transfer, "get"), targets)

    def lease(self, store: kvtier.Store) -> None:
        """The views must stay as they are while other things happen."""
        numbers = self.some(4)
        with self.finished_read(store, store.read(list(map(key_of, numbers))), "lease") as lease:
            self.check(numbers, lease.result, lease.views)
            others: list[Callable[[kvtier.Store], Any]] = [self.get, self.put, self.delete]
            self.rng.choice(others)(store)
            for number, view in zip(numbers, lease.views, strict=True):
                if view is not None and view.tobytes() != self._content(number):
                    raise Violation(f"wrong bytes in a lease of chunk {number}")

    def prefetch(self, store: kvtier.Store) -> None:
        """Into DRAM alone."""
        numbers = self.some()
        result = self.finished_read(store, store.prefetch(list(map(key_of, numbers))), "prefetch")
        self.check(numbers, result, None)

    def pin(self, store: kvtier.Store) -> None:
        """What is pinned, and can be read, stays, unless the device fails."""
        numbers = self.some()
        with store.pin(list(map(key_of, numbers))) as count:
            # An earlier fault may have spoilt some.
            pinned = self.get(store, numbers[:count]) if count else []
            others: list[Callable[[kvtier.Store], Any]] = [self.get, self.lease]
            self.rng.choice(others)(store)
            pinned = [i for i in pinned if i not in self.deleted]  # the lease may have deleted some
            missing = set(pinned) - set(self.get(store, pinned)) if pinned else set()
        if missing and not self.disturbed:
            raise Violation(f"chunks {sorted(missing)} were pinned, and are not there")

    def check(self, numbers: list[int], result: Any, found: Sequence[Any] | None) -> list[int]:
        """Judge a result. Returns the hits."""
        hits = []
        for i, number in enumerate(numbers):
            status, reason = Status(result.status[i]), Reason(result.reason[i])
            name = f"get.{status.name.lower()}" + (f".{reason.name.lower()}" if reason else "")
            self.counts[name] += 1
            if status is Status.HIT:
                if number in self.deleted:
                    raise Violation(f"chunk {number} was deleted, and is a hit")
                if found is not None and found[i].tobytes() != self._content(number):
                    raise Violation(f"wrong bytes under chunk {number}")
                hits.append(number)
        return hits

    def finished(self, transfer: Any, what: str, seconds: float = HANG) -> Any:
        """The outcome of a transfer. Raises Violation after `seconds`."""
        try:
            return transfer.result(seconds)
        except TimeoutError:
            raise Violation(f"a {what} has not ended after {seconds:g} s") from None

    def finished_read(self, store: kvtier.Store, transfer: Any, what: str) -> Any:
        """The outcome of a read, which keeps to its deadline whatever the device does."""
        return self.finished(transfer, what, store.config.get_timeout + LATE)

    # Between loads.

    def recover(self, store: kvtier.Store) -> None:
        """No fault is in force: whatever failed must work now."""
        failed = sorted(self.failed)
        self.failed.clear()
        for first in range(0, len(failed), 4):
            self.require(store, failed[first : first + 4])

    def require(self, store: kvtier.Store, numbers: list[int]) -> None:
        """Put, and get."""
        self.require_put(store, numbers)
        # A chunk that is KNOWN may have been spoilt by an earlier fault: its miss lets it be put again.
        if lost := sorted(set(numbers) - set(self.get(store, numbers))):
            self.require_put(store, lost)
            if set(lost) - set(self.get(store, lost)):
                raise Violation(f"chunks {lost} cannot be stored any more")

    def require_put(self, store: kvtier.Store, numbers: list[int]) -> None:
        """Put; a path that was taken out while it failed, or is slow, has some seconds to come back."""
        end = time.monotonic() + HANG
        while missing := sorted(set(numbers) - set(self.put(store, numbers, "disk"))):
            why = {number: self.why[number] for number in missing}
            # On a loaded machine neither says anything yet.
            if not set(why.values()) <= {"deadline", "tier_down"} or time.monotonic() > end:
                raise Violation(f"of chunks {numbers} some cannot be put, and no fault is in force: {why}")
            time.sleep(0.1)

    def forget_deletes(self, numbers: Iterable[int] | None = None) -> None:
        """Deletes that a failing device may not have recorded: what was deleted may be back."""
        self.deleted -= set(self.deleted if numbers is None else numbers)
