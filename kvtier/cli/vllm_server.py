"""What a running vLLM says of kvtier on /metrics, in words: whether it stores and hits, and why not."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.cli.checks import Check
from kvtier.integrations.vllm.settings import CHUNK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator

_TIMEOUT = 10.0
_MOST_BYTES = 16 << 20
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:\\.|[^"\\])*)"')
_MANY = 0.1
"""Part of what was offered that may be refused before it is worth a word."""
_BAD_LOADS = {
    "checksum": "the disk returned other bytes than were written: kvtier verify PATH --repair, and see dmesg",
    "short_read": "the slab was cut off by somebody: kvtier verify PATH --repair",
    "io_error": "the device fails: see dmesg, and move `paths` to another one",
    "deadline": "the device hangs or is overloaded: see iostat -x, and what else uses it",
    "tier_down": "the device failed or hung and is not asked for a while: see vLLM's log and dmesg",
}
_REFUSED = {
    "no_space": "raise `capacity`, or free space on the file system",
    "admission": "raise `endurance` or leave it out, or `admission` (second-touch stores what is put twice)",
    "queue_full": "the disk is slower than prefill: add a path on another device, or raise max_queued_chunks",
    "shed": "the disk is slower than prefill: add a path on another device",
    "quota": "raise the tenant's part in `quotas`",
    "io_error": "the device fails: see dmesg, and move `paths` to another one",
    "deadline": "the device hangs or is overloaded: see iostat -x, and what else uses it",
    "tier_down": "the device failed or hung and is not asked for a while: see vLLM's log and dmesg",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One number of a page of metrics."""

    name: str
    labels: dict[str, str]
    value: float


class Metrics:
    """A page in the text format of Prometheus. Counters are known with and without `_total`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples = [sample for line in text.splitlines() if (sample := _parse(line)) is not None]

    def select(self, name: str, **labels: str) -> list[Sample]:
        """All samples of that name which have these labels."""
        return [
            sample for sample in self.samples
            if sample.name in (name, f"{name}_total") and labels.items() <= sample.labels.items()
        ]  # fmt: skip

    def total(self, name: str, **labels: str) -> float:
        """Their sum, over engines and all other labels."""
        return sum(sample.value for sample in self.select(name, **labels))

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """The same for each value of a label, without those that are 0."""
        sums: dict[str, float] = {}
        for sample in self.select(name, **labels):
            key = sample.labels.get(label, "")
            sums[key] = sums.get(key, 0.0) + sample.value
        return {key: value for key, value in sums.items() if value}


def _parse(line: str) -> Sample | None:
    if line.startswith("#") or not (match := _SAMPLE.match(line)):
        return None
    try:
        value = float(match[3])
    except ValueError:
        return None
    return Sample(match[1], dict(_LABEL.findall(match[2] or "")), value)


def check_server(url: str) -> list[Check]:
    """What the server at `url`, such as http://localhost:8000, says."""
    address = url.rstrip("/").removesuffix("/v1").removesuffix("/metrics")
    if "://" not in address:
        address = f"http://{address}"
    try:
        with urllib.request.urlopen(f"{address}/metrics", timeout=_TIMEOUT) as response:
            text = response.read(_MOST_BYTES).decode(errors="replace")
    except (OSError, ValueError, http.client.HTTPException) as error:
        found = f"{address}/metrics does not answer: {getattr(error, 'reason', None) or error}"
        return [Check("server", False, found, "give the address that vLLM listens on, as in its log")]
    metrics = Metrics(text)
    if not metrics.samples or "vllm:" not in text:
        found = f"{address}/metrics has none of vLLM's metrics"
        return [
            Check("server", False, found, "give the address of vLLM itself; leave out --disable-log-stats")
        ]
    return [Check("server", True, address), *_engine(metrics), *_kvtier(metrics)]


def _engine(metrics: Metrics) -> Iterator[Check]:
    configs = [sample.labels for sample in metrics.select("vllm:cache_config_info")]
    if any(config.get("enable_prefix_caching") == "False" for config in configs):
        yield Check("prefix caching", False, "off: there are no block hashes to find KV by",
                    "start vLLM without --no-enable-prefix-caching")  # fmt: skip
    elif configs:
        yield Check("prefix caching", True, "on")
    algorithm = configs[0].get("prefix_caching_hash_algo", "") if configs else ""
    if algorithm.startswith("xxhash"):
        yield Check(
            "block hashes", False, f"{algorithm}: they start from a random seed in each process",
            "use --prefix-caching-hash-algo sha256, or start with the same PYTHONHASHSEED",
        )  # fmt: skip
    elif algorithm:
        yield Check("block hashes", True, f"{algorithm}: the same after a restart")


def _kvtier(metrics: Metrics) -> Iterator[Check]:
    if "vllm:kvtier_" not in metrics.text:
        yield Check(
            "kvtier", False, "this server runs without it", "start it with the --kv-transfer-config below"
        )
        return
    yield Check("kvtier", True, "on")
    prompts = metrics.total("vllm:request_prompt_tokens_count")
    if not prompts:
        yield Check("prompts", False, "none has been served since it started", "send some; then ask again")
        return
    yield _prompts(metrics, prompts)
    puts = metrics.by("outcome", "vllm:kvtier_chunks", operation="put")
    yield _stores(puts)
    yield from _refusals(puts)
    gets = metrics.by("outcome", "vllm:kvtier_chunks", operation="get")
    yield _hits(metrics, gets)
    for reason, advice in _BAD_LOADS.items():
        if count := gets.get(reason):
            yield Check(f"loads: {reason}", False, f"{count:.0f} chunks were recomputed", advice)
    yield from _decisions(metrics)


def _prompts(metrics: Metrics, prompts: float) -> Check:
    sizes = [int(sample.value) for sample in metrics.select("vllm:kvtier_chunk_tokens")]
    chunk = max(sizes, default=CHUNK_TOKENS)
    mean = metrics.total("vllm:request_prompt_tokens_sum") / prompts
    short = 0.0
    bounds = metrics.by("le", "vllm:request_prompt_tokens_bucket")
    for bound, count in bounds.items():
        if float(bound) <= chunk:
            short = max(short, count)
    found = f"{prompts:.0f}, {mean:.0f} tokens on average"
    if short < prompts / 2:
        return Check("prompts", True, found)
    return Check(
        "prompts", False, f"{found}; {short / prompts:.0%} are shorter than a chunk of {chunk} tokens",
        "only whole chunks are stored: set `chunk_tokens` to less, a multiple of vLLM's block size",
    )  # fmt: skip


def _stores(puts: dict[str, float]) -> Check:
    stored, known = puts.get("stored", 0.0), puts.get("known", 0.0)
    if stored or known:
        return Check("stores", True, f"{stored:.0f} chunks, and {known:.0f} that were there already")
    refused = sum(count for reason, count in puts.items() if reason in _REFUSED)
    if refused:
        return Check("stores", False, "nothing: all was refused", "see the reasons below")
    return Check(
        "stores", False, "nothing, and nothing was refused",
        f"send prompts of more than a chunk ({CHUNK_TOKENS} tokens unless set), and look into vLLM's log",
    )  # fmt: skip


def _refusals(puts: dict[str, float]) -> Iterator[Check]:
    offered = sum(puts.values())
    for reason, advice in _REFUSED.items():
        if count := puts.get(reason):
            found = f"{count:.0f} chunks, {count / offered:.0%} of all"
            yield Check(f"refused: {reason}", count < _MANY * offered, found, advice)


def _hits(metrics: Metrics, gets: dict[str, float]) -> Check:
    asked = metrics.total("vllm:external_prefix_cache_queries")
    hits = metrics.total("vllm:external_prefix_cache_hits")
    own = metrics.total("vllm:prefix_cache_hits")
    if hits:
        tiers = metrics.by("tier", "vllm:kvtier_hits") or {"the store": gets.get("hit", 0.0)}
        chunks = " and ".join(f"{count:.0f} chunks from {tier}" for tier, count in tiers.items())
        return Check("hits", True, f"{hits:.0f} of {asked:.0f} tokens that were asked for: {chunks}")
    if own:
        return Check(
            "hits", True, f"none; what was repeated, {own:.0f} tokens, vLLM still had itself",
            "that is as it should be: kvtier hits after a restart, and for what vLLM has evicted",
        )  # fmt: skip
    return Check(
        "hits", False, f"none of {asked:.0f} tokens that were asked for",
        "repeat a prompt after a restart of vLLM. If that does not hit, something is not as it was: the "
        "prompt, from its first token on (a date in it, a salt), `paths`, or what keys depend on: model, "
        "vLLM's version, device, tensor_parallel_size, PYTHONHASHSEED. When vLLM has reset its caches (sleep "
        "mode) only a restart brings back what was stored before, unless `keep_after_reset` is set",
    )  # fmt: skip


def _decisions(metrics: Metrics) -> Iterator[Check]:
    made = metrics.by("decision", "vllm:kvtier_decisions")
    recomputed = sum(count for name, count in made.items() if name.startswith("recompute"))
    if recomputed:
        asked = sum(made.values())
        yield Check(
            "load or recompute", recomputed <= asked / 2,
            f"{recomputed:.0f} of {asked:.0f} prefixes that were stored were recomputed{_estimates(metrics)}",
            "reading them takes longer than computing them: use a faster device, or more of them in `paths`",
        )  # fmt: skip


def _estimates(metrics: Metrics) -> str:
    """The estimates that decide, of the engine where they are highest."""
    of: dict[str, float] = {}
    for sample in metrics.select("vllm:kvtier_estimated_seconds"):
        name = sample.labels.get("of", "")
        of[name] = max(of.get(name, 0.0), sample.value)
    if not of.keys() >= {"prefill_per_token", "load_per_token", "load_latency"}:
        return ""
    us = {name: seconds * 1e6 for name, seconds in of.items()}
    return (
        f": a load takes {us['load_latency'] / 1e3:.1f} ms and {us['load_per_token']:.1f} us per token, "
        f"prefill {us['prefill_per_token']:.1f} us per token"
    )
