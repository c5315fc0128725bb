"""Another process with a store open, which does what a test tells it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from small_stores import SMALL

WORKER = Path(__file__).with_name("sharing_worker.py")


class Process:
    """Another process with a store open."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.send([str(path), {**SMALL, "kind": "files", **settings}])
        self.receive()

    def send(self, order: list[Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process is gone"
        return json.loads(line)

    def start(self, name: str, *arguments: Any) -> None:
        self.send([name, arguments])

    def do(self, name: str, *arguments: Any) -> Any:
        self.start(name, *arguments)
        return self.receive()

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(30) == 0
        assert self._process.stdout is not None
        self._process.stdout.close()

    def kill(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(30)
