"""Builds the emulated device's file system from its C sources, once per machine and version."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from kvtier.errors import TierUnavailable

_SOURCES = Path(__file__).parent / "fuse"
_FLAGS = [
    "-std=c11",
    "-O2",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-D_GNU_SOURCE",
    "-DFUSE_USE_VERSION=312",
    "-pthread",
]
_HEADERS = "libfuse 3 with its headers (apt-get install libfuse3-dev, dnf install fuse3-devel)"


def obstacle() -> str | None:
    """What keeps this machine from emulating devices and how to mend it; None if nothing is known to."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return (
            "/dev/fuse is missing or closed to this user (modprobe fuse; in a container: --device /dev/fuse)"
        )
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        return "fusermount3 is missing, and only root mounts without it (apt-get install fuse3)"
    return None


def build() -> Path:
    """The device's executable, compiled now if this machine does not have it yet.

    Raises TierUnavailable, naming what is missing.
    """
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise TierUnavailable("emulated devices need a C compiler (apt-get install gcc libc6-dev)")
    command = [compiler, *_FLAGS, *_libfuse()]
    sources = sorted(_SOURCES.glob("*.[ch]"))
    binary = _cache() / f"emulated-device-{_digest(command, sources)}"
    if not binary.exists():
        _compile(command, [source for source in sources if source.suffix == ".c"], binary)
    return binary


def _libfuse() -> list[str]:
    """Compiler arguments for libfuse, also where pkg-config is not installed."""
    if shutil.which("pkg-config"):
        found = _run(["pkg-config", "--cflags", "--libs", "fuse3"])
        if found.returncode == 0:
            return found.stdout.split()
    return ["-I/usr/include/fuse3", "-lfuse3"]


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier"


def _digest(command: list[str], sources: list[Path]) -> str:
    digest = hashlib.sha256(_run([command[0], "--version"]).stdout.encode())
    digest.update("\0".join(command).encode())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(command: list[str], sources: list[Path], binary: Path) -> None:
    try:
        binary.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=binary.parent, prefix="build-") as folder:
            made = Path(folder) / binary.name
            # Libraries come after the sources that need them.
            done = _run([command[0], *map(str, sources), "-o", str(made), *command[1:]])
            if done.returncode != 0:
                raise TierUnavailable(_explain(done.stderr))
            made.replace(binary)  # at once: another process may be building the same
    except OSError as error:
        raise TierUnavailable(f"cannot build the emulated device in {binary.parent}: {error}") from error


def _explain(errors: str) -> str:
    if "fuse_lowlevel.h" in errors or "-lfuse3" in errors:
        return f"emulated devices need {_HEADERS}"
    return f"cannot compile the emulated device:\n{errors[-2000:]}"


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)
