"""FilesTier: the index of a directory that others use, too, and what this process does to its files."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.config import MAX_PAYLOAD_BYTES, page_up
from kvtier.errors import TierUnavailable
from kvtier.io.base import GONE
from kvtier.owner import NOBODY
from kvtier.tiers.base import NO_ROW
from kvtier.tiers.disk import DiskTier, Write
from kvtier.tiers.files.catalog import Catalog, Grave, without_mercy
from kvtier.tiers.files.directory import Directory
from kvtier.tiers.files.format import DELETE, EVICT, PUT, Event, digest_of
from kvtier.tiers.files.ledger import Ledger
from kvtier.tiers.files.opening import check_new, open_ledger
from kvtier.tiers.files.owners import OwnerFiles
from kvtier.tiers.files.plan import NOT_OPEN, FilePlan, FileWrite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvtier.config import StoreConfig
    from kvtier.index.bytes import ByteCache
    from kvtier.index.owners import Owners
    from kvtier.io.base import Batch
    from kvtier.io.plan import Plan
    from kvtier.tiers.files.format import ChunkFile
    from kvtier.tiers.files.ledger import Section

_TOUCHES = 256
"""Files that are marked at a time."""
_SWEEP_EVERY = 40
"""Looks between two searches for temporaries of the dead: ten seconds."""
_KEPT = 16
"""Files used by others that one making of room passes over; then it takes what is next."""


class FilesTier(DiskTier):
    """Chunks in files of their own.

    `lock` is the store's: it guards the index. Room and names are agreed with other processes in sections
    of the ledger, which are entered without it; it is taken inside of them.
    """

    kind = "files"
    shared = True
    index: ByteCache

    def __init__(
        self,
        config: StoreConfig,
        lock: threading.Lock,
        owners: Owners | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Open or create the tier in `config.path`; `owners` and `wall` as of SlotCache.

        Raises IncompatibleStore, TierUnavailable, or InvalidRequest for a setting that does not fit.
        """
        assert config.path is not None
        self.path = Path(config.path)
        self.commit_lock = threading.Lock()
        self._lock = lock
        self._is_burying = False
        self._unsynced: dict[str, None] = {}
        self._looks = 0
        self._strangers: set[str] = set()
        try:
            self._open(config, owners, wall)
        except OSError as error:
            reason = error.strerror or error
            raise TierUnavailable(f"cannot open the store in {self.path}: {reason}") from error

    def _open(self, config: StoreConfig, owners: Owners | None, wall: Callable[[], float]) -> None:
        check_new(self.path, config)
        with contextlib.ExitStack() as undo:
            self._directory = Directory(self.path, config.file_mode, config.directory_mode)
            undo.callback(self._directory.shut)
            self._ledger = Ledger(self._directory, self._count)
            undo.callback(self._ledger.close)
            with open_ledger(self._ledger, self._directory, config) as (section, kept):
                self._catalog = Catalog(
                    section.capacity - self._ledger.nbytes, owners, config.quotas, wall, config.policy
                )
                self.index = self._catalog.index
                self._owners = OwnerFiles(self._directory, self.index, self._lock)
                self._owners.learn(listed.file.owner for listed in kept if listed.file)
                for listed in kept:
                    assert listed.file is not None
                    self._catalog.take_in(listed.file, listed.mtime)
                self._owners.clean(at_once=True)
                self.recovered = len(self.index)
            undo.pop_all()

    # What the store asks with its lock held: memory only.

    @property
    def capacity(self) -> int:
        """Most bytes that the files of all processes may take up, the ledger included."""
        return self.index.slots.capacity + self._ledger.nbytes

    @property
    def largest_payload(self) -> int:
        """Bytes of the largest chunk that fits."""
        return min(MAX_PAYLOAD_BYTES, max(0, self.index.slots.capacity))

    @property
    def waits_for_others(self) -> bool:
        """Whether another process holds the ledger."""
        return self._ledger.is_waiting

    @property
    def extent_share(self) -> float:
        """Nothing is lost between sizes."""
        return 0.0

    def share(self, nbytes: int) -> float:
        """The part of the tier that a chunk takes up."""
        return page_up(nbytes) / self.index.slots.capacity if nbytes <= self.largest_payload else 2.0

    def slot_size(self, nbytes: int) -> int:
        """Bytes of a file for `nbytes`; 0 if it does not fit."""
        return page_up(nbytes) if nbytes <= self.largest_payload else 0

    def has_free(self, nbytes: int, owner: int = NOBODY) -> bool:
        """Whether there is room without evicting anything, as far as this process knows."""
        return self.index.slots.has_free(nbytes) and not self.is_over_quota(nbytes, owner)

    def reserve(self, nbytes: int, owner: int = NOBODY) -> int | None:
        """Room for a file, as far as this process knows: `prepare` agrees on it with the others."""
        return self.index.reserve(nbytes, owner) if nbytes <= self.largest_payload else None

    def discard(self, row: int) -> None:
        """Forget a chunk at once, and have its file removed."""
        self._catalog.doom(row, EVICT)

    def delete(self, row: int) -> None:
        """As `discard`, and have the other processes forget it, too."""
        self._catalog.doom(row, DELETE)

    def touch_prefix(self, keys: Sequence[bytes]) -> None:
        """Mark the chunks of a prefix as used, in memory now and on disk now and then."""
        self._catalog.touch(self._rows(keys))

    def start_write(
        self,
        key: bytes,
        offset: int,
        payload_bytes: int,
        *,
        stored_bytes: int = 0,
        codec: int = 0,
        expires_at: int = 0,
    ) -> FileWrite:
        """Begin a file; see DiskTier.start_write."""
        stored_bytes = stored_bytes or page_up(payload_bytes)
        offset = self.index.shrink(offset, stored_bytes)
        owner = self.index.reserved_for(offset)
        return FileWrite(
            key, offset, 0, payload_bytes, stored_bytes, codec, owner, self.index.expiry.now(), expires_at
        )

    def plan(self) -> FilePlan:
        """An empty plan."""
        assert self._ledger.header is not None
        return FilePlan(self._ledger.header.part_bytes)

    def plan_read(
        self, plan: Plan, row: int, address: int, *, start: int = 0, nbytes: int | None = None
    ) -> None:
        """Add the read of a pinned chunk's stored bytes to `address`: all of them."""
        assert isinstance(plan, FilePlan)
        assert start == 0
        plan.add_read(self._catalog.file(row), address)

    def plan_write(self, plan: Plan, write: Write, address: int) -> None:
        """Add a write; see DiskTier.plan_write."""
        assert isinstance(plan, FilePlan)
        plan.add_write(write, address)

    def insert(self, write: Write) -> int:
        """Enter a committed chunk into the index, pinned once, unless another process's is there."""
        assert isinstance(write, FileWrite)
        return self._catalog.insert(write.offset, write.file, write.mtime)

    def bury_unborn(self, write: Write) -> None:
        """Have the file of a committed write removed again: the chunk was deleted meanwhile."""
        assert isinstance(write, FileWrite)
        self._catalog.graves.append(Grave(write.file, write.mtime, DELETE))
        self.index.release(write.offset)

    @property
    def has_graves(self) -> bool:
        """Whether a file of a chunk that left the index may still be there."""
        return self._is_burying or bool(self._catalog.graves)

    def stats(self) -> dict[str, int | float | str]:
        """Gauges of the tier; see Tier.stats. `bytes_in_directory` is of all processes, as last seen."""
        header = self._ledger.header
        assert header is not None
        return {
            **super().stats(),
            "recovered": self.recovered,
            "direct": self._directory.direct,
            "bytes_in_directory": header.used,
        }

    # What may wait for the device, or for other processes: without the store's lock.

    def open_files(self, plan: Plan) -> None:
        """Open the files to read. One that is not there has the outcome GONE."""
        assert isinstance(plan, FilePlan)
        for i, file in enumerate(plan.reads):
            try:
                plan.fds[i] = self._directory.open_chunk(self._name(file))
            except OSError as error:
                is_gone = error.errno in (errno.ENOENT, errno.ESTALE, errno.ELOOP)
                plan.errors[i] = GONE if is_gone else error.errno or errno.EIO

    def read_outcomes(self, plan: Plan, batch: Batch) -> list[int]:
        """Per chunk what came of it, after which its file is closed."""
        assert isinstance(plan, FilePlan)
        try:
            return plan.outcomes(batch)
        finally:
            for fd in plan.fds:
                self._close(fd)

    def prepare(self, plan: Plan) -> None:
        """Take room for every write and create its temporary. What finds no room has an outcome."""
        assert isinstance(plan, FilePlan)
        with self._section(plan.writes) as section:
            self._bury_all(section)
            left = _KEPT
            for i, write in enumerate(plan.writes):
                assert isinstance(write, FileWrite)
                left = self._make_room(section, write.stored_bytes, left)
                if not section.has_room(write.stored_bytes):
                    plan.errors[i] = errno.ENOSPC
                    continue
                section.used += write.stored_bytes
                try:
                    write.temporary, write.fd = self._directory.create(write.stored_bytes)
                except OSError as error:
                    plan.errors[i] = error.errno or errno.EIO
                    section.is_sure = False  # a part of it may be there
                else:
                    plan.fds[i] = write.fd

    def commit(self, written: Sequence[Write], dropped: Sequence[Write]) -> None:
        """Give finished files their names, and remove what is left of the others."""
        writes = [*written, *dropped]
        with self._section(writes) as section:
            for write in dropped:
                self._drop(section, write)
            self._owners.note(write.owner for write in written)
            # The head of a prefix comes first, and is to be the last to go.
            latest = time.time_ns()
            for i, write in enumerate(written):
                self._publish(section, write, latest - i)
            for write in writes:  # in the section: an open file keeps its room when somebody removes it
                self._let_go(write)

    def bury(self) -> None:
        """Remove the files of what left the index. Raises OSError; they are then still to be removed."""
        with self.commit_lock:
            with self._lock:
                if not self._catalog.graves:
                    return
            with self._section() as section:
                self._bury_all(section)

    def sync(self) -> None:
        """Have the device confirm the files that were written since, and their names."""
        names, self._unsynced = self._unsynced, {}
        try:
            self._directory.sync(list(names))
        except OSError:
            self._unsynced = {**names, **self._unsynced}
            raise

    def poll(self) -> list[bytes]:
        """Take in what others did; see DiskTier.poll. Marks files as used, and removes what the dead left."""
        with self._lock:
            has_graves = bool(self._catalog.graves) and not self._is_burying
        if not self._ledger.look(self._learn):
            with self._section():  # which finds out what is the matter
                pass
        self._looks += 1
        if self._looks % _SWEEP_EVERY == 0:
            self._sweep()
        if has_graves:
            self.bury()
        self._touch_files()
        with self._lock:
            deleted, self._catalog.deleted = self._catalog.deleted, []
        return deleted

    def close(self) -> None:
        """Close the directory."""
        self._ledger.close()
        self._directory.shut()

    def drop_descriptors(self) -> None:
        """In a forked child: close what the parent goes on using."""
        with contextlib.suppress(OSError):
            self._ledger.close()
        self._directory.shut()

    # Sections of the ledger.

    @contextlib.contextmanager
    def _section(self, writes: Sequence[Write] = ()) -> Iterator[Section]:
        """A section of the ledger. If it fails, no temporary is left of `writes`."""
        try:
            with self._ledger.section(self._learn) as section:
                yield section
        except BaseException:
            self._undo(writes)
            raise

    def _count(self) -> int:
        """Bytes of all files but the ledger, without those that the dead left."""
        kept, _ = self._directory.sweep()
        return kept + sum(listed.nbytes for listed in self._directory.list_chunks())

    def _learn(self, news: list[Event] | None) -> None:
        """Have the index agree with what others did; with what is there, if their events do not say."""
        listing = list(self._directory.list_chunks()) if news is None else None
        header = self._ledger.header
        assert header is not None
        with self._lock:
            self.index.slots.capacity = header.capacity - self._ledger.nbytes
        files = [e.file for e in news or () if e.kind == PUT] + [x.file for x in listing or () if x.file]
        self._owners.learn(file.owner for file in files)
        if listing is not None:
            self._catalog.compare(self._lock, listing, header.part_bytes)
        self._catalog.apply(self._lock, news or ())

    def _bury_all(self, section: Section) -> None:
        with self._lock:
            graves, self._catalog.graves = self._catalog.graves, []
            self._is_burying = bool(graves)
        done = 0
        try:
            for grave in graves:
                self._bury_one(section, grave)
                done += 1
        finally:
            with self._lock:
                self._is_burying = False
                self._catalog.graves = graves[done:] + self._catalog.graves

    def _bury_one(self, section: Section, grave: Grave) -> bool:
        """Remove a file; False if another process has used it since, and it stays."""
        name = self._name(grave.file)
        status = self._directory.status(name)
        if status is None or status.st_size != grave.file.stored_bytes:
            section.is_sure = False
        if status is None:
            if grave.kind == DELETE:
                section.events.append(Event(DELETE, grave.file))
            return True
        if grave.may_stay and status.st_mtime_ns != grave.mtime:
            with self._lock:
                if self.index.find(grave.file.key) == NO_ROW:
                    self._catalog.take_in(grave.file, status.st_mtime_ns)
            return False
        self._directory.remove(name)
        section.used -= status.st_size
        section.events.append(Event(grave.kind, grave.file))
        self._unsynced.pop(name, None)
        with self._lock:
            if (row := self._catalog.row_of(grave.file)) != NO_ROW:  # another process had put it again
                self.index.discard(row)
        return True

    def _make_room(self, section: Section, nbytes: int, left: int) -> int:
        """Evict until `nbytes` more fit, or nothing is left to evict. At most `left` files are kept for
        others; returns how many more may be.
        """
        has_swept = False
        while not section.has_room(nbytes):
            with self._lock:
                grave = self._catalog.evict_oldest()
            if grave is not None:
                if left <= 0:
                    grave = without_mercy(grave)
                left -= not self._bury_one(section, grave)
            elif not has_swept:
                section.used -= self._directory.sweep()[1]
                has_swept = True
            elif not section.is_sure:
                section.used = self._ledger.nbytes + self._count()
                section.is_sure = True
            else:
                break
        return left

    def _publish(self, section: Section, write: Write, mtime: int) -> None:
        """Give a finished file its time and its name; drop it if another process was faster."""
        assert isinstance(write, FileWrite)
        assert write.sums is not None, "the write is not finished"
        write.generation = digest_of(*write.file[:6], write.sums)
        with self._lock:
            is_known = self.find(write.key) != NO_ROW
            is_over = not is_known and self.index.find(write.key) != NO_ROW
            if is_over:
                self.make_way(write.key)
        if is_over:
            self._bury_all(section)
        if is_known:
            self._drop(section, write)
            return
        name = self._name(write.file)
        replaced = self._directory.status(name)
        write.mtime = self._directory.stamp(write.fd, mtime)
        self._directory.publish(write.temporary, name)
        write.temporary = ""
        section.used -= replaced.st_size if replaced else 0
        section.events.append(Event(PUT, write.file, write.mtime))
        self._unsynced[name] = None

    def _drop(self, section: Section, write: Write) -> None:
        assert isinstance(write, FileWrite)
        if write.temporary:
            temporary, write.temporary = write.temporary, ""
            section.used -= self._directory.drop(temporary)

    def _undo(self, writes: Sequence[Write]) -> None:
        """Remove what writes left. That is in no section any more, so the next one counts anew, and lists:
        what has its name already stays.
        """
        for write in writes:
            assert isinstance(write, FileWrite)
            self._ledger.must_count = True
            temporary, write.temporary = write.temporary, ""
            with contextlib.suppress(OSError):
                if temporary:
                    self._directory.drop(temporary)
            self._let_go(write)

    def _sweep(self) -> None:
        """Remove temporaries of the dead, if some are there for as long as it takes to look twice, and names
        of owners that have nothing here any more.
        """
        strangers = self._directory.strangers()
        if strangers & self._strangers or self._owners.is_due:
            with self._section() as section:
                section.used -= self._directory.sweep()[1]
                self._owners.clean()
        self._strangers = strangers

    def _touch_files(self) -> None:
        """Mark files as used that were, some at a time."""
        with self._lock:
            files = self._catalog.take_stale(_TOUCHES)
        for file in files:
            mtime = self._directory.touch(self._name(file))
            with self._lock:
                row = self._catalog.row_of(file)
                if mtime is not None and row != NO_ROW:
                    self._catalog.saw(row, mtime)

    def _name(self, file: ChunkFile) -> str:
        assert self._ledger.header is not None
        return file.name(self._ledger.header.part_bytes)

    def _let_go(self, write: Write) -> None:
        assert isinstance(write, FileWrite)
        fd, write.fd = write.fd, NOT_OPEN
        self._close(fd)

    def _close(self, fd: int) -> None:
        if fd != NOT_OPEN:
            self._directory.close(fd)
