"""A worker for the tests: a file per chunk, read by itself, out of memory, and with a byte changed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks/peers/workers"))

from serve import Chunks, Way, serve


class Files:
    """Read file by file, with the seconds of each."""

    def __init__(self, chunks: Chunks) -> None:
        self._files = [chunks.directory / f"chunk-{number}" for number in range(len(chunks.sources))]
        self.found: list[bytearray] = []
        for number, payload in chunks.payloads():
            self._files[number].write_bytes(payload)

    def prepare(self) -> None:
        self.found = []

    def load(self) -> list[float] | None:
        seconds = []
        for file in self._files:
            start = time.perf_counter()
            self.found.append(bytearray(file.read_bytes()))
            seconds.append(time.perf_counter() - start)
        return seconds

    def buffers(self) -> list[memoryview]:
        return [memoryview(found) for found in self.found]

    def release(self) -> None:
        self.found = []


class Remembered(Files):
    """Reads nothing."""

    def __init__(self, chunks: Chunks) -> None:
        self._payloads = [payload for _, payload in chunks.payloads()]

    def load(self) -> None:
        self.found = [bytearray(payload) for payload in self._payloads]


class Garbled(Files):
    """Changes the last chunk."""

    def load(self) -> None:
        super().load()
        self.found[-1][-1] ^= 1


def make(chunks: Chunks) -> dict[str, Way]:
    print("a peer says whatever it likes")
    files = Files(chunks)
    return {"plain-files": files, "plain-remembered": Remembered(chunks), "plain-garbled": Garbled(chunks)}


if __name__ == "__main__":
    serve(make)
