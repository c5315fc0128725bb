"""`kvtier doctor`: what this machine offers, and for what is missing: why, and what to do."""

from __future__ import annotations

import json
import sys
from pathlib import Path  # noqa: TC003  the command line reads the types
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtier.cli.checks import Check, check_all
from kvtier.errors import InvalidRequest


def doctor(
    path: Path | None = None,
    *,
    vllm: bool = False,
    url: str | None = None,
    json_output: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Check the native core, io_uring, memory, CUDA and integrations; with PATH its file system, too.

    With --vllm, instead: why vLLM with kvtier does not hit. The exit code is then 1 if something is wrong.

    Parameters
    ----------
    path
        A directory that a store is, or is to be, in; with --vllm also a settings file (.toml), and by default
        where KvtierConnector keeps its stores.
    vllm
        Check this environment's vLLM, what engines have stored in PATH, and the server at --url.
    url
        With --vllm: the address of a running server, such as http://localhost:8000.
    json_output
        Print JSON instead of a table.
    """
    if url is not None and not vllm:
        raise InvalidRequest("--url is the address of a vLLM server: give --vllm, too")
    serve = ""
    if vllm:
        from kvtier.cli.vllm_checks import check_vllm, paths_of, serve_line
        from kvtier.cli.vllm_server import check_server

        paths = paths_of(path)
        serve = serve_line(paths if path else ())
        checks = check_vllm(paths) + ([] if url is None else check_server(url))
    else:
        checks = check_all(path)
    if json_output:
        report = {check.name: check.report() for check in checks}
        json.dump(report | ({"serve": serve} if vllm else {}), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        table = Table("", "", "found", "what to do")
        for check in checks:
            table.add_row(_mark(check), *map(Text, (check.name, check.found, check.advice)))
        Console().print(table)
        if vllm:
            Console().print(Text(f"To serve with kvtier:\n{serve}"), soft_wrap=True)
    if vllm and not all(check.ok for check in checks):
        sys.exit(1)


def _mark(check: Check) -> str:
    return "[green]ok[/]" if check.ok else "[yellow]--[/]"
