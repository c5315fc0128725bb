"""`kvtier bench`: what a device gives, and what each way of using it makes of that."""

from __future__ import annotations

from cyclopts import App

app = App(
    name="bench", help="Measure reads, writes, copies and keys on this machine, and a server's cold recovery."
)
# Named by path: a benchmark imports what it needs only when it runs.
app.command("kvtier.cli.bench.read:read", help="Cold reads: kvtier's engines, files, and fio.")
app.command("kvtier.cli.bench.write:write", help="Sustained writes: kvtier's engines, and fio.")
app.command("kvtier.cli.bench.copy:copy", help="Hits in DRAM, against the best copy loop.")
app.command("kvtier.cli.bench.keys:keys", help="Keys of a long prompt, and finding them.")
app.command("kvtier.cli.bench.mixed:mixed", help="Read latency, without and with a write load.")
app.command("kvtier.cli.bench.scale:scale", help="Cold reads from one, two and four devices.")
app.command(
    "kvtier.cli.bench.recovery.command:cold_recovery",
    help="How soon a restarted LLM server answers again, by what its KV cache kept.",
)
