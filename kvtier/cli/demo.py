"""`kvtier demo`: a real prompt's KV is stored, and restored by a new process."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path  # noqa: TC003 (the command line is built from these hints)
from typing import Literal

from rich.console import Console

from kvtier.cli._demo.model import DemoError
from kvtier.errors import KVTierError


def demo(
    *,
    model: Path | None = None,
    text: Path | None = None,
    tokens: int = 4096,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    path: Path | None = None,
    engine: Literal["auto", "uring", "threads"] = "auto",
    json: Path | None = None,
) -> int:
    """Store the KV cache of a real prompt, restart, and restore it from disk instead of computing it.

    Returns 0 if the restored bytes and the generated tokens are identical, 1 if not, 2 if the demo
    could not run.

    Parameters
    ----------
    model
        Directory of a transformers model. Default: SmolLM2-135M-Instruct, fetched once (93 MB).
    text
        File with the prompt's text, its last paragraph a question. Default: an essay on KV caches.
    tokens
        Length of the prompt.
    dtype
        What the model runs in, and the KV is kept in.
    path
        Directory for the store, kept afterwards. Default: a temporary one beside the model.
    engine
        I/O engine of the store.
    json
        File to write the figures to.
    """
    console = Console()
    try:
        from kvtier.cli._demo.run import run

        return run(console, model, text, tokens, dtype, path, engine, json)
    except ImportError as error:
        message = f"the demo needs {error.name}: pip install 'kvtier[demo]'"
    except KVTierError as error:
        message = str(error)
    except OSError as error:
        message = f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
        if error.errno == errno.ENOSPC:
            message += "; free some space, or give a --path on another disk"
    Console(stderr=True, width=shutil.get_terminal_size().columns).print(message, style="red", markup=False)
    return 2


__all__ = ["DemoError", "demo"]
