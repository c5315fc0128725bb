"""The matrix as data: the faults, how each is brought about, and what is expected at each moment."""

from __future__ import annotations

import errno
import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvtier.config import MIB

from . import making
from .making import device, underneath

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .scene import Scene

KINDS = ("slab", "files")
ENGINES = ("uring", "threads", "threads-python", "aio")
MOMENTS = ("open", "put", "append", "dram", "get", "lease", "prefetch", "lend", "paths", "flush", "close")
"""When the fault strikes. `put` is the write of payloads, `append` that of the journal or
the ledger."""

_SAME_WITH_FILES = {"dram", "paths"}
"""Moments that run the same code with both kinds of disk tier, and are tried with slabs."""
READS = ("lease", "prefetch", "lend")
"""Moments at which a fault has the outcomes that it has for a get."""
FINE = {"open": "opened", "put": "stored", "append": "stored", "get": "hit", "flush": "synced"}
FINE["close"] = "closed"
ERROR = {"open": "TierUnavailable", "put": "failed io_error", "append": "failed io_error"}
ERROR |= {"get": "failed io_error", "flush": "not synced", "close": "closed"}
FULL = ERROR | {"put": "refused no_space", "append": "refused no_space"}
LATE = {"put": "failed deadline", "append": "failed deadline", "get": "failed deadline"}
LATE |= {"open": "TierUnavailable", "flush": "not synced", "close": "closed"}
_MAY_OPEN = "opened, TierUnavailable"
_TRIED = "failed io_error, failed deadline"
AGAIN = "hit, miss absent, miss checksum, miss short_read"
"""What a get may find when the fault is over: the right bytes, or nothing. Never FAILED."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A fault. Outcomes are written as in `expects`, several of them with commas between."""

    fault: str
    begin: Callable[[Scene, str], None]
    """Puts the fault in force at a moment."""
    expects: Mapping[str, str]
    """By moment, the outcomes that a key, or the call, may come to. A moment that is left out does not
    apply."""
    after: str = AGAIN
    """What a get of the same keys may find as soon as the fault has ended."""
    before_open: bool = False
    """In force from before the store is opened."""
    meanwhile: Callable[[Scene], None] | None = None
    """What happens while the call runs."""
    process: str = ""
    """The call is made by a process of its own, to which this happens: see `host.py`."""
    strikes: bool | None = None
    """Whether the device must have counted requests that the fault struck; None if it is none of the
    device's."""
    ends: bool = True
    """False for what this process, or this device, has for good."""
    abandons: tuple[str, ...] = ()
    """Engines with which close() must leave the files open, because the kernel still owns memory."""
    loses: bool = False
    """A store that is opened later may lack chunks."""
    rooms: Sequence[int] = (0,)
    """How much is left of what runs short, one after the other: opening fails at another place each time."""
    chunks: int = 4
    timeout: float = 10.0
    """Deadline of every call, seconds."""
    engines: tuple[str, ...] = ENGINES
    kinds: tuple[str, ...] = KINDS
    files: Mapping[str, str] = field(default_factory=dict)
    """What is expected otherwise with kind `files`, by moment; nothing if the moment does not apply to it."""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def expected(self, kind: str) -> Mapping[str, str]:
        """The outcomes by moment with a kind of disk tier."""
        outcomes = dict(self.expects)
        if kind == "files":
            reads = {moment: self.files["get"] for moment in READS if "get" in self.files}
            outcomes |= {m: outcome for m, outcome in (reads | self.files).items() if m in outcomes}
            outcomes |= dict.fromkeys(_SAME_WITH_FILES & outcomes.keys(), "")
        return {moment: outcome for moment, outcome in outcomes.items() if outcome and kind in self.kinds}


def fails(name: str, expects: Mapping[str, str] = ERROR, **fault: Any) -> Case:
    """A fault of the device that is over when it is told so."""
    return Case(fault=name, begin=device(**fault), expects=expects, strikes=True)


def only(expects: Mapping[str, str], *moments: str, **others: str) -> dict[str, str]:
    """The outcomes of some moments, and `others`."""
    return {moment: expects[moment] for moment in moments} | others


_ERRNOS = (
    fails("EIO", errno=errno.EIO),
    fails("ENOSPC", FULL, errno=errno.ENOSPC),
    fails("EDQUOT", FULL, errno=errno.EDQUOT),
    fails("EROFS", errno=errno.EROFS),
    fails("ENOLINK", errno=errno.ENOLINK),
    fails("ENODEV", errno=errno.ENODEV),
    fails("EMFILE", errno=errno.EMFILE),
    fails("ENOMEM", errno=errno.ENOMEM),
    # Engines resume what is interrupted or refused for a while; the journal and opening do so for EINTR.
    fails("EINTR, 3 times", FINE | {"open": _MAY_OPEN}, errno=errno.EINTR, count=3),
    Case(fault="EINTR, for ever", begin=device(errno=errno.EINTR), strikes=True, timeout=1.0,
         expects={"put": _TRIED, "get": _TRIED}),
    fails("EAGAIN, 3 times", FINE | only(ERROR, "append", "flush", open=_MAY_OPEN), errno=errno.EAGAIN,
          count=3),
    # io_uring repeats by itself what the file system answers with EAGAIN, and keeps it for as long.
    Case(fault="EAGAIN, for ever", begin=device(errno=errno.EAGAIN), strikes=True, timeout=1.0,
         abandons=("uring",),
         expects=ERROR | {"put": _TRIED, "get": _TRIED}),
    fails("device gone for a while", ERROR, op="any", file="*", errno=errno.ENODEV),
)  # fmt: skip

_LIES = (
    fails("short read", only(FINE, "open", "get"), op="read", short=4096),
    fails("empty read", {"get": "miss short_read"}, op="read", short=0),
    # FUSE in the kernel makes EIO of a short write that is asynchronous, as those of io_uring are.
    fails("short write", {"put": "stored, failed io_error"}, op="write", short=4096),
    fails("short append", only(FINE, "append"), op="write", short=10),
    fails("empty write", only(ERROR, "put", "append"), op="write", short=0),
    Case(
        fault="flipped bit, read", begin=making.flip(op="read"), strikes=True, loses=True,
        expects={"open": "opened", "get": "miss checksum"},
    ),
    Case(
        fault="flipped bit, written", begin=making.flip(op="write"), strikes=True,
        expects=only(FINE, "put"), after="miss checksum",
    ),
    Case(
        fault="flipped bit, appended", begin=making.flip(op="write"), strikes=True, loses=True,
        expects=only(FINE, "append"), after="hit",
    ),
    Case(
        fault="torn write, each page", begin=making.torn(), strikes=True, chunks=16,
        expects=only(FINE, "put"), after="miss checksum",
    ),
    Case(
        fault="torn write with EIO, each page", begin=making.torn(errno.EIO), strikes=True, chunks=16,
        expects=only(ERROR, "put"), after="miss absent",
    ),
    Case(
        fault="torn append", begin=device(torn=64), strikes=True, loses=True,
        expects=only(FINE, "append"), after="hit",
    ),
    Case(
        fault="torn append with EIO", begin=device(torn=64, errno=errno.EIO), strikes=True,
        expects=only(ERROR, "append"), after="miss absent",
    ),
)  # fmt: skip


def _underneath(name: str, how: str, kind: str, **expects: str) -> Case:
    """Somebody else does something to a file of the store."""
    verbs = {"truncated": making.cut, "deleted": making.delete, "replaced": making.replace}
    return Case(
        fault=f"{name} {how}",
        begin=underneath(name, verbs[how]),
        loses=kind == "slab" or name == "chunk",
        kinds=(kind,),
        expects=FINE | expects,
    )


_UNDERNEATH = (
    _underneath("slab", "truncated", "slab", get="miss short_read"),
    _underneath("slab", "deleted", "slab"),
    _underneath("slab", "replaced", "slab"),
    _underneath("journal", "truncated", "slab"),
    _underneath("journal", "deleted", "slab"),
    _underneath("journal", "replaced", "slab"),
    _underneath("chunk", "truncated", "files", get="miss short_read"),
    _underneath("chunk", "deleted", "files", get="miss absent"),
    _underneath("chunk", "replaced", "files", get="miss checksum"),
    _underneath("ledger", "truncated", "files"),
    _underneath("ledger", "deleted", "files"),
    _underneath("ledger", "replaced", "files"),
)

_SLOW = (
    Case(fault="hang beyond the deadline", begin=device(hang=True), expects=LATE, strikes=True,
         timeout=0.5, abandons=ENGINES),
    Case(fault="hang of fsync alone", begin=device(op="fsync", hang=True), strikes=True, timeout=0.5,
         expects=only(LATE, "flush", "close"), abandons=ENGINES),
    fails("latency spikes", FINE, delay=0.2, count=2),
    Case(fault="mount vanishes", begin=making.abort, expects=ERROR, ends=False),
    Case(fault="mount detached", begin=making.detach, ends=False,
         expects=only(FINE, "put", "append", "get", "flush", "close")),
)  # fmt: skip

_DEVICES = (
    Case(fault="O_DIRECT refused", begin=making.refuse_direct, expects=only(FINE, "open", "put", "get"),
         before_open=True, strikes=True, files={"open": ""}),  # which opens no chunk
    Case(fault="4 KiB sectors", begin=device(sector=4096, offset=4096, errno=errno.EINVAL),
         expects=only(FINE, "put", "get"), strikes=False),
)  # fmt: skip

_RESOURCES = (
    Case(fault="no descriptors left", begin=making.few_descriptors, rooms=range(12),
         expects=FINE | {"open": _MAY_OPEN, "put": "stored, failed io_error",
                         "get": "hit, failed io_error"},
         files={"append": "stored, failed io_error", "flush": "synced, not synced"}),
    Case(fault="no address space left", begin=making.little_memory, rooms=range(2, 50, 4),
         expects={"open": _MAY_OPEN}),
    Case(fault="io_uring refused", begin=making.refuse_uring, expects={"open": "TierUnavailable"},
         ends=False, engines=("uring",)),
    Case(fault="io_uring refused, engine auto", begin=making.refuse_uring, before_open=True,
         expects=only(FINE, "open", "put", "get"), engines=("uring",), settings={"engine": "auto"}),
    Case(fault="io_uring torn down", begin=making.tear_down_uring, ends=False, engines=("uring",),
         expects={"put": "failed io_error, failed deadline", "get": "failed io_error, failed deadline",
                  "flush": "synced", "close": "closed"}, abandons=("uring",), timeout=1.0),
    Case(fault="full ring or pool", begin=making.nothing, chunks=16, expects=only(FINE, "put", "get"),
         settings={"io_depth": 1, "io_threads": 1}),
    Case(fault="locked memory limit of 64 KiB", begin=making.little_locked_memory, before_open=True,
         expects=only(FINE, "open", "put", "get"), settings={"landing": 8 * MIB}),
    Case(fault="no huge pages", begin=making.no_huge_pages, before_open=True,
         expects=only(FINE, "open", "put", "get"), settings={"landing": 8 * MIB}),
)  # fmt: skip

_PROCESSES = (
    Case(fault="fork of the host process", begin=device(delay=0.3), strikes=True, after="hit",
         meanwhile=making.fork, expects=only(FINE, "put", "append", "get", "flush")),
    Case(fault="exit without close", begin=device(delay=0.3), strikes=True, process="exits", after="hit",
         expects={"put": "exited", "get": "exited"},
         files={"get": ""}),  # which may not have come to the device yet, and nobody waits for it
    Case(fault="Ctrl-C", begin=device(delay=1.0), strikes=True, process="interrupted", after="hit",
         expects={"put": "interrupted, exited", "get": "interrupted, exited"}),
    Case(fault="clock steps by an hour", begin=device(hang=2.0), strikes=True, process="misled",
         expects=only(LATE, "put", "get"), timeout=0.5),
)  # fmt: skip

_ON_ONE_PATH = {
    "EIO": "failed io_error, failed tier_down, refused tier_down",
    "ENOSPC": "failed io_error, refused no_space",
    "ENODEV": "failed io_error, failed tier_down, refused tier_down",
    "device gone for a while": "failed io_error, failed tier_down, refused tier_down",
    "slab truncated": "miss short_read",
    "hang beyond the deadline": "failed deadline, failed tier_down",
    "mount vanishes": "failed io_error, failed tier_down, refused tier_down",
    "mount detached": "hit, stored",
}
"""What may come of the chunks of one of two paths, which everything on its device strikes. Those of the other
are hits, and `stored`: `_paths` in `play.py` checks whose are whose."""


def _widened(case: Case) -> Case:
    """The case at the moments whose outcomes follow from others': a fault has those of a get for everything
    else that reads, and is not seen by who puts into DRAM and gets from there.
    """
    expects = dict(case.expects)
    if "get" in expects and not case.process:
        expects |= dict.fromkeys(READS, expects["get"])
    # A disk that stores something else than it was given is found out when it is read, as nobody does here.
    if "put" in expects and not case.process and not case.meanwhile and case.after != "miss checksum":
        expects["dram"] = "stored, hit"
    if case.fault in _ON_ONE_PATH:
        expects["paths"] = f"hit, stored, {_ON_ONE_PATH[case.fault]}"
    return replace(case, expects=expects)


CASES = tuple(
    _widened(case) for case in (*_ERRNOS, *_LIES, *_UNDERNEATH, *_SLOW, *_DEVICES, *_RESOURCES, *_PROCESSES)
)


@dataclass(frozen=True, slots=True)
class Known:
    """What kvtier does not do yet, and where. Its cells must fail: else the entry is stale."""

    why: str
    shows: str
    """A regular expression that the beginning of every problem matches: whatever else goes wrong is red."""
    faults: tuple[str, ...]
    moments: tuple[str, ...]
    engines: tuple[str, ...] = ENGINES
    kinds: tuple[str, ...] = KINDS

    def is_about(self, cell: Cell) -> bool:
        case = cell.case.fault in self.faults and cell.moment in self.moments
        return case and cell.engine in self.engines and cell.kind in self.kinds


KNOWN: tuple[Known, ...] = ()


@dataclass(frozen=True, slots=True)
class Cell:
    """One fault, at one moment, on one engine and kind of disk tier."""

    case: Case
    moment: str
    engine: str
    kind: str

    @property
    def id(self) -> str:
        """Names the cell, in the page and on the command line."""
        return f"{self.case.fault} / {self.moment} / {self.engine} / {self.kind}"

    @property
    def expects(self) -> str:
        """The outcomes that are allowed."""
        return self.case.expected(self.kind)[self.moment]

    @property
    def abandons(self) -> bool:
        """Whether close() must leave the files open."""
        return self.engine in self.case.abandons

    @property
    def known(self) -> Known | None:
        """Why the cell cannot be green yet."""
        return next((known for known in KNOWN if known.is_about(self)), None)


def all_cells() -> list[Cell]:
    return [
        Cell(case, moment, engine, kind)
        for case, kind in itertools.product(CASES, KINDS)
        for moment in MOMENTS
        if moment in case.expected(kind)
        for engine in case.engines
    ]


def short_cells() -> list[Cell]:
    """Each fault on slabs three times and on files twice, at different moments, on the next engine in turn;
    and on one of two paths.
    """
    chosen = []
    turns = itertools.count()
    for kind, times in zip(KINDS, (3, 2), strict=True):
        for case in CASES:
            moments = [moment for moment in MOMENTS if moment in case.expected(kind)]
            first = next(turns)
            own = []
            for n in range(min(times, len(moments))):
                moment = moments[(first + n) % len(moments)]
                own.append(Cell(case, moment, case.engines[(first + n) % len(case.engines)], kind))
            if "paths" in moments and "paths" not in [cell.moment for cell in own]:
                own.append(Cell(case, "paths", case.engines[first % len(case.engines)], kind))
            chosen += own
    return chosen
