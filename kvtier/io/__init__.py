"""I/O engines: how bytes move between a slab and memory."""

from __future__ import annotations

import errno
import logging
import time
from typing import TYPE_CHECKING

from kvtier import _native
from kvtier.errors import TierUnavailable
from kvtier.io.window import MOST_BYTES

if TYPE_CHECKING:
    from kvtier.config import StoreConfig
    from kvtier.io.base import IOEngine


_log = logging.getLogger(__name__)
_RING_PATIENCE = 0.5  # seconds


def uring_obstacle() -> str:
    """Why io_uring cannot be used here, probed with a real ring; empty if it can."""
    if _native.core is None:
        return f"the native core is missing ({_native.why_not})"
    return str(_native.core.probe_uring())


def open_engine(config: StoreConfig) -> IOEngine:
    """The engine that the settings ask for; `auto` is `uring` where it works, else `threads`.

    Raises TierUnavailable if `uring` or `aio` is asked for and cannot be had, or the system refuses a
    descriptor.
    """
    try:
        return _open(config)
    except OSError as error:
        raise TierUnavailable(
            f"cannot start the I/O engine ({error}): raise the limit it names, such as `ulimit -n`"
        ) from error


def _open(config: StoreConfig) -> IOEngine:
    if config.engine == "aio":
        return _open_aio(config)
    obstacle = uring_obstacle() if config.engine != "threads" else "not asked for"
    if config.engine == "uring" and obstacle:
        raise TierUnavailable(f"engine is 'uring', but {obstacle}: mend that, or set engine to 'auto'")
    if _native.core is None:
        from kvtier.io.threads import ThreadEngine

        return ThreadEngine(config.io_threads)
    from kvtier.io.native import NativeThreadEngine

    if not obstacle:
        try:
            return _open_uring(config)
        except OSError as error:  # the probe's ring fitted, this one does not: the locked-memory limit
            if config.engine == "uring":
                raise TierUnavailable(
                    f"engine is 'uring', but {error}: raise `ulimit -l`, lower io_depth, or set engine "
                    "to 'auto'"
                ) from error
            _log.warning("%s: reading and writing with threads instead", error)
    return NativeThreadEngine(threads=config.io_threads)


def _open_uring(config: StoreConfig) -> IOEngine:
    """The kernel lets go of a closed ring's locked memory a moment later, so a refusal may not last."""
    from kvtier.io.native import UringEngine

    end = time.monotonic() + _RING_PATIENCE
    while True:
        try:
            return UringEngine(depth=config.io_depth, max_bytes=config.io_window or MOST_BYTES)
        except OSError as error:
            if error.errno != errno.ENOMEM or time.monotonic() > end:
                raise
            time.sleep(_RING_PATIENCE / 20)


def _open_aio(config: StoreConfig) -> IOEngine:
    try:
        from kvtier.io.aio import AioEngine
    except ImportError as error:
        raise TierUnavailable(f"engine is 'aio', but {error}: pip install 'kvtier[aio]'") from error
    return AioEngine(config.io_threads)
