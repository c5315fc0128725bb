"""A wave: several requests sent at one instant, each on a connection of its own."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.cli.bench.recovery.client import Answer, EndpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtier.cli.bench.recovery.client import Endpoint, Prompt


@dataclass(frozen=True, slots=True)
class Wave:
    """What came of the requests, by session."""

    answers: dict[int, Answer]
    failures: dict[int, str]
    wall_s: float
    """From the first request to the last token."""
    hit_tokens: float | None
    """Tokens that the server's metrics say were cached; None if it has none."""


def run_wave(
    endpoint: Endpoint,
    prompts: Mapping[int, Prompt],
    tokens: int,
    on_answer: Callable[[], object] = lambda: None,
) -> Wave:
    """Ask all prompts at once, for `tokens` tokens each. What fails is told, not raised."""
    answers: dict[int, Answer] = {}
    failures: dict[int, str] = {}
    # A thread each: it sleeps in the kernel until its tokens come, so their instants are its own.
    ready = threading.Barrier(len(prompts))

    def ask(session: int, prompt: Prompt) -> None:
        try:
            connection = endpoint.connect()
        except EndpointError as error:
            failures[session] = str(error)
            ready.abort()
            return
        try:
            ready.wait()
            answers[session] = endpoint.ask(connection, prompt, tokens)
            on_answer()
        except threading.BrokenBarrierError:
            failures[session] = "not sent, as another connection of its wave was refused"
        except EndpointError as error:
            failures[session] = str(error)
        except Exception as error:
            failures[session] = f"the answer makes no sense: {type(error).__name__}: {error}"
        finally:
            connection.close()

    before = endpoint.hits()
    threads = [threading.Thread(target=ask, args=item, daemon=True) for item in prompts.items()]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - start
    after = endpoint.hits()
    hits = None if before is None or after is None else after - before
    return Wave(answers, failures, wall, hits)
