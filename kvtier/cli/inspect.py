"""`kvtier inspect PATH`: what a store's files hold, without opening it."""

from __future__ import annotations

import json
import sys
from pathlib import Path  # noqa: TC003  the command line reads the types
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from kvtier.cli.sizes import size
from kvtier.format import FORMAT_VERSION
from kvtier.tiers.slab import inspection

if TYPE_CHECKING:
    from kvtier.tiers.slab.inspection import Inspection


def inspect(path: Path, *, json_output: Annotated[bool, Parameter(name="--json")] = False) -> None:
    """Show what the store in PATH holds. Reads its journal only; the store may be in use.

    Parameters
    ----------
    path
        The store's directory.
    json_output
        Print JSON instead of tables.
    """
    found = inspection.inspect(path)
    report = _report(found)
    if json_output:
        json.dump(report, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    console = Console()
    table = Table(title=f"kvtier store in {path}", show_header=False)
    for name, value in report.items():
        if name not in ("slots", "faults"):
            shown = size(value) if "bytes" in name or name == "capacity" else str(value)
            table.add_row(name.replace("_", " "), shown)
    console.print(table)
    slots = Table("slot size", "extents", "chunks", "payload")
    for row in report["slots"]:
        slots.add_row(
            size(row["slot_bytes"]), str(row["extents"]), str(row["chunks"]), size(row["payload_bytes"])
        )
    console.print(slots)
    for fault in report["faults"]:
        console.print(f"[red]bad:[/] {fault}")


def _report(found: Inspection) -> dict[str, Any]:
    header, recovered = found.header, found.recovered
    chunks = recovered.chunks
    sizes = chunks["slot_bytes"]
    return {
        "format_version": FORMAT_VERSION,
        "slab_id": header.slab_id.hex(),
        "capacity": header.capacity,
        "bytes_on_disk": found.bytes_on_disk,
        "extent_bytes": header.extent_bytes,
        "part_bytes": header.part_bytes,
        "chunks": len(chunks),
        "payload_bytes": int(chunks["payload_bytes"].sum()),
        "journal_records": recovered.records,
        "journal_records_damaged": recovered.damaged,
        "chunks_dropped": recovered.dropped,
        "next_generation": recovered.next_generation,
        "slots": [
            {
                "slot_bytes": slot_bytes,
                "extents": int((recovered.slot_bytes == slot_bytes).sum()),
                "chunks": int((sizes == slot_bytes).sum()),
                "payload_bytes": int(chunks["payload_bytes"][sizes == slot_bytes].sum()),
            }
            for slot_bytes in np.unique(sizes).tolist()
        ],
        "faults": found.faults,
    }
