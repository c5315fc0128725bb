"""Input files of plans, whole ones, as tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.plan import accounting, inputs

if TYPE_CHECKING:
    from kvtier.plan.sheet import Sheet


def tables(*tiers: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    """A plan that gives everything, with a setup `s` of these tiers, or of one."""
    disk = {"name": "disk", "size": "1 TB", "bandwidth": "6 GB/s", "hit_rate": 0.9, "price": 20_000,
            "lifetime": "4 year", "power": "100 W"}  # fmt: skip
    whole: dict[str, Any] = {
        "version": 1,
        "model": {"layers": 62, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"},
        "workload": {
            "prompt_tokens": 30_000, "output_tokens": 500, "tpot": "20 ms", "requests_per_day": 50_000,
            "target_throughput": 1000, "concurrency": [1, 8, 32],
        },
        "prefill": {"speed": "4 ktoken/s"},
        "machine": {"price_per_hour": 20, "power": "6 kW"},
        "money": {"token_price": "4 USD/Mtoken", "electricity": 0.1},
        "setup": [{"name": "s", "tier": list(tiers) or [disk]}],
    }  # fmt: skip
    for name, section in sections.items():
        whole[name] = {**whole[name], **section}
    return whole


def work_out(whole: dict[str, Any], directory: Path = Path()) -> Sheet:
    """The sheet of such a plan."""
    return accounting.work_out(inputs.build(whole, directory))
