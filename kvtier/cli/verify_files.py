"""`kvtier verify` of a store of kind `files`: its directory may be in use meanwhile."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvtier.cli.sizes import size
from kvtier.config import StoreConfig
from kvtier.io import open_engine
from kvtier.tiers.base import NO_ROW
from kvtier.tiers.files import inspection
from kvtier.tiers.files.directory import CHUNKS
from kvtier.tiers.files.tier import FilesTier

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from kvtier.io.base import IOEngine
    from kvtier.tiers.files.inspection import BadFile, Inspection


def verify_files(path: Path, console: Console, *, mend: bool) -> bool:
    """Read and check every chunk of the store in `path`; with `mend` remove what is bad, read twice.

    Whether all is well, in the end. Raises TierUnavailable, IncompatibleStore.
    """
    found = inspection.inspect(path)
    engine = open_engine(StoreConfig(paths=(path,)))
    try:
        bad = _read(found, engine, console, "verifying")
        if mend and bad:
            keys = {chunk.key for chunk in bad}
            again = replace(found, chunks=[file for file in found.chunks if file.key in keys])
            bad = _read(again, engine, console, "reading what is bad again")
    finally:
        engine.close(10)
    for fault in found.faults:
        console.print(f"[red]bad:[/] {fault}", soft_wrap=True)
    for chunk in bad:
        console.print(f"[red]bad:[/] chunk {chunk.key.hex()} in {chunk.name}: {chunk.reason}", soft_wrap=True)
    total = size(sum(file.payload_bytes for file in found.chunks))
    console.print(f"{len(found.chunks) - len(bad)} of {len(found.chunks)} chunks ({total} in all) are sound")
    if not mend:
        return not bad and not found.faults
    if found.header is None:
        for chunk in bad:
            (path / CHUNKS / chunk.name).unlink(missing_ok=True)
        console.print("the ledger is made anew when the store is opened with a capacity")
    else:
        _remove(path, bad)
    if bad:
        console.print(f"repaired: removed {len(bad)} chunks")
    left = inspection.inspect(path)
    for name in left.misfits:
        console.print(f"[red]bad:[/] {name} is not the store's: remove it by hand", soft_wrap=True)
    return not left.misfits


def _read(found: Inspection, engine: IOEngine, console: Console, what: str) -> list[BadFile]:
    """Which chunks are bad."""
    bad = []
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(found.chunks))
        for count, wrong in inspection.verify(found, engine):
            bad += wrong
            progress.advance(task, count)
    return bad


def _remove(path: Path, bad: list[BadFile]) -> None:
    """Remove chunks as any process that uses the store does. Opening mends ledger and names."""
    lock = threading.Lock()
    tier = FilesTier(StoreConfig(paths=(path,), kind="files", chunk_bytes=1), lock)
    try:
        with lock:
            for chunk in bad:
                if (row := tier.find(chunk.key)) != NO_ROW:
                    tier.discard(row)
        tier.bury()
    finally:
        tier.close()
