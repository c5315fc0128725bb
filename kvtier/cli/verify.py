"""`kvtier verify PATH`: read and check every chunk of a store, and drop what is bad if so asked."""

from __future__ import annotations

import os
import sys
from pathlib import Path  # noqa: TC003  the command line reads the types
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvtier.cli.sizes import size
from kvtier.cli.verify_files import verify_files
from kvtier.config import StoreConfig
from kvtier.errors import IncompatibleStore, TierUnavailable
from kvtier.io import open_engine
from kvtier.tiers.files import inspection as files
from kvtier.tiers.slab import inspection
from kvtier.tiers.slab import repair as repairing
from kvtier.tiers.slab.directory import lock_directory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.io.base import IOEngine
    from kvtier.tiers.slab.inspection import BadChunk, Inspection


def verify(path: Path, *, repair: bool = False) -> None:
    """Read every chunk of the store in PATH and check it. Exit code 1 if anything is bad.

    The store must not be in use, unless it is of kind `files`. Without --repair nothing is changed.

    Parameters
    ----------
    path
        The store's directory.
    repair
        Drop what is bad, mend the headers and compact the journal; exit code 0 if all is well then. What
        the device fails to read is dropped only if it fails twice.
    """
    if not path.is_dir():
        raise IncompatibleStore(f"{path} is not a directory, so it holds no store")
    console = Console()
    if files.is_of_files(path):
        if not verify_files(path, console, mend=repair):
            sys.exit(1)
        return
    is_lost = repair and _is_lost(path)
    if not is_lost:
        inspection.inspect(path, salvage=True)  # before the lock, which would make a file in what is no store
    lock = lock_directory(path)
    try:
        well = _start_over(path, console) if is_lost else _verify(path, console, mend=repair)
    finally:
        os.close(lock)
    if not well:
        sys.exit(1)


def _verify(path: Path, console: Console, *, mend: bool) -> bool:
    """Whether all is well, in the end."""
    found = inspection.inspect(path, salvage=True)
    engine = open_engine(StoreConfig(paths=(path,)))
    try:
        bad = _read(found, engine, console, "verifying")
        if mend and bad:
            bad = _read(found, engine, console, "reading what is bad again", bad)
    finally:
        engine.close(10)
    for fault in found.faults:
        console.print(f"[red]bad:[/] {fault}")
    for word, chunks in (
        ("bad", [chunk for chunk in bad if not chunk.error]),
        ("unreadable", [chunk for chunk in bad if chunk.error]),
    ):
        for chunk in chunks:
            console.print(
                f"[red]{word}:[/] chunk {chunk.key.hex()} at byte {chunk.offset} of the slab: {chunk.reason}",
                soft_wrap=True,
            )
    sound = len(found.recovered.chunks) - len(bad)
    total = size(int(found.recovered.chunks["payload_bytes"].sum()))
    console.print(f"{sound} of {len(found.recovered.chunks)} chunks ({total} in all) are sound")
    if not mend:
        return not bad and not found.faults
    _tell(console, [*_dropped(bad), *repairing.drop(found, bad)])
    after = inspection.inspect(path, salvage=True)
    return not after.faults and len(after.recovered.chunks) == sound


def _read(
    found: Inspection,
    engine: IOEngine,
    console: Console,
    what: str,
    only: Sequence[BadChunk] | None = None,
) -> list[BadChunk]:
    """Which chunks are bad."""
    bad = []
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(found.recovered.chunks if only is None else only))
        for count, wrong in inspection.verify(found, engine, only):
            bad += wrong
            progress.advance(task, count)
    return bad


def _dropped(bad: Sequence[BadChunk]) -> list[str]:
    unreadable = sum(chunk.error != 0 for chunk in bad)
    counts = {"that are not as they were written": len(bad) - unreadable, "that cannot be read": unreadable}
    return [f"dropped {count} chunks {why}" for why, count in counts.items() if count]


def _is_lost(path: Path) -> bool:
    try:
        return repairing.journal_is_lost(path)
    except OSError as error:
        raise TierUnavailable(f"cannot read the store in {path}: {error.strerror}") from error


def _start_over(path: Path, console: Console) -> bool:
    _tell(console, repairing.start_over(path))
    return not inspection.inspect(path, salvage=True).faults


def _tell(console: Console, actions: Sequence[str]) -> None:
    for action in actions or ["nothing had to be repaired"]:
        console.print(f"repair: {action}", soft_wrap=True)
