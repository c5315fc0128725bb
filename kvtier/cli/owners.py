"""What operators see of owners: tables and JSON, without a salt or a key in them."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table
from rich.text import Text

from kvtier.cli.ages import age
from kvtier.cli.sizes import size
from kvtier.index.usage import usage
from kvtier.owner import NOBODY

if TYPE_CHECKING:
    from kvtier.owner import OwnerName
    from kvtier.tiers.files import inspection as files
    from kvtier.tiers.slab.inspection import Inspection
    from kvtier.types import OwnerUsage

_HEAD = 8
"""Hex digits of a namespace's public name that people are shown."""


def owners(found: Inspection) -> list[dict[str, Any]]:
    """What each owner holds of a store's disk, most bytes first; times in seconds since 1970."""
    chunks = found.recovered.chunks
    rows = usage(
        "disk", found.recovered.owners, time.time(), owner=chunks["owner"],
        nbytes=chunks["slot_bytes"].astype("i8"), stored_at=chunks["stored_at"],
        expires_at=chunks["expires_at"],
    )  # fmt: skip
    return _rows(rows, found.recovered.owners)


def owners_of_files(found: files.Inspection) -> list[dict[str, Any]]:
    """The same of a directory of kind `files`, where times are those of the last use."""
    chunks = found.chunks
    rows = usage(
        "disk", found.owners, time.time(), owner=np.array([file.owner for file in chunks], np.uint64),
        nbytes=np.array([file.stored_bytes for file in chunks], np.int64),
        stored_at=np.array(found.used_at, np.uint32),
        expires_at=np.array([file.expires_at for file in chunks], np.uint32),
    )  # fmt: skip
    return _rows(rows, found.owners)


def _rows(rows: list[OwnerUsage], names: dict[int, OwnerName]) -> list[dict[str, Any]]:
    return [{**asdict(row), "named": row.id == NOBODY or row.id in names} for row in rows]


def table(rows: list[dict[str, Any]]) -> Table:
    """`owners` for people."""
    shown = Table("tenant", "namespace", "chunks", "bytes", "oldest", "median", "newest", "expired")
    now = time.time()
    for row in rows:
        unnamed = "nobody" if row["id"] == 0 else "" if row["named"] else "unknown"
        shown.add_row(
            Text(row["tenant"] or unnamed), row["namespace"][:_HEAD], str(row["chunks"]), size(row["nbytes"]),
            *(age(now - row[name]) for name in ("oldest", "median", "newest")), str(row["expired"]),
        )  # fmt: skip
    return shown
