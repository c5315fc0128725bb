"""The driver's end of a peer's worker: `workers/serve.py` tells what is said."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from typing import TYPE_CHECKING, Any, Self

from kvtier.errors import TierUnavailable

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

_WORDS = 400  # of a worker's last words, in characters


class Worker:
    """A running worker. `ask` and `close` are for one thread at a time.

    `timeout` is the seconds that a reply may take; a worker that takes longer is ended. Raises
    TierUnavailable if it cannot be started.
    """

    def __init__(self, python: Path, script: Path, *, timeout: float = 600.0) -> None:
        self._name = script.stem
        self._timeout = timeout
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  `close` closes it
        self._unread = b""
        # The worker is to import from its own environment, and nothing of ours.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        try:
            self._process = subprocess.Popen(
                [str(python), str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                env=environment,
            )
        except OSError as error:
            self._errors.close()
            raise TierUnavailable(f"cannot start {python}: {error.strerror}") from error

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request, and wait for its reply. Raises TierUnavailable with the worker's own words."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise self._ended() from None
        reply: dict[str, Any] = json.loads(self._line())
        if "error" in reply:
            raise TierUnavailable(f"{self._name}: {reply['error']}")
        return reply

    def close(self) -> None:
        """End the worker, by force if it does not end by itself. May be called again."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        until = time.monotonic() + self._timeout
        while b"\n" not in self._unread:
            if not select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                self._process.kill()
                raise TierUnavailable(f"{self._name} did not answer within {self._timeout:g} s")
            some = self._process.stdout.read(1 << 16)
            if not some:
                raise self._ended()
            self._unread += some
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def _ended(self) -> TierUnavailable:
        code = self._process.wait()
        self._errors.seek(0)
        words = " ".join(self._errors.read().decode(errors="replace").split())[-_WORDS:]
        return TierUnavailable(f"{self._name} ended with exit status {code}: {words}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
