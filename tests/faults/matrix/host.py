"""A process with a store, which ends without closing it, is interrupted, or has a clock that steps.

Arguments: the store's directory, its kind and engine, `put` or `get`, the deadline in seconds, and which of
the three: `exits`, `interrupted`, `misled`. Prints "begun" when the call is under way, then what became of
it.
"""

from __future__ import annotations

import signal
import sys
import time

import numpy as np

import kvtier
from kvtier import Reason, Status
from small_stores import CHUNK, SMALL, numbered_key, random_payload

path, kind, engine, moment, timeout, how = sys.argv[1:]
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started this may have ignored it
store = kvtier.open(path, kind=kind, engine=engine, **{**SMALL, "dram": 0})
chunks = range(100, 104) if moment == "put" else range(4)
keys = [numbered_key(i) for i in chunks]
targets = np.zeros((len(keys), CHUNK), np.uint8)
start = time.monotonic()
if moment == "put":
    transfer = store.put(keys, [random_payload(i) for i in chunks], until="disk", timeout=float(timeout))
else:
    transfer = store.get(keys, into=targets, timeout=float(timeout))
try:
    print("begun", flush=True)  # from here on it may be interrupted
    result = None if how == "exits" else transfer.result(float(timeout) + 1)
except KeyboardInterrupt:
    print("interrupted")
if how == "interrupted":
    store.close()
if how == "misled":
    assert result is not None
    for status, reason in zip(result.status.tolist(), result.reason.tolist(), strict=True):
        print(Status(status).name.lower(), Reason(reason).name.lower())
    if time.monotonic() - start < float(timeout):
        print("too early")
    if abs(time.time() - time.time()) < 3600:
        print("the clock does not step")
    store.close()
else:
    print("exited")
