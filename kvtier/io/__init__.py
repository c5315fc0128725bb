"""I/O engines: how bytes move between a slab and memory."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvtier import _native
from kvtier.errors import TierUnavailable

if TYPE_CHECKING:
    from kvtier.config import StoreConfig
    from kvtier.io.base import IOEngine


_log = logging.getLogger(__name__)


def uring_obstacle() -> str:
    """Why io_uring cannot be used here, probed with a real ring; empty if it can."""
    if _native.core is None:
        return f"the native core is missing ({_native.why_not})"
    return str(_native.core.probe_uring())


def open_engine(config: StoreConfig) -> IOEngine:
    """The engine that the settings ask for; `auto` is `uring` where it works, else `threads`.

    Raises TierUnavailable if `uring` or `aio` is asked for and cannot be had.
    """
    if config.engine == "aio":
        return _open_aio(config)
    obstacle = uring_obstacle() if config.engine != "threads" else "not asked for"
    if config.engine == "uring" and obstacle:
        raise TierUnavailable(f"engine is 'uring', but {obstacle}: mend that, or set engine to 'auto'")
    if _native.core is None:
        from kvtier.io.threads import ThreadEngine

        return ThreadEngine(config.io_threads)
    from kvtier.io.native import NativeThreadEngine, UringEngine

    if not obstacle:
        try:
            return UringEngine(depth=config.io_depth, max_bytes=config.io_window)
        except OSError as error:  # the probe's ring fitted, this one does not: the locked-memory limit
            if config.engine == "uring":
                raise TierUnavailable(
                    f"engine is 'uring', but {error}: raise `ulimit -l`, lower io_depth, or set engine "
                    "to 'auto'"
                ) from error
            _log.warning("%s: reading and writing with threads instead", error)
    return NativeThreadEngine(threads=config.io_threads)


def _open_aio(config: StoreConfig) -> IOEngine:
    try:
        from kvtier.io.aio import AioEngine
    except ImportError as error:
        raise TierUnavailable(f"engine is 'aio', but {error}: pip install 'kvtier[aio]'") from error
    return AioEngine(config.io_threads)
