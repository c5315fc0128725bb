"""The demo's figures: a table to look at, and JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from kvtier.cli._demo.steps import Start


@dataclass
class Report:
    """What the demo found. Times in seconds, sizes in bytes."""

    model: str
    dtype: str
    prompt_tokens: int
    chunk_tokens: int
    kv_bytes: int
    threads: int
    recompute: Start
    dram: Start
    disk: Start
    load_seconds: float
    save_seconds: float
    bytes_equal: bool
    logit_difference: float
    device_bytes: int
    """Fetched from block devices by the new process while it opened the store and restored."""
    stats: dict[str, Any]
    """The new process's `Store.stats()` after restoring."""
    answer: str

    @property
    def tokens_equal(self) -> bool:
        """Whether all three ways generated the same tokens."""
        return self.recompute.tokens == self.dram.tokens == self.disk.tokens

    @property
    def cold(self) -> bool:
        """Whether the device delivered at least the bytes that were restored."""
        return self.device_bytes >= self.kv_bytes

    def figures(self) -> dict[str, Any]:
        """Everything, as plain data."""
        ways = {"recompute": self.recompute, "dram": self.dram, "disk": self.disk}
        return {
            "model": self.model,
            "dtype": self.dtype,
            "threads": self.threads,
            "prompt_tokens": self.prompt_tokens,
            "restored_tokens": self.disk.restored,
            "chunk_tokens": self.chunk_tokens,
            "kv_bytes": self.kv_bytes,
            "ttft_s": {name: way.ttft for name, way in ways.items()},
            "speedup": {name: self.recompute.ttft / ways[name].ttft for name in ("dram", "disk")},
            "open_s": {name: ways[name].open for name in ("disk",)},
            "restore_s": {name: ways[name].restore for name in ("dram", "disk")},
            "compute_s": {name: way.compute for name, way in ways.items()},
            "model_load_s": self.load_seconds,
            "save_s": self.save_seconds,
            "new_tokens": len(self.disk.tokens),
            "tokens_equal": self.tokens_equal,
            "bytes_equal": self.bytes_equal,
            "max_logit_difference": self.logit_difference,
            "engine": self.stats.get("engine"),
            "direct": self.stats.get("disk.direct"),
            "disk_bytes_read": self.device_bytes,
            "store_bytes_read": self.stats.get("disk.bytes_read"),
            "cold": self.cold,
        }

    def show(self, console: Console) -> None:
        """Print the table and what it means."""
        title = f"\n{self.model}, {self.dtype}, {self.threads} threads: {self.prompt_tokens} tokens"
        table = Table(title=title, title_justify="left")
        table.add_column("first token after")
        for name in ("open store", "restore", "compute", "total", "speed-up"):
            table.add_column(name, justify="right")
        for name, way in (
            ("prefill", self.recompute),
            ("DRAM", self.dram),
            ("disk, new process", self.disk),
        ):
            opened = f"{way.open * 1e3:,.0f} ms" if way is self.disk else "-"
            restored = f"{way.restore * 1e3:,.0f} ms" if way.restored else "-"
            factor = f"{self.recompute.ttft / way.ttft:.1f}x"
            table.add_row(
                name, opened, restored, f"{way.compute * 1e3:,.0f} ms", f"{way.ttft * 1e3:,.0f} ms", factor
            )
        console.print(table)
        for line in self._lines():
            console.print(line, highlight=False, soft_wrap=True)

    def _lines(self) -> list[str]:
        mega, chunk = self.kv_bytes / 1e6, self.kv_bytes // (self.prompt_tokens // self.chunk_tokens)
        stored = self.stats.get("disk.bytes_read") or 0
        direct = {True: ", O_DIRECT", False: ", through the page cache"}.get(
            self.stats.get("disk.direct"),  # type: ignore[arg-type]
            "",
        )
        cold = (
            "cold: the device delivered all of it" if self.cold else "[yellow]not cold[/] (tmpfs, or cached?)"
        )
        good, bad = "[green]identical[/]", "[red]DIFFERENT[/]"
        return [
            f"KV: {mega:.1f} MB in chunks of {self.chunk_tokens} tokens ({chunk / 1e6:.1f} MB), "
            f"stored and synced in {self.save_seconds:.2f} s",
            f"Model load, weights digest included and in no figure above: {self.load_seconds:.2f} s",
            f"Disk reads of the new process: {self.device_bytes / 1e6:.1f} MB by the kernel's count, "
            f"{stored / 1e6:.1f} MB by the store's ({self.stats.get('engine')}{direct}); {cold}",
            f"Restored KV bytes of {self.disk.restored} tokens: {good if self.bytes_equal else bad}",
            f"Generated tokens: {good if self.tokens_equal else bad} ({len(self.disk.tokens)} each); "
            f"largest logit difference {self.logit_difference:.1e}",
            f"[dim]Answer: {escape(self.answer.strip())}[/]",
        ]
