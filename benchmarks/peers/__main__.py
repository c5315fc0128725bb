"""`python -m benchmarks.peers`, in a checkout."""

from __future__ import annotations

import os
import shlex
import sys

if sys.path[0] == os.getcwd():
    sys.path.append(sys.path.pop(0))  # an installed kvtier has its native core, the sources here do not

import datetime
import json as json_format
from contextlib import ExitStack
from pathlib import Path  # noqa: TC003  the command line reads the types
from typing import Annotated

from cyclopts import App, Parameter

import kvtier
from benchmarks.peers.registry import Environments, chosen
from benchmarks.peers.rounds import measure, start_peers
from kvtier.cli.bench import report
from kvtier.cli.bench.data import Amount, Data
from kvtier.cli.bench.options import check
from kvtier.cli.bench.place import open_place
from kvtier.errors import InvalidRequest, KVTierError
from kvtier.testing.profiles import profile

_COLUMNS = {
    "gb_s": "GB/s", "fraction_of_fio": "of fio", "uring_times": "uring x", "cpu_s_per_gb": "CPU s/GB",
    "p50_ms": "p50 ms", "p99_ms": "p99 ms", "cold": "cold",
}  # fmt: skip

app = App(name="python -m benchmarks.peers", help="Cold reads through kvtier and its peers, side by side.")


@app.default
def run(
    *,
    path: Path | None = None,
    device: str | None = None,
    gib: float = 0.5,
    chunk_mib: float = 2.0,
    peer: Annotated[list[str] | None, Parameter(negative="")] = None,
    envs: Path | None = None,
    rounds: int = 5,
    seed: int = 0,
    json: Path | None = None,
) -> None:
    """Store the same bytes through every peer that is installed, and read them cold, in turns.

    Every round runs all of them once, in an order of its own, and the first is discarded. Figures are
    medians, and fractions and multiples medians of each round's ratio. GB are 10**9 bytes. CPU is of the
    whole process that reads. A peer hands over no latencies of single chunks, so it has none.

    Parameters
    ----------
    path
        Directory on the device to measure. Default: a temporary one.
    device
        Profile of an emulated device to mount for this run, such as prototype-4ms.
    gib
        GiB per pass, 32 chunks or more: what reads on 16 or 32 threads has a file for each then. The
        device holds it seven times, memory five times.
    chunk_mib
        MiB per chunk.
    peer
        Peers to measure; repeat it for several. Default: all.
    envs
        Where their environments are. Default: ~/.cache/kvtier/peers.
    rounds
        Rounds that count.
    seed
        Draws the order of each round.
    json
        File to write the figures to, for benchmarks/results.py.
    """
    amount = Amount.of(gib, chunk_mib)
    check(rounds, json)
    if device is not None and profile(device).devices != 1:
        raise InvalidRequest(f"--device {device} has {profile(device).devices} devices: peers take only one")
    peers = chosen(peer or [])
    copies = sum(each.copies for each in peers)

    def needed(directories: int) -> int:
        return amount.on_disk(directories) + copies * amount.nbytes

    with (
        open_place([path] if path else [], device, needed) as place,
        ExitStack() as stack,
    ):
        with report.progress(2 * amount.chunks) as step:
            data = Data(place.directories, amount, lambda: step("writing the chunks"))
        running, absent = start_peers(peers, Environments.at(envs), data, place, stack)
        figures = measure(data, amount.memory(), place, running, rounds, seed)
    figures["absent"] |= absent
    title = f"cold reads, {gib:g} GiB in chunks of {chunk_mib:g} MiB, {place.description}"
    wrong = [row["name"] for row in figures["rows"] if row["verified"] is False]
    notes = [f"{name} gave back other bytes than were stored" for name in wrong]
    report.show(title, figures["rows"], _COLUMNS, figures["absent"], notes)
    if json is not None:
        found = {
            "bench": "peers",
            "kvtier": kvtier.__version__,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": report.machine(place.description),
            "command": shlex.join(["python", "-m", "benchmarks.peers", *sys.argv[1:]]),
            "peers": {each.name: each.package for each in peers},
            "gib": gib, "chunk_mib": chunk_mib, "rounds": rounds, "seed": seed,
            **figures,
        }  # fmt: skip
        json.write_text(json_format.dumps(found, indent=2) + "\n")


@app.command
def install(*peers: str, envs: Path | None = None) -> None:
    """Make the environments of these peers, or of all: 1 to 2 GB each, mostly torch.

    Parameters
    ----------
    peers
        Their names.
    envs
        Where to make them. Default: ~/.cache/kvtier/peers.
    """
    environments = Environments.at(envs)
    for each in chosen(peers):
        environments.install(each)
        print(f"{each.package}: {environments.python(each)}")


if __name__ == "__main__":
    try:
        app()
    except KVTierError as error:
        sys.exit(f"{error}")
