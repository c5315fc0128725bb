"""Scripts with a store of their own, run in another process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

PROLOGUE = """
import os, sys, threading, time
import numpy as np, kvtier
path = sys.argv[1]
def key(i): return i.to_bytes(32, "little")
def payload(i): return np.full(65536, i, np.uint8)
def open(**more):
    settings = dict(capacity="8MiB", dram="1MiB", landing="1MiB", chunk_bytes="64KiB", io_threads=2)
    return kvtier.open(path, **{**settings, **more})
"""


def script(body: str, *args: object, wrapper: tuple[str, ...] = (), **kwargs: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*wrapper, sys.executable, "-P", "-c", PROLOGUE + textwrap.dedent(body), *map(str, args)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs,
    )  # fmt: skip


def run(body: str, *args: object, **kwargs: Any) -> str:
    """What a script prints; it must end well, in time, and without a word on stderr."""
    with script(body, *args, **kwargs) as process:
        try:
            out, err = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert (process.returncode, err) == (0, ""), out + err
    return out
