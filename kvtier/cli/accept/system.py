"""What was measured on, well enough to do it again."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import kvtier
from kvtier import _native
from kvtier.cli.bench import report
from kvtier.cli.bench.place import mount_of
from kvtier.cli.bench.recovery.counters import statistics_of
from kvtier.cli.sizes import size
from kvtier.io import uring_obstacle
from kvtier.testing.emulated import device_stats

_PACKAGES = ("numpy", "xxhash", "torch", "transformers", "lz4")


def describe(directory: Path) -> dict[str, Any]:
    """The machine, its software, and the file system and device below `directory`."""
    machine = report.machine(str(directory))
    return {
        "cpu": machine["cpu"],
        "cores": machine["cores"],
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gib": machine["memory_gib"],
        "kernel": machine["kernel"],
        "operating_system": _operating_system(),
        "huge_pages": _read(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "directory": str(directory),
        "file_system": _file_system(directory),
        "device": _device(directory),
        "kvtier": kvtier.__version__,
        "native": _native.core.features() if _native.core is not None else f"no: {_native.why_not}",
        "engine": "uring" if not uring_obstacle() else f"threads ({uring_obstacle()})",
        "python": machine["python"],
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def _file_system(directory: Path) -> dict[str, str]:
    source, mount, kind, options = mount_of(directory)
    try:
        disk = os.statvfs(directory)
    except OSError as error:
        return {"type": kind, "source": source, "unreadable": error.strerror or str(error)}
    return {
        "type": kind,
        "source": source,
        "mount": mount,
        "options": options,
        "size": size(disk.f_blocks * disk.f_frsize),
        "free_at_start": size(disk.f_bavail * disk.f_frsize),
    }


def _device(directory: Path) -> dict[str, Any]:
    """The block device's own words, or the emulated device's name."""
    if (stats := device_stats(directory)) is not None:
        return {"emulated": stats.name, "size": size(stats.capacity)}
    statistics = statistics_of(directory)
    if statistics is None:
        return {"none": "no block device is seen below this file system"}
    block = statistics.resolve().parent
    if (block / "partition").exists():
        block = block.parent
    names = {
        "model": "device/model", "firmware": "device/firmware_rev", "rotational": "queue/rotational",
        "scheduler": "queue/scheduler", "logical_block": "queue/logical_block_size",
        "physical_block": "queue/physical_block_size", "write_cache": "queue/write_cache",
    }  # fmt: skip
    found = {name: _read(block / file) for name, file in names.items()}
    sectors = _read(block / "size")
    return {
        "name": block.name,
        **({"size": size(512 * int(sectors))} if sectors.isdigit() else {}),
        **{name: value for name, value in found.items() if value},
    }


def _operating_system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _read(file: Path) -> str:
    try:
        return " ".join(file.read_text().split())
    except OSError:
        return ""
