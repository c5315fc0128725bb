"""Emulated storage devices: in memory, through the real system calls, with a device's timing and faults.

with EmulatedDevice("nvmeof-4", size="2GiB") as device:
    with kvtier.open(device.paths[0], capacity="1GiB") as store:
        device.inject(Fault(op="read", errno=errno.EIO, file="slab", count=1))
        ...
    print(device.stats()[0].read_bytes)
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvtier.errors import InvalidRequest, TierUnavailable
from kvtier.testing.build import build, obstacle
from kvtier.testing.mount import Mount
from kvtier.testing.profiles import DeviceProfile, profile

if TYPE_CHECKING:
    from types import TracebackType

    from kvtier.testing.faults import Fault

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@dataclass(frozen=True, slots=True)
class FaultStats:
    """One rule's counts: requests that it was meant for, and those that it struck."""

    id: int
    matched: int
    hits: int


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """One device's own counters since its start, or since they were reset. Sizes are in bytes."""

    name: str
    capacity: int
    used: int
    reads: int
    read_bytes: int
    writes: int
    written_bytes: int
    syncs: int
    outstanding: int  # requests that arrived and are not yet answered, now
    max_outstanding: int
    max_in_flight: int  # requests that the device served at once, never more than the profile allows
    hanging: int  # requests that a fault holds, now
    faults_injected: int
    faults: tuple[FaultStats, ...]


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault in force."""

    id: int
    _mounts: tuple[Mount, ...]

    @property
    def hits(self) -> int:
        """How many requests it has struck, over its devices."""
        rules = (rule for mount in self._mounts for rule in _parse(mount.stats()).faults)
        return sum(rule.hits for rule in rules if rule.id == self.id)

    def remove(self) -> None:
        """End the fault, and let go of what hangs."""
        for mount in self._mounts:
            mount.obey(f"remove\nid={self.id}")


class EmulatedDevice:
    """The devices of a profile, each mounted at one of `paths` until `close`.

    `size` is each device's capacity, as bytes or as text like "2GiB"; their files live in `memory`, a
    directory on tmpfs. `seed` draws the jitter. The devices end with this process, however it ends.

    Raises TierUnavailable where FUSE cannot be had or memory is short, InvalidRequest for wrong arguments.
    """

    def __init__(
        self,
        profile_or_name: DeviceProfile | str = "instant",
        *,
        size: int | str = "1GiB",
        seed: int = 0,
        memory: Path | str = "/dev/shm",
    ) -> None:
        given = profile_or_name
        self.profile = given if isinstance(given, DeviceProfile) else profile(given)
        self.size = _bytes(size)
        if reason := obstacle():
            raise TierUnavailable(f"cannot emulate a device: {reason}")
        _check_room(Path(memory), self.size * self.profile.devices)
        binary = build()
        self._folder = Path(tempfile.mkdtemp(prefix="kvtier-emulated-", dir=memory))
        self._mounts: list[Mount] = []
        self._numbers = itertools.count(1)
        self._close = weakref.finalize(self, _end, self._mounts, self._folder, os.getpid())
        try:
            for i in range(self.profile.devices):
                self._mounts.append(self._mount(binary, i, seed + i))
        except BaseException:
            self.close()
            raise

    def _mount(self, binary: Path, i: int, seed: int) -> Mount:
        name = f"{self.profile.name}-{i}"
        fields = {"name": name, "capacity": self.size, "seed": seed, **self.profile.fields}
        return Mount(binary, self._folder / name, self.backing_path(i), fields)

    @property
    def paths(self) -> list[Path]:
        """Where the devices are mounted."""
        return [mount.path for mount in self._mounts]

    def backing_path(self, device: int) -> Path:
        """The directory under a device: what is stored, free of timing, counters and faults."""
        return self._folder / f"backing-{device}"

    def stats(self) -> list[DeviceStats]:
        """Every device's counters. Raises OSError for a device that was aborted."""
        return [_parse(mount.stats()) for mount in self._mounts]

    def reset_stats(self) -> None:
        """Set the counters to zero, those of the faults included."""
        self._tell("reset")

    def inject(self, fault: Fault, *, device: int | None = None) -> InjectedFault:
        """Put a fault in force on one device, or on all of them."""
        number = next(self._numbers)
        self._tell(fault.command(number), device)
        return InjectedFault(number, tuple(self._chosen(device)))

    def clear_faults(self) -> None:
        """End all faults, and let go of what hangs."""
        self._tell("remove")

    def release_hangs(self) -> None:
        """Let go of what hangs now; the faults stay."""
        self._tell("release")

    def abort(self, *, device: int | None = None) -> None:
        """Let a device vanish for good: everything on it fails with ECONNABORTED or ENOTCONN."""
        for mount in self._chosen(device):
            mount.abort()

    def detach(self, *, device: int | None = None) -> None:
        """Take a device's mount away (`umount -l`): open files go on working, its path is empty for good.

        Faults and counters are out of reach from then on. Raises OSError.
        """
        for mount in self._chosen(device):
            mount.detach()

    def close(self) -> None:
        """Unmount, and free the memory; whatever still runs there fails. May be called again."""
        self._close()

    def _chosen(self, device: int | None) -> list[Mount]:
        return self._mounts if device is None else [self._mounts[device]]

    def _tell(self, command: str, device: int | None = None) -> None:
        for mount in self._chosen(device):
            mount.obey(command)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def device_stats(path: Path | str) -> DeviceStats | None:
    """The counters of the emulated device that holds `path`, also from another process; None elsewhere."""
    resolved = Path(path).resolve()
    for folder in (resolved, *resolved.parents):
        stats = folder / ".kvtier/stats"
        if os.path.ismount(folder):
            return _parse(stats.read_text()) if stats.exists() else None
    return None


def _parse(text: str) -> DeviceStats:
    fields: dict[str, Any] = json.loads(text)
    return DeviceStats(**{**fields, "faults": tuple(FaultStats(**rule) for rule in fields["faults"])})


def _bytes(size: int | str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(|KiB|MiB|GiB|TiB)", str(size))
    nbytes = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if nbytes < 4096:
        raise InvalidRequest(f'size is {size!r}, but must be at least 4096 bytes, such as "2GiB"')
    return nbytes


def _check_room(memory: Path, needed: int) -> None:
    disk = os.statvfs(memory)
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    room = min(disk.f_bavail * disk.f_frsize, available)
    if needed > room:
        raise TierUnavailable(
            f"the emulated devices may take {needed >> 20} MiB, but {memory} has {room >> 20} MiB: "
            "choose a smaller size"
        )


def _end(mounts: list[Mount], folder: Path, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child: the devices are its parent's
    for mount in mounts:
        mount.stop()
    shutil.rmtree(folder, ignore_errors=True)
