"""What the devices under some directories delivered, by their own counters, and how caches above go away."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.cli.bench.place import drop_cache, mount_of
from kvtier.testing.emulated import device_stats

if TYPE_CHECKING:
    from collections.abc import Sequence

_SECTOR = 512  # of the kernel's statistics, whatever the device's is
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


class DeviceReads:
    """Bytes read from the devices under `directories`, by whatever process."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._emulated: list[Path] = []
        self._blocks: set[Path] = set()
        self.why_not = "" if directories else "no --path was given"
        """Why nothing is counted, if so."""
        for directory in {path.stat().st_dev: path for path in directories}.values():
            if device_stats(directory) is not None:
                self._emulated.append(directory)
            elif (statistics := statistics_of(directory)) is not None:
                self._blocks.add(statistics)
            else:
                self.why_not = f"{directory} is on no block device and no emulated one"

    def read(self) -> int | None:
        """Bytes so far; None if something there is not counted."""
        if self.why_not:
            return None
        emulated = (device_stats(directory) for directory in self._emulated)
        sectors = (int(statistics.read_text().split()[2]) for statistics in self._blocks)
        return sum(stats.read_bytes for stats in emulated if stats) + _SECTOR * sum(sectors)


def statistics_of(directory: Path) -> Path | None:
    """The kernel's statistics of the block device that holds `directory`; None if it sees none."""
    for number in (directory.stat().st_dev, _source(directory)):
        if number is not None:
            file = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")
            if file.exists():
                return file
    return None


def _source(directory: Path) -> int | None:
    """The device number of what is mounted there, for file systems whose st_dev is no device's."""
    with suppress(OSError):
        return os.stat(mount_of(directory)[0]).st_rdev
    return None


def drop_page_cache(directories: Sequence[Path]) -> str:
    """Have the kernel forget what it read: all of it where permitted, else the files in `directories`.

    Says which, for the report.
    """
    try:
        with _DROP_CACHES.open("w") as all_of_it:
            os.sync()
            all_of_it.write("3\n")
    except OSError as error:
        refused = error.strerror
    else:
        return "page cache dropped"
    if not directories:
        return f"page cache not dropped ({_DROP_CACHES}: {refused}, and no --path)"
    return f"{drop_files(directories)} ({_DROP_CACHES}: {refused})"


def drop_files(directories: Sequence[Path]) -> str:
    """Have the kernel forget the files in `directories`, and say so."""
    files = [file for directory in directories for file in directory.rglob("*") if file.is_file()]
    kept = 0
    for file in files:
        try:
            drop_cache(file)
        except OSError:
            kept += 1
    return f"page cache dropped of {len(files) - kept} of {len(files)} files"
