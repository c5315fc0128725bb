"""What a run has done so far, on disk: a run that was stopped goes on after its last whole step."""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, TypeVar

from kvtier.errors import InvalidRequest, KVTierError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from types import TracebackType

FORMAT, VERSION = "kvtier-accept-state", 1
_T = TypeVar("_T")


class ReportError(KVTierError):
    """The report's directory cannot be used; the message says why and what to do."""


class State:
    """The steps of one run, in `state.json` of the report's directory, which it makes and locks.

    `config` is what must be the same when the run goes on. Raises ReportError for a directory that is in
    use, cannot be written or holds a state of another version, InvalidRequest for one of another `config`.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder = folder
        self._file = folder / "state.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ReportError(f"cannot write the report to {folder}: {error.strerror}") from error
        try:
            self._take_lock()
            given = json.loads(json.dumps(config))
            self._data = self._load(given)
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def is_resumed(self) -> bool:
        """Whether an earlier process did a part."""
        return len(self.runs) > 1

    @property
    def runs(self) -> list[dict[str, Any]]:
        """A record for every process that worked on it, the last one this."""
        runs: list[dict[str, Any]] = self._data["runs"]
        return runs

    def begin(self, run: dict[str, Any]) -> None:
        """Add this process."""
        self.runs.append(run)
        self.save()

    def get(self, name: str) -> Any:
        """What a step came to; None if it is not done."""
        return self._data["steps"].get(name)

    def put(self, name: str, value: Any) -> None:
        """Keep what a step came to, at once."""
        self._data["steps"][name] = value
        self.save()

    def step(self, name: str, run: Callable[[], _T]) -> _T:
        """What a step came to; it is run if no earlier process did. Its outcome is plain data."""
        found = self.get(name)
        if found is None:
            found = run()
            self.put(name, found)
        return found  # type: ignore[no-any-return]

    def save(self) -> None:
        """Write everything, so that either the old or the new is there whenever the process ends."""
        write_whole(self._file, json.dumps(self._data))

    def close(self) -> None:
        """Let another process go on."""
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ReportError(
                f"another run writes to {self.folder}: wait for it, or give another --report"
            ) from error

    def _load(self, config: dict[str, Any]) -> dict[str, Any]:
        fresh = {"format": FORMAT, "version": VERSION, "config": config, "runs": [], "steps": {}}
        try:
            data = json.loads(self._file.read_text())
        except FileNotFoundError:
            return fresh
        except (OSError, ValueError) as error:
            raise ReportError(f"{self._file} cannot be read ({error}): give another --report") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
            raise ReportError(
                f"{self._file} is no state of version {VERSION} of an acceptance run: give another --report"
            )
        if differing := _differences(data["config"], config):
            raise InvalidRequest(
                f"{self.folder} holds a run with other settings ({differing}): "
                "give the same to go on with it, or another --report to begin anew"
            )
        return data


def write_whole(file: Path, text: str) -> None:
    """Put `text` in place of what `file` held, at once. Raises ReportError."""
    temporary = file.with_name(f".{file.name}.new")
    try:
        with temporary.open("w") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(file)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise ReportError(f"cannot write {file}: {error.strerror}") from error


def _differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return "; ".join(f"{name} was {old.get(name)!r} and is {new.get(name)!r}" for name in names)
