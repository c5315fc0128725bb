"""The checks of `kvtier doctor`, each a question put to the real thing."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import mmap
import os
import resource
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier import _native
from kvtier.cli.sizes import size
from kvtier.io import uring_obstacle
from kvtier.tiers.files.inspection import is_of_files
from kvtier.tiers.slab.directory import JOURNAL, open_slab

if TYPE_CHECKING:
    from collections.abc import Iterator

_INTEGRATIONS = {"torch": "kvtier[demo]", "transformers": "kvtier[demo]", "aiofiles": "kvtier[aio]"}


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    ok: bool
    found: str
    advice: str = ""

    def report(self) -> dict[str, Any]:
        """The line as JSON, without its name."""
        fields = asdict(self)
        del fields["name"]
        return fields


def check_all(path: Path | None) -> list[Check]:
    """Every check; those of a file system only with a `path`, which need not exist yet."""
    checks = [_native_core(), _uring(), _engine(), _huge_pages(), _locked_memory(), _cuda()]
    checks += _integrations()
    if path is not None:
        checks += _file_system(path)
    return checks


def _native_core() -> Check:
    if _native.core is None:
        return Check(
            "native core",
            False,
            _native.why_not,
            "install a C++ compiler and reinstall kvtier; without it everything works at more CPU per byte",
        )
    features = ", ".join(f"{name} {value}" for name, value in _native.core.features().items())
    return Check("native core", True, features)


def _uring() -> Check:
    obstacle = uring_obstacle()
    if not obstacle:
        return Check("io_uring", True, "a ring works")
    return Check(
        "io_uring",
        False,
        obstacle,
        "build with liburing (Debian: liburing-dev); allow io_uring in the container's seccomp profile "
        "and in kernel.io_uring_disabled",
    )


def _engine() -> Check:
    name = "uring" if not uring_obstacle() else "threads"
    kind = "native" if _native.core else "Python"
    return Check("engine for 'auto'", True, f"{name} ({kind})")


def _huge_pages() -> Check:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    try:
        modes = setting.read_text().split()
    except OSError:
        return Check(
            "huge pages", False, f"{setting} is not there", "use a kernel with transparent huge pages"
        )
    chosen = next((mode.strip("[]") for mode in modes if mode.startswith("[")), "unknown")
    advice = "" if chosen != "never" else f"echo madvise > {setting}: it halves the CPU per byte read"
    return Check("huge pages", chosen != "never", f"transparent huge pages: {chosen}", advice)


def _locked_memory() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or os.geteuid() == 0:
        return Check("locked memory", True, "no limit for this user")
    return Check(
        "locked memory",
        False,
        f"limit {size(soft)}",
        "raise `ulimit -l` to the DRAM tier's size, or arenas are read into unregistered (twice the CPU)",
    )


def _cuda() -> Check:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int()
        error = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    except OSError:
        return Check("CUDA", False, "no driver (libcuda.so.1)", "only needed for tensors on a GPU")
    if error or count.value == 0:
        return Check("CUDA", False, f"driver present, no usable device (error {error})", "see nvidia-smi")
    return Check("CUDA", True, f"{count.value} devices")


def _integrations() -> Iterator[Check]:
    for package, extra in _INTEGRATIONS.items():
        if importlib.util.find_spec(package) is None:
            yield Check(package, False, "not installed", f"pip install '{extra}'")
        else:
            yield Check(package, True, importlib.metadata.version(package))


def _file_system(path: Path) -> Iterator[Check]:
    existing = path
    while not existing.exists():
        existing = existing.parent
    if path.is_dir():
        yield _kind(path)
    disk = os.statvfs(existing)
    yield Check("free space", True, f"{size(disk.f_bavail * disk.f_frsize)} below {existing}")
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield Check(
            "writable", False, f"{existing} cannot be written", "choose another directory or mend permissions"
        )
        return
    with tempfile.TemporaryDirectory(prefix=".kvtier-doctor-", dir=existing) as directory:
        try:
            fd, direct, reserved = open_slab(Path(directory), 1 << 20)
        except OSError as error:
            yield Check("writable", False, f"{existing}: {error.strerror}", "see the message")
            return
        try:
            yield Check("writable", True, str(existing))
            yield _direct(fd, direct)
        finally:
            os.close(fd)
        yield Check(
            "reservation",
            reserved,
            "the file system holds the space" if reserved else "the file system cannot reserve space",
            "" if reserved else "a full file system refuses puts (`no_space`): leave room for the capacity",
        )


def _kind(path: Path) -> Check:
    if is_of_files(path):
        return Check("store", True, "of kind 'files': open it with kind='files'")
    return Check("store", True, "of kind 'slab'" if (path / JOURNAL).exists() else "none yet")


def _direct(fd: int, direct: bool) -> Check:
    advice = "reads go through the page cache, at up to ten times the CPU: use ext4 or XFS"
    if not direct:
        return Check("O_DIRECT", False, "refused by the file system", advice)
    with mmap.mmap(-1, 4096) as page:
        try:
            os.preadv(fd, [page], 0)
        except OSError as error:
            return Check("O_DIRECT", False, f"opens, but reading 4 KiB fails: {error.strerror}", advice)
    return Check("O_DIRECT", True, "4 KiB reads work")
