"""The demo's second process: load the model, open the store, restore from disk, go on.

Run as `python -m kvtier.cli._demo.worker JOB.json`. Writes `result.json` and `logits.npy` beside it,
and says on stdout what it is doing.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from kvtier.cli._demo.model import load_model
from kvtier.cli._demo.steps import (
    CHUNK_TOKENS,
    Job,
    device_bytes_read,
    drop_page_cache,
    first_token,
    go_on,
    warm_up,
)
from kvtier.errors import KVTierError
from kvtier.integrations.hf import PrefixCache, weights_digest


def main(job: Job) -> None:
    """Do what the module says."""
    folder = Path(job.folder)
    torch.set_num_threads(job.threads)
    print("loading the model", flush=True)
    model = load_model(Path(job.model), job.dtype)
    weights_digest(model)
    warm_up(model)
    ids = torch.from_numpy(np.load(folder / "ids.npy")).unsqueeze(0)
    drop_page_cache(Path(job.store))
    print("restoring from disk", flush=True)

    before = device_bytes_read()
    began = time.perf_counter()
    with job.open_store() as store:
        prefix_cache = PrefixCache(model, store, chunk_tokens=CHUNK_TOKENS)
        start, cache, logits = first_token(model, prefix_cache, ids, began, restore=True)
        device_bytes = device_bytes_read() - before
        stats = store.stats()
        np.save(folder / "logits.npy", go_on(model, cache, start, logits))
    result = {"start": asdict(start), "device_bytes": device_bytes, "stats": stats}
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    try:
        main(Job.read(Path(sys.argv[1])))
    except KVTierError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
