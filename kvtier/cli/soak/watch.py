"""What must not grow: memory, descriptors, threads; and what must be back when all is quiet."""

from __future__ import annotations

import os
import statistics
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

WARM_UP = 0.2
"""The first part of a run, in which caches fill; it is not judged."""
MEMORY_TOLERANCE = 0.05
MEMORY_SLACK = 8 << 20
"""The last third may take so much more memory than the first: a part of it, and so many bytes."""


@dataclass(frozen=True)
class Sample:
    """What this process takes, at one instant of a run."""

    seconds: float
    rss: int  # bytes
    descriptors: int
    threads: int


def sample(seconds: float) -> Sample:
    """What it takes now, `seconds` after the run began."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Sample(seconds, resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))


def left_behind(path: Path) -> list[str]:
    """Threads and descriptors of a store that is closed."""
    found = [f"thread {t.name}" for t in threading.enumerate() if t.name.startswith("kvtier-")]
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue  # the listing's own
        if target.startswith(f"{path}/"):
            found.append(f"descriptor of {target}")
    return found


@dataclass(frozen=True)
class Trend:
    """One figure in the first and in the last third of what is judged."""

    first: float
    last: float
    most: float

    @property
    def is_flat(self) -> bool:
        """Whether the last is no more than it may be."""
        return self.last <= self.most


def trends(samples: list[Sample]) -> dict[str, Trend]:
    """Medians of memory and descriptors and threads, and the most that the last may be. Empty if too few."""
    judged = samples[int(len(samples) * WARM_UP) :]
    third = len(judged) // 3
    if third < 2:
        return {}
    found = {}
    for name in ("rss", "descriptors", "threads"):
        first, last = (
            statistics.median(asdict(s)[name] for s in some) for some in (judged[:third], judged[-third:])
        )
        most = first * (1 + MEMORY_TOLERANCE) + MEMORY_SLACK if name == "rss" else first
        found[name] = Trend(first, last, most)
    return found
