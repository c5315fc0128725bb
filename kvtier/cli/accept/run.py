"""From gate to gate."""

from __future__ import annotations

import datetime
import logging
import shutil
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

from kvtier.cli._demo.model import DemoError
from kvtier.cli.accept import arrival, recovery, single, stability
from kvtier.cli.accept.report import ALL
from kvtier.cli.accept.state import ReportError
from kvtier.cli.accept.verdict import Check, Gate
from kvtier.cli.bench.recovery.client import EndpointError
from kvtier.errors import InvalidRequest, KVTierError, StoreInUse, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.cli.accept.context import Context

_MESSAGES = 100


class _Run(Protocol):
    def __call__(self, context: Context) -> tuple[list[Check], dict[str, Any]]: ...


GATES: dict[str, _Run] = {
    "G1": arrival.run, "G2": single.run, "G3": recovery.run, "G4": stability.run
}  # fmt: skip


def run_gates(context: Context, on_gates: Callable[[list[Gate]], object], *, keep_going: bool) -> None:
    """Every gate in turn, up to the first that fails unless told to keep going; `on_gates` has all so far.

    What an earlier process finished is not done again. The run's own place in the directory is removed
    when the last gate is over. Raises what is not the storage's fault: InvalidRequest, EndpointError,
    DemoError, ReportError, StoreInUse, UnsupportedModel.
    """
    gates: list[Gate] = []
    for name, run in GATES.items():
        title = ALL[name]
        if (saved := context.state.get(name)) is not None:
            gate = Gate.of(saved)
        elif not keep_going and any(one.outcome != "passed" for one in gates):
            gate = Gate(name, title, was_run=False)
        else:
            gate = _run(context, name, title, run)
            if name == "G3":
                context.release()
        gates.append(gate)
        on_gates(gates)
    shutil.rmtree(context.work, ignore_errors=True)


def _run(context: Context, name: str, title: str, run: _Run) -> Gate:
    spent: float = context.state.get(f"{name}.seconds") or 0.0
    begin = time.monotonic()
    gate = Gate(name, title)
    try:
        gate.checks, gate.figures = run(context)
    except (InvalidRequest, EndpointError, ReportError, UnsupportedModel, DemoError, StoreInUse):
        raise
    except (KVTierError, OSError, AssertionError) as error:
        gate.error = str(error) or type(error).__name__
    finally:
        gate.seconds = spent + time.monotonic() - begin
        context.state.put(f"{name}.seconds", gate.seconds)
    context.state.put(name, gate.data())
    return gate


class Messages(logging.Handler):
    """Keeps what the store logs, a failing device's thousand lines as one with its count."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._log = logging.getLogger("kvtier")
        self._counts: Counter[str] = Counter()

    def __enter__(self) -> Messages:
        self._propagated, self._log.propagate = self._log.propagate, False
        self._log.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._log.removeHandler(self)
        self._log.propagate = self._propagated

    def emit(self, record: logging.LogRecord) -> None:
        """Count it."""
        text = f"{record.levelname.lower()}: {record.getMessage()}"
        if text in self._counts or len(self._counts) < _MESSAGES:
            self._counts[text] += 1

    def lines(self) -> list[str]:
        """All of them, each with how often it came."""
        return [f"{text} ({count} times)" if count > 1 else text for text, count in self._counts.items()]


def now() -> str:
    """The date and time, as reports have it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
