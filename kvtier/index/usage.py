"""What each owner holds of some chunks, over whole columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtier.owner import OwnerName
from kvtier.types import OwnerUsage

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt


def usage(
    tier: str,
    names: Mapping[int, OwnerName],
    now: float,
    *,
    owner: npt.NDArray[np.uint64],
    nbytes: npt.NDArray[np.int64],
    stored_at: npt.NDArray[np.uint32],
    expires_at: npt.NDArray[np.uint32],
) -> list[OwnerUsage]:
    """Totals by owner of n chunks, whose columns have the shape (n,); most bytes first."""
    if not len(owner):
        return []
    order = np.lexsort((stored_at, owner))
    owner, stored_at, expires_at = owner[order], stored_at[order], expires_at[order]
    starts = np.flatnonzero(np.diff(owner, prepend=owner[:1] + np.uint64(1)))
    counts = np.diff(starts, append=len(owner))
    is_over = (expires_at > 0) & (expires_at <= now)
    columns = (
        owner[starts],
        counts,
        np.add.reduceat(nbytes[order], starts),
        stored_at[starts],
        stored_at[starts + counts // 2],
        stored_at[starts + counts - 1],
        np.add.reduceat(is_over.astype(np.int64), starts),
    )
    found = []
    for number, chunks, size, oldest, median, newest, expired in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        name = names.get(number, OwnerName())
        found.append(
            OwnerUsage(
                tier=tier,
                id=number,
                namespace=name.namespace.hex(),
                tenant=name.tenant,
                chunks=chunks,
                nbytes=size,
                oldest=oldest,
                median=median,
                newest=newest,
                expired=expired,
            )
        )
    return sorted(found, key=lambda usage: (-usage.nbytes, usage.id))
