"""`kvtier demo`: a real prompt's KV is stored, and restored by a new process."""

from __future__ import annotations

import errno
from pathlib import Path  # noqa: TC003 (the command line is built from these hints)
from typing import Literal

from rich.console import Console

from kvtier.cli._demo.model import DemoError


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

    Returns 0 if the restored bytes and the generated tokens are identical, else 1. Raises a
    KVTierError, which says what to do, if the demo cannot run.

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
    try:
        from kvtier.cli._demo.run import run

        return run(Console(), model, text, tokens, dtype, path, engine, json)
    except ImportError as error:
        raise DemoError(f"the demo needs {error.name}: pip install 'kvtier[demo]'") from error
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        hint = "; free some space, or give a --path on another disk" if error.errno == errno.ENOSPC else ""
        raise DemoError(f"{error.strerror or error}{where}{hint}") from error
