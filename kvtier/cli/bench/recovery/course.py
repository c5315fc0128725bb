"""The waves of a cold recovery: which sessions each has, and each of them in turn."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from kvtier.cli.bench.recovery.client import EndpointError
from kvtier.cli.bench.recovery.summary import summarize
from kvtier.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtier.cli.bench.recovery.client import Prompt
    from kvtier.cli.bench.recovery.counters import DeviceReads
    from kvtier.cli.bench.recovery.wave import Wave


class Ask(Protocol):
    """Asks all prompts at once, and tells of each answer."""

    def __call__(self, prompts: Mapping[int, Prompt], *, on_answer: Callable[[], object]) -> Wave:
        """What came of them."""


def plan_waves(concurrency: Sequence[int], sessions: int | None = None) -> list[list[int]]:
    """Numbers of the sessions of each wave, and of what is stored besides, in waves as large as the largest.

    Raises InvalidRequest for no wave, an empty one, or fewer sessions than they need.
    """
    if not concurrency or min(concurrency) < 1 or len(set(concurrency)) < len(concurrency):
        raise InvalidRequest(f"--concurrency is {list(concurrency)}, needs different numbers from 1 up")
    needed = sum(concurrency)
    if sessions is not None and sessions < needed:
        raise InvalidRequest(
            f"--sessions is {sessions}, but waves of {', '.join(map(str, concurrency))} need {needed}, as "
            "each session is asked for once"
        )
    sizes = list(concurrency)
    left = (sessions or needed) - needed
    while left > 0:
        sizes.append(min(left, max(concurrency)))
        left -= sizes[-1]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


def run_waves(
    ask: Ask,
    prompts: Sequence[Prompt],
    waves: Sequence[Sequence[int]],
    verb: str,
    step: Callable[[str], object],
    reads: DeviceReads,
    stored: Sequence[tuple[dict[str, Any], Wave]] = (),
) -> list[tuple[dict[str, Any], Wave]]:
    """Each wave with its row; `stored` is what the first run of the same waves gave.

    Raises EndpointError for a session that fails in a first run.
    """
    found = []
    for number, wave in enumerate(waves):
        name = f"{verb}, {len(wave)} at once"
        step(name)
        before = reads.read()
        ran = ask({i: prompts[i] for i in wave}, on_answer=partial(step, name))
        after = reads.read()
        delivered = None if before is None or after is None else after - before
        reference = stored[number][1].answers if stored else None
        if ran.failures and not stored:
            session, why = next(iter(ran.failures.items()))
            raise EndpointError(f"session {session} could not be stored: {why}")
        found.append((summarize(name, ran, read_bytes=delivered, reference=reference), ran))
    return found
