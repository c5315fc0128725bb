"""What Store.record writes, as requests. The format is in docs/FORMAT.md."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from kvtier.errors import InvalidRequest
from kvtier.replay.trace import Trace, make_trace
from kvtier.store.recording import LOOKUPS, MARK, OPERATIONS, VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["MARK", "read"]


class _Request:
    def __init__(self, time: float, keys: list[str], is_get: bool) -> None:
        self.time = time
        self.keys = keys
        self.is_get = is_get  # and no put went on from it yet


def read(path: Path, name: str, head: Any, lines: Iterable[Any]) -> Trace:
    """Requests of a recording. A put that goes on where a get ended is of the same request: its first key
    follows the get's last one in some other operation, or it names the get's keys again before its own.
    """
    if head[MARK] != VERSION:
        raise InvalidRequest(f"{path} is a recording of version {head[MARK]!r}, this kvtier reads {VERSION}")
    records = [_checked(f"{path}, line {number}", value) for number, value in enumerate(lines, 2)]
    before = {key: previous for _, _, keys in records for previous, key in itertools.pairwise(keys)}
    requests: list[_Request] = []
    by_last: dict[str, _Request] = {}
    by_first: dict[str, _Request] = {}
    for operation, time, keys in records:
        if not keys or operation in LOOKUPS:
            continue
        request = None
        if operation == "put":
            request = by_last.get(before.get(keys[0], ""))
            more = keys
            if request is None:
                request = by_first.get(keys[0])
                if request is not None:
                    count = len(request.keys)
                    more = keys[count:]
                    if not request.is_get or keys[:count] != request.keys:
                        request = None
        if request is None:
            request = _Request(time, list(keys), operation != "put")
            requests.append(request)
        else:
            by_last.pop(request.keys[-1], None)
            request.keys += more
            request.is_get = False
        by_first[request.keys[0]] = by_last[request.keys[-1]] = request
    return make_trace(name, ((request.time, list(dict.fromkeys(request.keys))) for request in requests))


def _checked(where: str, value: Any) -> tuple[str, float, list[str]]:
    if isinstance(value, dict) and "end" in value:
        return "end", 0.0, []
    if not isinstance(value, dict):
        value = {}
    operation, time, keys = value.get("op"), value.get("t"), value.get("keys")
    if operation not in OPERATIONS or not isinstance(time, int | float) or not isinstance(keys, list):
        raise InvalidRequest(f"{where} needs op (one of {', '.join(OPERATIONS)}), t and keys")
    if not all(isinstance(key, str) for key in keys):
        raise InvalidRequest(f"{where}: keys needs strings")
    return operation, float(time), keys
