"""Recording: what a store is asked for, written to a file as it comes. docs/FORMAT.md has the format."""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import os
import threading
import time
import zlib
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TypeAlias

from kvtier.errors import InvalidRequest, TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from kvtier.types import ChunkKey

_log = logging.getLogger(__name__)

VERSION = 1
MARK = "kvtier_trace"
"""What the first line has; its value is the version."""
Operation: TypeAlias = Literal["get", "put", "match", "pin", "prefetch"]
OPERATIONS = ("get", "put", "match", "pin", "prefetch")
LOOKUPS = ("match", "pin", "prefetch")
"""Those that use nothing: they tell which key follows which."""
_MOST_KEYS = 1 << 18
"""Keys that may wait to be written; what comes when there are so many is dropped, and counted."""
_PAUSE = 0.1
_KEY_BYTES = 8
_GZIP = 16 + zlib.MAX_WBITS


class Recording:
    """A trace in the making: `Store.record` makes it. A context manager; thread-safe.

    Keys are hashed with a secret that is drawn for the recording and kept nowhere. Whatever goes wrong ends
    the recording, never a call of the store: `error` says what it was.
    """

    def __init__(self, path: Path, mode: int) -> None:
        """Create `path`, gzipped if its name ends in `.gz`.

        Raises InvalidRequest if it exists, TierUnavailable if it cannot be created.
        """
        self.path = path
        self.dropped = 0
        """Operations that came faster than they could be written."""
        self.error: OSError | None = None
        """What ended the recording early."""
        self._queue: deque[tuple[float, Operation, Sequence[ChunkKey], int]] = deque()
        self._queued = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._owner = os.getpid()
        self._secret = os.urandom(16)
        self._start = time.monotonic()
        self._compressor = zlib.compressobj(wbits=_GZIP) if path.suffix == ".gz" else None
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        except FileExistsError:
            raise InvalidRequest(f"{path} exists: give the recording a new name") from None
        except OSError as error:
            raise TierUnavailable(f"cannot create {path}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name="kvtier-record", daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """Whether it takes nothing any more."""
        return self._closed.is_set()

    def note(self, operation: Operation, keys: Sequence[ChunkKey], nbytes: int = 0) -> None:
        """Queue an operation, or drop it. `nbytes` of all its chunks, if they are known."""
        if self._closed.is_set() or not keys:
            return
        with self._lock:
            if self._queued + len(keys) > _MOST_KEYS:
                self.dropped += 1
                return
            self._queued += len(keys)
            self._queue.append((time.monotonic() - self._start, operation, keys, nbytes))

    def close(self, timeout: float = 10.0) -> None:
        """Write what was queued, for at most `timeout` seconds, and end the recording. Idempotent."""
        if self._owner != os.getpid():
            return  # the parent's
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        try:
            self._write([{MARK: VERSION, "started": now, "key_bytes": _KEY_BYTES}])
            while not self._closed.wait(_PAUSE):
                self._write_queued()
            self._write_queued()
            self._write([{"end": round(time.monotonic() - self._start, 6), "dropped": self.dropped}])
            if self._compressor is not None:
                self._write_all(self._compressor.flush())
        except OSError as error:
            self.error = error
            self._closed.set()
            _log.warning("%s: the recording ended early: %s", self.path, error)
        finally:
            os.close(self._fd)
            self._queue.clear()

    def _write_queued(self) -> None:
        while self._queue:
            seconds, operation, keys, nbytes = self._queue.popleft()
            line = {"t": round(seconds, 6), "op": operation, "keys": [self._hashed(key) for key in keys]}
            if nbytes:
                line["bytes"] = nbytes
            with self._lock:
                self._queued -= len(keys)
            self._write([line])

    def _hashed(self, key: ChunkKey) -> str:
        return hashlib.blake2b(key, digest_size=_KEY_BYTES, key=self._secret).hexdigest()

    def _write(self, lines: Sequence[object]) -> None:
        data = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
        self._write_all(self._compressor.compress(data) if self._compressor is not None else data)

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]


def record(path: str | os.PathLike[str], mode: int) -> Recording:
    """A recording in a file, whose directory must be there. Raises what Recording raises."""
    file = Path(path)
    if not file.absolute().parent.is_dir():
        raise InvalidRequest(f"{file}: there is no directory {file.absolute().parent}")
    return Recording(file, mode)
