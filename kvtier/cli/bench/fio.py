"""fio, where it is installed: the most that a device gives anyone."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvtier.cli.bench.measure import Sample
from kvtier.errors import TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

_MISSING = "fio is not installed: apt-get install fio"
_MIB = 1 << 20
_OPEN_FILES = 128  # per job
_MOST_NAMES = 4000  # characters that an option of fio takes
_AGAIN = 4  # of the fastest ways to try a second time: one lucky pass proves nothing
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Have fio's buffers on transparent huge pages, as everyone's here: small pages cost it up to a third."""
_POINTS = (
    ("psync", 1), ("psync", 16), ("psync", 32),
    ("io_uring", 8), ("io_uring", 32), ("io_uring", 64),
    ("libaio", 16), ("libaio", 32),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Way:
    """How to ask: `depth` requests of `block` bytes in flight per directory, as jobs for psync."""

    engine: str
    depth: int
    block: int

    def __str__(self) -> str:
        unit = "jobs" if self.engine == "psync" else "deep"
        return f"{self.engine}, {self.block / _MIB:g} MiB, {self.depth} {unit}"


@dataclass(frozen=True, slots=True)
class Job:
    """Files in one directory, and what is done with them."""

    directory: Path
    names: tuple[str, ...]


def is_installed() -> bool:
    """Whether there is a fio to run."""
    return shutil.which("fio") is not None


def obstacle(chunks: int, directories: int = 1) -> str:
    """Why fio cannot read that many chunks, a file each; empty if it can."""
    if not is_installed():
        return _MISSING
    if sum(len(str(i)) + 1 for i in range(0, chunks, directories)) > _MOST_NAMES:
        return f"fio cannot be told of {chunks} files: ask for fewer or larger chunks"
    return ""


def version() -> str | None:
    """What fio calls itself, such as "fio-3.33"."""
    if not is_installed():
        return None
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=False).stdout.strip()


def ways(chunk_bytes: int, most: int) -> Iterator[Way]:
    """What to try: requests of 1 MiB, and of a chunk up to 4 MiB; no more jobs than `most`."""
    for block in sorted({min(_MIB, chunk_bytes), min(4 * _MIB, chunk_bytes)}):
        for engine, depth in _POINTS:
            if engine != "psync" or depth <= most:
                yield Way(engine, depth, block)


def best(
    candidates: Sequence[Way], run: Callable[[Way], Sample], on_pass: Callable[[str], object]
) -> tuple[Way, dict[Way, float]]:
    """The fastest of the candidates by the mean of two passes, and GB/s of them all."""
    found: dict[Way, float] = {}
    for way in candidates:
        on_pass(f"fio {way}")
        found[way] = run(way).gb_s
    fastest = sorted(candidates, key=found.__getitem__, reverse=True)[:_AGAIN]
    for way in fastest:
        on_pass(f"fio {way}")
        found[way] = statistics.mean((found[way], run(way).gb_s))
    return max(fastest, key=found.__getitem__), found


def passes(candidates: Sequence[Way]) -> int:
    """How many passes `best` takes."""
    return len(candidates) + min(_AGAIN, len(candidates))


def split(directories: Sequence[Path], names: Sequence[Sequence[str]], way: Way) -> list[Job]:
    """Jobs over the files of each directory: one, or for psync one per request in flight."""
    jobs = []
    for directory, own in zip(directories, names, strict=True):
        count = min(way.depth, len(own)) if way.engine == "psync" else 1
        jobs += [Job(directory, tuple(own[i::count])) for i in range(count)]
    return jobs


def run(kind: Literal["read", "randwrite"], way: Way, jobs: Sequence[Job]) -> Sample:
    """One pass of fio, O_DIRECT, over every byte of the files. `cold` is left to the caller.

    Raises TierUnavailable with fio's own words if it fails.
    """
    command = [
        "fio", "--output-format=json+", "--thread", "--direct=1", f"--rw={kind}", f"--bs={way.block}",
        f"--ioengine={way.engine}", f"--iodepth={1 if way.engine == 'psync' else way.depth}",
        "--file_service_type=sequential", f"--openfiles={_OPEN_FILES}", "--allow_file_create=0",
        *(["--end_fsync=1"] if kind == "randwrite" else []),
    ]  # fmt: skip
    for i, job in enumerate(jobs):
        escaped = str(job.directory).replace(":", r"\:")
        command += [f"--name=job{i}", f"--directory={escaped}", f"--filename={':'.join(job.names)}"]
    environment = {**os.environ, **_HUGE_PAGES}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TierUnavailable(f"fio ({way}) failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return _sample(json.loads(done.stdout[done.stdout.index("{") :]), "read" if kind == "read" else "write")


def _sample(report: dict[str, Any], direction: str) -> Sample:
    jobs = report["jobs"]
    cpu = sum((job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3 for job in jobs)
    latencies = [
        int(nanoseconds) / 1e9
        for job in jobs
        for nanoseconds, count in job[direction]["clat_ns"].get("bins", {}).items()
        for _ in range(count)
    ]
    return Sample(
        nbytes=sum(job[direction]["io_bytes"] for job in jobs),
        wall_s=max(job[direction]["runtime"] for job in jobs) / 1e3,
        cpu_s=cpu,
        latencies_s=latencies,
    )
