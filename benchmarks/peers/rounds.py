"""The measure: fio, files, kvtier and the peers, in the same interleaved rounds over the same bytes."""

from __future__ import annotations

import dataclasses
import hashlib
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.worker import Worker
from kvtier.cli.bench import files, fio, fio_reads
from kvtier.cli.bench.measure import Contender, Meter, Sample, interleave, ratio, rows
from kvtier.cli.bench.place import ReadCounter, drop_cache
from kvtier.cli.bench.report import progress
from kvtier.cli.bench.stores import StoreReads, engines
from kvtier.errors import TierUnavailable
from kvtier.testing.emulated import device_stats

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from benchmarks.peers.registry import Environments, Peer
    from kvtier.cli.bench.data import Data
    from kvtier.cli.bench.place import Place

_FILE_ROWS = ("serial", "threads32")
OURS = "kvtier-uring"


class PeerReads:
    """A peer's worker with all chunks in a directory of its own, and the passes of its ways.

    Raises TierUnavailable if the worker does not come up, or does not store the chunks.
    """

    def __init__(self, peer: Peer, data: Data, place: Place, worker: Worker) -> None:
        self._peer = peer
        self._worker = worker
        self._nbytes = data.amount.nbytes
        self._directory = place.directories[0] / peer.name
        self._counter = _WorkerCounter(place, worker.pid)
        self.wrong = dict.fromkeys(peer.ways, 0)
        """By way: chunks that did not come back as they were stored, over all passes."""
        self._directory.mkdir()
        sources = [file.absolute() for file in data.files]
        stored = worker.ask(
            do="store",
            directory=str(self._directory.absolute()),
            sources=[str(source) for source in sources],
            sha256=[hashlib.sha256(source.read_bytes()).hexdigest() for source in sources],
            chunk_bytes=data.amount.chunk_bytes,
        )
        if stored["ways"] != list(peer.ways):
            raise TierUnavailable(f"{peer.worker.name} does not read in the ways that registry.py lists")

    def contenders(self) -> list[Contender]:
        """A row per way."""
        return [Contender(way, partial(self._run, way), detail) for way, detail in self._peer.ways.items()]

    def _run(self, way: str) -> Sample:
        for file in self._directory.rglob("*"):
            if file.is_file():
                drop_cache(file)
        with Meter(self._counter, self._nbytes) as meter:
            reply = self._worker.ask(do="load", way=way)
        self.wrong[way] += reply["wrong"]
        latencies = reply["latencies"] or ()
        return Sample(self._nbytes, reply["seconds"], reply["cpu_seconds"], meter.cold, latencies)


class _WorkerCounter(ReadCounter):
    """Bytes that the device delivered to one worker: an emulated device's own count, or the kernel's."""

    def __init__(self, place: Place, pid: int) -> None:
        self._place = place.counter
        self.slack = place.counter.slack
        self._io = None if device_stats(place.directories[0]) else Path(f"/proc/{pid}/io")

    def read(self) -> int | None:
        """Bytes so far; None where the benchmark's own process cannot count either."""
        found = self._place.read()
        if found is None or self._io is None:
            return found
        lines = self._io.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def start_peers(
    peers: Sequence[Peer], environments: Environments, data: Data, place: Place, stack: ExitStack
) -> tuple[list[PeerReads], dict[str, str]]:
    """The peers with their chunks stored; and by row why one is absent. `stack` ends their workers."""
    found: list[PeerReads] = []
    absent: dict[str, str] = {}
    with progress(len(peers)) as step:
        for peer in peers:
            step(f"storing through {peer.name}")
            reason = environments.obstacle(peer)
            if reason is None:
                try:
                    with ExitStack() as starting:
                        worker = starting.enter_context(Worker(environments.python(peer), peer.worker))
                        found.append(PeerReads(peer, data, place, worker))
                        stack.push(starting.pop_all())
                except TierUnavailable as error:
                    reason = str(error)
            if reason is not None:
                absent |= dict.fromkeys(peer.ways, reason)
    return found, absent


def measure(
    data: Data,
    memory: npt.NDArray[np.uint8],
    place: Place,
    peers: Sequence[PeerReads],
    rounds: int,
    seed: int,
) -> dict[str, Any]:
    """All rounds. Returns `rows`, `absent` and `fio_probe`, as `kvtier bench read` writes them.

    On top, a row has `uring_times`, the median over the rounds of kvtier-uring's bandwidth by its own, and
    `verified`, whether every chunk of every pass was right, None for fio, which checks nothing.
    """
    contenders, absent, probed = _ours(data, memory, place)
    contenders += [contender for peer in peers for contender in peer.contenders()]
    with progress((rounds + 1) * len(contenders)) as step:
        samples = interleave(contenders, rounds, seed, step)
    wrong = {way: count for peer in peers for way, count in peer.wrong.items()}
    found = []
    for row in rows(contenders, samples):
        times = ratio(samples, OURS, row.name) if OURS in samples else None
        verified = None if row.name == "fio" else not wrong.get(row.name)
        found.append({**dataclasses.asdict(row), "uring_times": times, "verified": verified})
    return {"rows": found, "absent": absent, "fio_probe": probed}


def _ours(
    data: Data, memory: npt.NDArray[np.uint8], place: Place
) -> tuple[list[Contender], dict[str, str], list[dict[str, Any]]]:
    """fio at its best, the file-based rows, and kvtier's; why one is absent; what of fio was tried."""
    absent: dict[str, str] = {}
    probed: dict[fio.Way, float] = {}
    contenders = []
    if obstacle := fio.obstacle(data.amount.chunks):
        absent["fio"] = obstacle
    else:
        contender, probed = fio_reads.contender(data, place.counter)
        contenders.append(contender)
    by_files, _ = files.contenders(data, memory, place.counter)
    contenders += [contender for contender in by_files if contender.name in _FILE_ROWS]
    names, missing = engines(["uring", "threads"])
    absent |= {name: reason for name, reason in missing.items() if name != "kvtier-aio"}
    for name in names:
        contenders.append(StoreReads(data, memory, place.counter, engine=name, leased=False).contender())
    return contenders, absent, [{**dataclasses.asdict(way), "gb_s": gb_s} for way, gb_s in probed.items()]
