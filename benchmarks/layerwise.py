"""Time to the first token when a prefix is restored layer by layer beside the model, and before it.

    python benchmarks/layerwise.py [--tokens 2048] [--suffix 512] [--chunk-tokens 256] [--json FILE]

The demo's model restores a prefix of `--tokens` from an emulated device and computes the `--suffix` behind
it. The device is made so fast that reading takes as long as computing, then half and twice as long. Every
trial opens the store anew, so that nothing is in DRAM; the trials of a round are in random order. "load" is
`restore`, "compute" the `prefill` behind it, "in turn" both in a row, "by layer" `restore_and_prefill`. The
logits of both ways must be equal to the bit, and the tokens generated, too.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

import kvtier
from kvtier.cli._demo.model import TEXT, find_model, load_model, load_tokenizer, prompt_ids
from kvtier.integrations.hf import PrefixCache, kv_layout
from kvtier.testing.emulated import EmulatedDevice
from kvtier.testing.profiles import DeviceProfile

LATENCY = 2e-3
NEW_TOKENS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of a transformers model (default: the demo's)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--tokens", type=int, default=2048, help="of the prefix, a multiple of --chunk-tokens"
    )
    parser.add_argument("--suffix", type=int, default=512)
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = find_model(args.model, print)
    model = load_model(folder, args.dtype)
    prompt = prompt_ids(load_tokenizer(folder), TEXT.read_text(encoding="utf-8"), args.tokens + args.suffix)
    ids = torch.tensor([prompt])
    prefix = ids[:, : args.tokens]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prefix, cache=cache, use_cache=True, logits_to_keep=1)
    compute = statistics.median(computing(model, ids, cache) for _ in range(3))
    chunk_bytes = kv_layout(model, chunk_tokens=args.chunk_tokens).chunk_bytes
    nbytes = args.tokens // args.chunk_tokens * chunk_bytes
    rows = [
        measure(model, ids, prefix, cache, share, args.chunk_tokens, compute * share, args.rounds)
        for share in (1.0, 0.5, 2.0)
    ]
    title = f"{args.tokens} tokens restored ({nbytes / 1e6:.0f} MB), {args.suffix} computed, ms"
    columns = (
        "load",
        "compute",
        "in turn",
        "by layer",
        "of the longer",
        "sooner by",
        "identical",
    )
    table = Table("device", *columns, title=title)
    for row in rows:
        times = [f"{row[name] * 1e3:,.0f}" for name in columns[:4]]
        ratios = [f"{row['of the longer']:.2f}", f"{row['sooner by']:.0%}", str(row["identical"])]
        table.add_row(f"{row['MB/s']:.0f} MB/s", *times, *ratios)
    Console().print(table)
    if args.json is not None:
        args.json.write_text(json.dumps({"title": title, "rows": rows}, indent=2) + "\n")


def computing(model: Any, ids: Any, cache: DynamicCache) -> float:
    """Seconds for the suffix, behind a prefix that is there."""
    held = cache.get_seq_length()
    start = time.perf_counter()
    with torch.no_grad():
        model(ids[:, held:], cache=cache, use_cache=True, logits_to_keep=1)
    seconds = time.perf_counter() - start
    cache.crop(held - cache.get_seq_length())
    return seconds


def measure(
    model: Any,
    ids: Any,
    prefix: Any,
    cache: DynamicCache,
    share: float,
    chunk_tokens: int,
    reading: float,
    rounds: int,
) -> dict[str, Any]:
    """Medians over the rounds with a device on which reading takes `reading` seconds."""
    chunk_bytes = kv_layout(model, chunk_tokens=chunk_tokens).chunk_bytes
    nbytes = prefix.shape[1] // chunk_tokens * chunk_bytes
    rate = round(nbytes / reading)
    profile = DeviceProfile(
        name=f"reads-{share:g}",
        read_latency=LATENCY,
        read_bandwidth=rate,
        max_in_flight=64,
    )
    found: dict[str, list[float]] = {name: [] for name in ("load", "compute", "in turn", "by layer")}
    identical = True
    with EmulatedDevice(profile, size="1GiB") as device:
        settings = {
            **{"capacity": 2 * nbytes + (64 << 20), "dram": 3 * nbytes, "chunk_bytes": chunk_bytes},
            "get_timeout": 600,
        }

        def opened() -> Any:
            store = kvtier.open(device.paths[0] / "store", **settings)
            store._core.wait_until_populated(60)
            return store

        with opened() as store:
            saved = PrefixCache(model, store, chunk_tokens=chunk_tokens).save(prefix, cache, until="disk")
            assert saved.result(600).ok
        for _ in range(rounds):
            logits = {}
            for way in random.sample(["in turn", "by layer"], 2):
                gc.collect()
                with opened() as store:
                    prefix_cache = PrefixCache(model, store, chunk_tokens=chunk_tokens)
                    start = time.perf_counter()
                    if way == "by layer":
                        logits[way], _, restored = prefix_cache.restore_and_prefill(ids)
                    else:
                        held, restored = prefix_cache.restore(ids)
                        found["load"].append(time.perf_counter() - start)
                        logits[way] = prefix_cache.prefill(ids, held)
                        found["compute"].append(time.perf_counter() - start - found["load"][-1])
                    found[way].append(time.perf_counter() - start)
                    if restored != prefix.shape[1]:
                        raise SystemExit(
                            f"only {restored} tokens came: the store takes a device of {rate / 1e6:.1f} MB/s "
                            "for one that hangs; lower --suffix, or wait until the machine is idle"
                        )
            identical = identical and torch.equal(*logits.values())
        with opened() as store:
            prefix_cache = PrefixCache(model, store, chunk_tokens=chunk_tokens)
            options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
            by_layer = prefix_cache.generate(ids, **options)
            held, _ = prefix_cache.restore(ids)
            plain = model.generate(ids, cache=held, attention_mask=torch.ones_like(ids), **options)
            identical = identical and torch.equal(by_layer, plain)
    medians = {name: float(np.median(times)) for name, times in found.items()}
    return {
        "share": share,
        "MB/s": profile.read_bandwidth / 1e6,
        **medians,
        "of the longer": medians["by layer"] / max(medians["load"], medians["compute"]),
        "sooner by": 1 - medians["by layer"] / medians["in turn"],
        "identical": identical,
        "all": found,
    }


if __name__ == "__main__":
    main()
