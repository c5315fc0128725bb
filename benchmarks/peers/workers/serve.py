"""What every worker shares: it runs in its peer's own environment, and answers the driver in JSON lines.

One request per line on stdin, one reply per line on stdout; whatever else prints goes to stderr.

    {"do": "store", "directory": D, "sources": [file, ...], "sha256": [hex, ...], "chunk_bytes": N}
        makes the ways of the peer to read, and puts every source, a chunk each, through the peer's own
        put path into D. Reply: {"ways": [name, ...]}
    {"do": "load", "way": NAME}
        reads every chunk back through it, once. Reply: {"seconds": wall, "cpu_seconds": of the whole
        process, "latencies": [seconds per chunk] or null, "wrong": how many chunks are not the source}

A request that fails is answered with {"error": text}. The worker ends with its stdin.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import resource
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@dataclass(frozen=True, slots=True)
class Chunks:
    """What is stored: a file per chunk to take it from, and what it must hash to when it comes back."""

    directory: Path
    sources: Sequence[Path]
    sha256: Sequence[str]
    chunk_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks."""
        return len(self.sources) * self.chunk_bytes

    def payloads(self) -> Iterator[tuple[int, bytes]]:
        """Every chunk with its number."""
        for number, source in enumerate(self.sources):
            yield number, source.read_bytes()


class Way(Protocol):
    """One way of a peer to read all chunks, over and over."""

    def prepare(self) -> None:
        """What the peer's engine has done before it reads, untimed: buffers that it would have by then."""

    def load(self) -> Sequence[float] | None:
        """Read all chunks: what is timed. Seconds of each, if the peer tells."""

    def buffers(self) -> Sequence[memoryview]:
        """Where the chunks are now, writable, in order; a chunk that did not come is an empty view."""

    def release(self) -> None:
        """Give the buffers back, untimed."""


def serve(make: Callable[[Chunks], dict[str, Way]]) -> None:
    """Answer requests until stdin ends; `make` stores the chunks, and returns the ways to read them."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    chunks: Chunks | None = None
    ways: dict[str, Way] = {}
    for line in sys.stdin:
        try:
            request = json.loads(line)
            if request.pop("do") == "store":
                chunks = _chunks(request)
                ways = make(chunks)
                reply: dict[str, Any] = {"ways": list(ways)}
            elif chunks is None:
                raise ValueError("nothing was stored yet")
            else:
                reply = measure(ways[request["way"]], chunks)
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def measure(way: Way, chunks: Chunks) -> dict[str, Any]:
    """One pass. The buffers are wiped after it, so that no later pass can find its bytes in them."""
    way.prepare()
    gc.collect()
    cpu, wall = _cpu_seconds(), time.perf_counter()
    latencies = way.load()
    wall, cpu = time.perf_counter() - wall, _cpu_seconds() - cpu
    buffers = way.buffers()
    wrong = abs(len(buffers) - len(chunks.sha256))
    for buffer, expected in zip(buffers, chunks.sha256, strict=False):
        wrong += hashlib.sha256(buffer).hexdigest() != expected
        buffer[:] = bytes(len(buffer))
    way.release()
    return {
        "seconds": wall,
        "cpu_seconds": cpu,
        "latencies": None if latencies is None else list(latencies),
        "wrong": wrong,
    }


def _chunks(request: dict[str, Any]) -> Chunks:
    sources = [Path(source) for source in request["sources"]]
    return Chunks(Path(request["directory"]), sources, request["sha256"], request["chunk_bytes"])


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
