"""Opening a device that may hang, on a thread of its own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from kvtier.errors import TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

T = TypeVar("T")


def open_in_time(path: Path, seconds: float, make: Callable[[], T], close: Callable[[T], object]) -> T:
    """What `make` opens at `path`, or what it raises; TierUnavailable if that takes more than `seconds`.

    What comes later is closed then. Raises RuntimeError if a thread cannot be had.
    """
    made: list[T] = []
    failed: list[BaseException] = []
    lock = threading.Lock()
    late = False

    def run() -> None:
        try:
            result = make()
        except BaseException as error:
            failed.append(error)
            return
        with lock:
            if not late:
                made.append(result)
                return
        close(result)

    thread = threading.Thread(target=run, name="kvtier-open", daemon=True)
    thread.start()
    try:
        thread.join(min(seconds, threading.TIMEOUT_MAX))
    finally:
        with lock:
            late = True
    if made:
        return made[0]
    if failed:
        raise failed[0]
    raise TierUnavailable(
        f"the device of {path} does not answer: opening it took more than {seconds:g} s; see to the device, "
        "leave the path out, or raise open_timeout"
    )
