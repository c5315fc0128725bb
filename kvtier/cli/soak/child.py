"""A process that puts chunks and says which are on disk, until it is killed. Its order is JSON on stdin."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from kvtier import Status, StoreConfig
from kvtier.cli.soak.content import Contents, key_of
from kvtier.store.store import Store


def main() -> None:
    """Put until killed."""
    order = json.loads(sys.stdin.readline())
    store = Store(StoreConfig(paths=(Path(order["path"]),), **order["settings"]))
    content = Contents(order["scale"]).content
    number = order["first"]
    while True:
        numbers = list(range(number, number + 4))
        number += 4
        codec = "lz4" if number % 8 else "raw"
        put = store.put(list(map(key_of, numbers)), [content(i) for i in numbers], until="disk", codec=codec)
        status = put.result(30).status.tolist()
        stored = [i for i, s in zip(numbers, status, strict=True) if s == Status.STORED]
        os.write(1, json.dumps(stored).encode() + b"\n")


if __name__ == "__main__":
    main()
