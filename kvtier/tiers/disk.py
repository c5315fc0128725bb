"""The contract of a disk tier: what the store asks of the tier of one path, whatever its kind."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvtier.owner import NOBODY
from kvtier.tiers.base import Tier

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from kvtier.io.base import Batch
    from kvtier.io.plan import Plan


@dataclass(slots=True)
class Write:
    """A payload on its way into a reserved slot."""

    key: bytes
    offset: int
    generation: int
    payload_bytes: int
    stored_bytes: int
    """What of it goes to the slot: whole pages, the encoded form where `codec` is not 0."""
    codec: int = 0
    owner: int = NOBODY
    stored_at: int = 0
    """Seconds since 1970."""
    expires_at: int = 0
    """The same; 0: never."""
    sums: npt.NDArray[np.uint64] | None = None
    """Filled in from the finished batch, before `commit`."""


class DiskTier(Tier):
    """A tier that an I/O engine reads and writes, as its plans say.

    The store's lock guards what looks at the index. `open_files`, `prepare`, `commit`, `bury`, `sync`,
    `poll` and `close` are called without it: they may wait for the device.
    """

    name = "disk"
    path: Path
    kind: ClassVar[str]
    """As in the setting `kind`."""
    shared: ClassVar[bool] = False
    """Whether other processes use the directory, too: then what is agreed with them runs on threads that
    may wait, and `open_files` and `poll` do something."""
    commit_lock: threading.Lock
    """Held from a `commit` until its chunks are in the index: whoever deletes one of them waits with that."""

    @property
    def part_bytes(self) -> int:
        """Bytes of a chunk that can be read and checked by themselves; 0 where only all of it can."""
        return 0

    @property
    def waits_for_others(self) -> bool:
        """Whether it is another process, and not the device, that keeps it from going on."""
        return False

    @property
    @abstractmethod
    def extent_share(self) -> float:
        """The part of the tier that is lost at most with every further size of chunks."""

    @abstractmethod
    def slot_size(self, nbytes: int) -> int:
        """Bytes of the slot that `nbytes` would get now; 0 if they fit none."""

    @abstractmethod
    def has_free(self, nbytes: int, owner: int = NOBODY) -> bool:
        """Whether there is a slot for `nbytes` of this owner without evicting anything."""

    @abstractmethod
    def start_write(
        self,
        key: bytes,
        offset: int,
        payload_bytes: int,
        *,
        stored_bytes: int = 0,
        codec: int = 0,
        expires_at: int = 0,
    ) -> Write:
        """Begin a new use of a reserved slot, raw unless `stored_bytes` and `codec` say otherwise.

        `expires_at` is in seconds since 1970, 0 for never.
        """

    def abandon(self, write: Write) -> None:
        """Give back the slot of a write that will not be committed."""
        self.release(write.offset)

    @abstractmethod
    def plan(self) -> Plan:
        """An empty plan, for reads alone or for writes alone."""

    @abstractmethod
    def plan_read(
        self, plan: Plan, row: int, address: int, *, start: int = 0, nbytes: int | None = None
    ) -> None:
        """Add the read of a pinned chunk's stored bytes to `address`: all, or `nbytes` from `start` on, which
        are whole parts of `part_bytes`, but for the last.
        """

    @abstractmethod
    def plan_write(self, plan: Plan, write: Write, address: int) -> None:
        """Add a write from `address`, which holds payload or encoded form, and zeros up to whole pages."""

    def open_files(self, plan: Plan) -> None:
        """Open what a plan of reads needs. What fails becomes the outcome of its chunk."""

    def prepare(self, plan: Plan) -> None:
        """Make it safe to write: end what was in the slots before. Raises OSError, and then it is not."""
        self.bury()

    def read_outcomes(self, plan: Plan, batch: Batch) -> list[int]:
        """Per chunk of a finished batch of reads: 0, or what came of it. Called once."""
        return plan.outcomes(batch)

    def collect_sums(self, plan: Plan, batch: Batch, writes: Sequence[Write]) -> None:
        """Hand the checksums that the engine computed to the writes of a finished batch."""
        for write, sums in zip(writes, plan.sums(batch), strict=True):
            write.sums = sums

    @abstractmethod
    def commit(self, written: Sequence[Write], dropped: Sequence[Write]) -> None:
        """Have finished writes found after a crash, and what is left of `dropped` ones gone.

        The caller holds `commit_lock` until the written ones are in the index. Raises OSError, and then
        none of them is stored.
        """

    @abstractmethod
    def insert(self, write: Write) -> int:
        """Enter a committed chunk into the index, pinned once. Returns its row."""

    @abstractmethod
    def bury_unborn(self, write: Write) -> None:
        """Give back the slot of a committed write that must not be found: it was deleted meanwhile."""

    @property
    @abstractmethod
    def has_graves(self) -> bool:
        """Whether something that left the index would still be found after a crash."""

    @abstractmethod
    def bury(self) -> None:
        """Have nothing found any more that left the index. Raises OSError; it is then still to be done."""

    @abstractmethod
    def sync(self) -> None:
        """Have the device confirm all that was committed. Raises OSError."""

    def poll(self) -> list[bytes]:
        """Take in what other processes did. The keys that they deleted; raises OSError."""
        return []

    def stop(self, timeout: float) -> bool:
        """End what it does in the background; False if that hangs for `timeout` seconds."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Close the files and let go of the directory."""

    @abstractmethod
    def drop_descriptors(self) -> None:
        """In a forked child: close what the parent goes on using."""
