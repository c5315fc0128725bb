"""G1, arrival: is it as large, as sound and as fast as it was said to be?"""

from __future__ import annotations

import mmap
import os
import shutil
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvtier.cli.accept.health import BLOCK, Blocks, Pass
from kvtier.cli.accept.verdict import FLAG, Check, at_least, at_most
from kvtier.cli.bench.place import drop_cache
from kvtier.tiers.slab.directory import SLAB, open_slab

if TYPE_CHECKING:
    from pathlib import Path

    from kvtier.cli.accept.context import Context


def run(context: Context) -> tuple[list[Check], dict[str, Any]]:
    """Reserve the capacity, and write and read blocks spread over it."""
    figures = context.state.step("G1.device", lambda: _measure(context))
    plan, limits = context.plan, context.plan.limits
    part = 1 - limits.tolerance

    def stated(rate: float | None) -> tuple[float | None, str]:
        if rate is None:
            return None, "nothing was stated"
        return rate * part, f"{rate:g} GB/s stated, {limits.tolerance:.0%} tolerated"

    read_limit, read_note = stated(limits.stated_read_gb_s)
    write_limit, write_note = stated(limits.stated_write_gb_s)
    bad = figures["bad"]
    said = "; ".join(f"{count} times {words}" for words, count in figures["said"].items())
    checks = [
        at_least("free space", figures["free"] / 1e9, plan.capacity / 1e9, "GB", "against --capacity"),
        at_least("capacity reserved", float(figures["reserved"]), 1.0 if limits.must_reserve else None, FLAG,
                 figures["reserve_error"] or "by the file system, for the whole capacity"),
        at_most("alignment of direct reads", figures["alignment"], limits.alignment, "B", figures["direct"]),
        at_least("data verified", figures["verified"] / 1e9, figures["asked"] / 1e9, "GB",
                 f"blocks of 1 MiB over all {plan.capacity / 1e9:.3g} GB"),
        at_most("errors", bad["errors"], 0, "", said),
        at_most("wrong blocks", bad["wrong"], 0),
        at_most("hung requests", bad["hung"], 0),
        at_least("read", figures["read_gb_s"], read_limit, "GB/s", read_note),
        at_least("write", figures["write_gb_s"], write_limit, "GB/s", write_note),
    ]  # fmt: skip
    return checks, figures


def _measure(context: Context) -> dict[str, Any]:
    plan, folder = context.plan, context.folder("health")
    context.say("reserving the capacity")
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    reserve_error = ""
    try:
        fd, direct, reserved = open_slab(folder, plan.capacity)
    except OSError as error:
        reserve_error = error.strerror or str(error)
        # Whatever there is can still be looked at, block by block.
        fd, direct, reserved = *open_slab(folder, BLOCK)[:2], False
        os.ftruncate(fd, plan.capacity)
    try:
        context.say("writing and reading back")
        blocks = Blocks(fd, plan.capacity, max(2, plan.health_bytes // BLOCK), plan.seed,
                        patience=context.patience)  # fmt: skip
        passes = written, compared, read = _passes(blocks, folder / SLAB, direct=direct)
        is_hung = any(each.hung for each in passes)
        alignment = _alignment(fd) if direct and not is_hung else None
    except BaseException:
        os.close(fd)
        raise
    if not is_hung:
        os.close(fd)
        shutil.rmtree(folder)
    bad = {name: sum(getattr(each, name) for each in passes) for name in ("errors", "wrong", "hung")}
    return {
        "free": free,
        "reserved": reserved,
        "reserve_error": reserve_error,
        "direct": "O_DIRECT works" if direct else "O_DIRECT is refused by the file system",
        "alignment": alignment,
        "asked": len(blocks) * BLOCK,
        "verified": compared.nbytes - compared.wrong * BLOCK,
        "bad": bad,
        "said": dict(sum((Counter(each.said) for each in passes), Counter[str]())),
        "write_gb_s": written.gb_s,
        "read_gb_s": read.gb_s,
        "passes": {
            name: asdict(each) for name, each in zip(("write", "compare", "read"), passes, strict=True)
        },
    }


def _passes(blocks: Blocks, file: Path, *, direct: bool) -> tuple[Pass, Pass, Pass]:
    """Write, compare, and read for the bandwidth; what a hung device would meet again is left out."""
    written = blocks.write()
    if written.hung:
        return written, Pass(), Pass()
    passes = []
    for compare in (True, False):
        if not direct:
            drop_cache(file)
        passes.append(blocks.read(compare=compare))
        if passes[-1].hung:
            break
    compared, read = [*passes, Pass()][:2]
    return written, compared, read


def _alignment(fd: int) -> int | None:
    """The finest offset and length, in bytes, that a direct read can have; None if 4 KiB fails, too."""
    with mmap.mmap(-1, 4096) as page:
        for step in (512, 4096):
            with memoryview(page) as whole, whole[:step] as view:
                try:
                    if os.preadv(fd, [view], step) == step:
                        return step
                except OSError:
                    continue
    return None
