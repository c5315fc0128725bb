"""The `kvtier` command."""

from __future__ import annotations

import sys

from cyclopts import App
from rich.console import Console

from kvtier import __version__
from kvtier.cli.bench import app as bench
from kvtier.errors import KVTierError

app = App(name="kvtier", version=__version__, help="Tiered KV-cache storage for LLM inference.")
# Named by path: a command imports what it needs only when it runs.
app.command("kvtier.cli.accept.command:accept", help="Judge storage in four gates, with a report.")
app.command("kvtier.cli.delete:delete", help="Delete what a tenant or a namespace has in a store.")
app.command("kvtier.cli.demo:demo", help="Store a real prompt's KV, restart, and restore it from disk.")
app.command("kvtier.cli.doctor:doctor", help="Show what this machine offers, and how to get the rest.")
app.command("kvtier.cli.inspect:inspect", help="Show what a store's files hold.")
app.command("kvtier.cli.plan:plan", help="Work out what a tier would bring: time, money, energy.")
app.command(
    "kvtier.cli.replay.command:command",
    name="replay",
    help="Tell what a request trace would hit, by policy and size.",
)
app.command("kvtier.cli.verify:verify", help="Read and check every chunk of a store.")
app.command(bench)


def main() -> None:
    """Run the command line; an error of kvtier is a sentence and exit code 2."""
    try:
        app()
    except KVTierError as error:
        Console(stderr=True).print(
            f"kvtier: {error}", style="red", highlight=False, markup=False, soft_wrap=True
        )
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
