"""`kvtier verify PATH`: read and check every chunk of a store."""

from __future__ import annotations

import os
import sys
from pathlib import Path  # noqa: TC003  the command line reads the types

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvtier.cli.sizes import size
from kvtier.config import StoreConfig
from kvtier.errors import IncompatibleStore
from kvtier.io import open_engine
from kvtier.tiers.slab import inspection
from kvtier.tiers.slab.directory import lock_directory


def verify(path: Path) -> None:
    """Read every chunk of the store in PATH and check it. Exit code 1 if anything is bad.

    The store must not be in use. Nothing is changed; opening the store forgets what is bad.

    Parameters
    ----------
    path
        The store's directory.
    """
    if not path.is_dir():
        raise IncompatibleStore(f"{path} is not a directory, so it holds no store")
    console = Console()
    inspection.inspect(path)  # before the lock, which would make a file in what is no store
    lock = lock_directory(path)
    found = inspection.inspect(path)
    engine = open_engine(StoreConfig(path=path))
    bad = []
    try:
        columns = (TextColumn("verifying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("", total=len(found.recovered.chunks))
            for count, wrong in inspection.verify(found, engine):
                bad += wrong
                progress.advance(task, count)
    finally:
        engine.close(10)
        os.close(lock)
    for fault in found.faults:
        console.print(f"[red]bad:[/] {fault}")
    for chunk in bad:
        console.print(
            f"[red]bad:[/] chunk {chunk.key.hex()} at byte {chunk.offset} of the slab: {chunk.reason}",
            soft_wrap=True,
        )
    sound = len(found.recovered.chunks) - len(bad)
    total = size(int(found.recovered.chunks["payload_bytes"].sum()))
    console.print(f"{sound} of {len(found.recovered.chunks)} chunks ({total} in all) are sound")
    if bad or found.faults:
        sys.exit(1)
