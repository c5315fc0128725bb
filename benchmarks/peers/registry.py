"""The peers: what each is, which of its ways are measured, and the environment that it runs in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.errors import InvalidRequest, TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_HERE = Path(__file__).parent
_STAMP = "kvtier-pins.txt"  # in an environment: what it was made of, written last


@dataclass(frozen=True, slots=True)
class Peer:
    """A project to compare with: `workers/<name>_worker.py`, with the pins in `requirements/<name>.txt`."""

    name: str
    package: str
    """Installed after its requirements and without its own, most of which only serve GPUs."""
    ways: Mapping[str, str]
    """By row: how it reads. The worker's docstring says which upstream code that follows."""
    copies: int
    """How often its files hold all chunks."""

    @property
    def worker(self) -> Path:
        """The script to run in its environment."""
        return _HERE / "workers" / f"{self.name}_worker.py"

    @property
    def requirements(self) -> Path:
        """The pinned packages that it needs to be imported on a CPU."""
        return _HERE / "requirements" / f"{self.name}.txt"


PEERS = (
    Peer(
        name="lmcache",
        package="lmcache==0.5.6",
        ways={
            "lmcache-disk": "LocalDiskBackend, batched_get_blocking: buffered, 4 threads, the default",
            "lmcache-disk-async": "LocalDiskBackend, batched_get_non_blocking: buffered, the default",
            "lmcache-disk-16": "the same as lmcache-disk, hand-tuned: O_DIRECT, 16 threads",
            "lmcache-mp-fs": "L2 adapter fs: buffered, the default",
            "lmcache-mp-fs-native": "L2 adapter fs_native: buffered, 4 workers, the default",
            "lmcache-mp-fs-native-16": "the same, hand-tuned: O_DIRECT, 16 workers",
        },
        copies=2,
    ),
    Peer(
        name="nixl",
        package="nixl-cu12==1.5.1",
        ways={
            "nixl-posix": "POSIX plugin, O_DIRECT, one transfer for all, the default queue",
            "nixl-posix-uring": "the same with use_uring",
        },
        copies=1,
    ),
    Peer(
        name="sglang",
        package="sglang==0.5.23",
        ways={"sglang-hicachefile": "HiCacheFile.batch_get: buffered, one file after another, the default"},
        copies=1,
    ),
)


def chosen(names: Sequence[str]) -> list[Peer]:
    """The peers of those names, all without any. Raises InvalidRequest for a name that is none."""
    known = {peer.name: peer for peer in PEERS}
    for name in names:
        if name not in known:
            raise InvalidRequest(f"no peer {name!r}; there are {', '.join(known)}")
    return [known[name] for name in names] if names else list(PEERS)


@dataclass(frozen=True, slots=True)
class Environments:
    """A virtual environment per peer, each in the directory of its name under `root`."""

    root: Path

    @classmethod
    def at(cls, root: Path | None) -> Environments:
        """Those under `root`, or in $XDG_CACHE_HOME/kvtier/peers, or ~/.cache/kvtier/peers."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cls(root or cache / "kvtier" / "peers")

    def python(self, peer: Peer) -> Path:
        """The interpreter that runs its worker."""
        return self.root / peer.name / "bin" / "python"

    def obstacle(self, peer: Peer) -> str | None:
        """Why the peer cannot be run, and what to do about it; None if it can."""
        how = f"python -m benchmarks.peers install {peer.name}"
        stamp = self.root / peer.name / _STAMP
        if not stamp.exists():
            return f"not installed in {self.root}: {how}"
        if stamp.read_text() != _pins(peer):
            return f"{self.root / peer.name} was made of other versions: {how}"
        return None

    def install(self, peer: Peer) -> None:
        """Make the environment, in place of the one that is there. Raises TierUnavailable if pip fails."""
        home = self.root / peer.name
        if home.exists() and not (home / "pyvenv.cfg").exists():
            raise InvalidRequest(f"{home} is not a virtual environment: remove it, or choose another --envs")
        shutil.rmtree(home, ignore_errors=True)
        pip = [str(self.python(peer)), "-m", "pip", "install", "--quiet"]
        _run([sys.executable, "-m", "venv", str(home)])
        _run([*pip, "--requirement", str(peer.requirements)])
        _run([*pip, "--no-deps", peer.package])
        (home / _STAMP).write_text(_pins(peer))


def _pins(peer: Peer) -> str:
    return f"{peer.requirements.read_text()}{peer.package}\n"


def _run(command: list[str]) -> None:
    if code := subprocess.run(command, check=False).returncode:
        raise TierUnavailable(f"`{' '.join(command)}` failed with exit status {code}: see above")
