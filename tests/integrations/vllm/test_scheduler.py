"""The connector's side in vLLM's scheduler, on requests made by hand."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.connector import Economy
from kvtier.hashing import derived_keys

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK, CHUNK = 16, 64
SPACES = [bytes([rank]) * 32 for rank in range(2)]


def make(workers: int = 2, **settings: Any) -> Any:
    from kvtier.integrations.vllm.scheduler import Scheduler

    return Scheduler(workers=workers, block_tokens=BLOCK, chunk_tokens=CHUNK, **settings)


def request(tokens: int, name: str = "r", **values: Any) -> Any:
    """A request whose i-th block has a hash of all i; with the same name, the same hashes."""
    hashes = [f"{name}{i}".encode().ljust(32) for i in range(tokens // BLOCK)]
    defaults = {
        "request_id": name, "block_hashes": hashes, "num_tokens": tokens, "num_prompt_tokens": tokens,
        "num_computed_tokens": 0, "skip_reading_prefix_cache": False,
    }  # fmt: skip
    return SimpleNamespace(**{**defaults, **values})


def step(*scheduled: tuple[Any, int, list[int]], new: Sequence[Any] = ()) -> Any:
    """A SchedulerOutput in which requests compute tokens, with their block tables."""
    tables = {made.request_id: (blocks,) for made, _, blocks in scheduled}
    return SimpleNamespace(
        num_scheduled_tokens={made.request_id: tokens for made, tokens, _ in scheduled},
        total_num_scheduled_tokens=sum(tokens for _, tokens, _ in scheduled),
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
        ),
        kv_connector_block_state=SimpleNamespace(get_block_ids=tables.get),
    )


def report(
    made: Any,
    chunks: Sequence[int],
    *ranks: int,
    what: str = "added",
    era: bytes = b"",
    saving: bool = False,
) -> Any:
    """What these workers tell of chunks of a request."""
    from kvtier.integrations.vllm.messages import Changes, Report

    hashes = [made.block_hashes[(chunk + 1) * CHUNK // BLOCK - 1] for chunk in chunks]
    changes = {}
    for rank in ranks:
        keys = b"".join(derived_keys(hashes, namespace=SPACES[rank], extra=era))
        changes[rank] = Changes(SPACES[rank], is_saving=saving, **{what: keys})
    return Report(changes)


def knowing(made: Any, chunks: int, **settings: Any) -> Any:
    """A scheduler that knows that both workers have chunks of a request."""
    scheduler = make(**settings)
    scheduler.take(report(made, range(chunks), 0, 1), ())
    return scheduler


def test_nothing_is_said_before_all_workers_have_told() -> None:
    made, scheduler = request(200), make()
    assert scheduler.match(made, 0) == (None, False)
    scheduler.take(report(made, range(3), 0), ())
    assert scheduler.match(made, 0) == (None, False)
    scheduler.take(report(made, range(3), 1), ())
    assert scheduler.match(made, 0) == (192, True)


def test_a_chunk_counts_when_all_workers_have_it() -> None:
    made, scheduler = request(200), make()
    scheduler.take(report(made, range(3), 0), ())
    scheduler.take(report(made, [0], 1), ())
    assert scheduler.match(made, 0) == (64, True)
    scheduler.take(report(made, [2], 1), ())
    assert scheduler.match(made, 0) == (64, True)
    scheduler.take(report(made, [1], 1), ())
    assert scheduler.match(made, 0) == (192, True)
    scheduler.take(report(made, [0], 0, what="removed"), ())
    assert scheduler.match(made, 0) == (0, False)


def test_a_token_is_left_to_compute() -> None:
    for tokens, found in ((192, 176), (193, 192), (64, 48), (16, 0)):
        made = request(tokens)
        assert knowing(made, tokens // CHUNK).match(made, 0) == (found, found > 0)


def test_what_vllm_has_itself_is_left_out() -> None:
    made = request(200)
    scheduler = knowing(made, 3)
    assert [scheduler.match(made, computed)[0] for computed in (16, 64, 80, 176, 192)] == [
        176,
        128,
        112,
        16,
        0,
    ]
    made.skip_reading_prefix_cache = True
    assert scheduler.match(made, 0) == (0, False)


def test_a_load_has_the_blocks_behind_what_is_computed() -> None:
    made = request(200)
    scheduler = knowing(made, 3)
    tokens, _ = scheduler.match(made, 80)
    scheduler.allocated(made, list(range(100, 113)), tokens)
    scheduler.allocated(made, list(range(100, 113)), 0)  # vLLM's second call, for what is computed
    plan = scheduler.plan(step())
    (job,) = plan.loads
    assert (job.start, job.end, job.blocks) == (80, 192, list(range(105, 112)))
    assert (job.known, job.hashes) == (0, [made.block_hashes[i] for i in (3, 7, 11)])
    assert plan.reused == job.blocks
    assert scheduler.plan(step()).loads == []


def test_what_could_not_be_loaded_is_absent_until_it_is_stored_anew() -> None:
    made = request(200)
    scheduler = knowing(made, 3)
    scheduler.take(report(made, [1], 1, what="failed"), ())
    assert scheduler.match(made, 0) == (64, True)
    scheduler.take(report(made, [1], 1), ())
    assert scheduler.match(made, 0) == (192, True)


def test_chunks_are_saved_as_they_fill_and_once() -> None:
    made, blocks = request(200), list(range(50, 63))
    scheduler = knowing(made, 1)
    scheduler.add(made)
    assert scheduler.plan(step((made, 100, blocks))).saves == []  # the first chunk is stored
    made.num_computed_tokens = 100
    (job,) = scheduler.plan(step((made, 100, blocks))).saves
    assert (job.start, job.end, job.blocks) == (64, 192, blocks[4:12])
    assert job.hashes == [made.block_hashes[i] for i in (3, 7, 11)]
    made.num_computed_tokens = 200
    assert scheduler.plan(step((made, 1, blocks))).saves == []


def test_drafts_are_not_saved() -> None:
    """vLLM may schedule tokens that it may reject: their block has no hash, or that of others."""
    made, blocks = request(130), list(range(9))
    scheduler = knowing(made, 0)
    scheduler.add(made)
    made.num_computed_tokens = 128
    made.num_tokens = 127
    (job,) = scheduler.plan(step((made, 4, blocks))).saves
    assert job.end == 64


def test_the_end_of_a_request_saves_what_is_left() -> None:
    made, blocks = request(200), list(range(13))
    scheduler = knowing(made, 0)
    scheduler.add(made)
    scheduler.plan(step((made, 128, blocks)))
    made.num_computed_tokens = 192
    scheduler.finish(made, blocks)
    plan = scheduler.plan(step())
    assert [(job.start, job.end, job.known) for job in plan.late] == [(128, 192, 2)]
    assert plan.ended == ["r"]
    assert len(scheduler) == 0
    plan = scheduler.plan(step())
    assert (plan.late, plan.ended) == ([], [])


def test_what_is_in_flight_at_the_end_is_not_saved() -> None:
    made, blocks = request(200), list(range(13))
    scheduler = knowing(made, 0)
    scheduler.add(made)
    made.num_computed_tokens, made.num_in_flight_tokens = 200, 90
    scheduler.finish(made, blocks)
    assert [(job.start, job.end) for job in scheduler.plan(step()).late] == [(0, 64)]


def test_an_abort_in_mid_load_cancels_it_and_saves_nothing() -> None:
    made = request(200)
    scheduler = knowing(made, 3)
    scheduler.allocated(made, list(range(13)), scheduler.match(made, 0)[0])
    made.num_computed_tokens = 192  # as vLLM has it while it waits
    scheduler.plan(step())
    scheduler.finish(made, list(range(12)))
    plan = scheduler.plan(step())
    assert (plan.cancelled, plan.ended, plan.late) == (["r"], ["r"], [])
    scheduler.take(None, ["r"])
    assert len(scheduler) == 0


def test_blocks_that_a_step_writes_to_are_named() -> None:
    scheduler = make()
    output = step(new=[SimpleNamespace(block_ids=([1, 2, 3],), num_computed_tokens=32)])
    cached = output.scheduled_cached_reqs
    cached.req_ids, cached.num_computed_tokens = ["a", "b", "c"], [40, 16, 7]
    cached.new_block_ids, cached.resumed_req_ids = [([4],), ([5, 6],), None], {"b"}
    assert scheduler.plan(output).reused == [3, 4, 6]


def test_a_reset_makes_other_keys() -> None:
    made, running, blocks = request(200), request(200, "running"), list(range(13))
    scheduler = knowing(made, 3)
    scheduler.add(made)
    scheduler.add(running)
    running.num_computed_tokens = 64
    scheduler.reset()
    assert scheduler.match(made, 0) == (0, False)
    plan = scheduler.plan(step((made, 128, blocks), (running, 128, blocks)))
    assert plan.era
    assert [(job.request_id, job.start, job.end) for job in plan.saves] == [("r", 0, 128)]
    scheduler.take(report(made, [0, 1], 0, 1, era=plan.era), ())
    assert scheduler.match(made, 0) == (128, True)
    # What was computed before the reset may be of other weights.
    running.num_computed_tokens = 192
    scheduler.finish(running, blocks)
    assert scheduler.plan(step()).late == []


def test_a_reset_drops_the_saves_of_requests_that_ended_just_before() -> None:
    made = request(200)
    scheduler = knowing(made, 0)
    scheduler.add(made)
    made.num_computed_tokens = 200
    scheduler.finish(made, list(range(13)))
    scheduler.reset()
    assert scheduler.plan(step()).late == []


def test_a_reset_may_keep_what_is_stored() -> None:
    made = request(200)
    scheduler = knowing(made, 3, keep_after_reset=True)
    scheduler.reset()
    assert scheduler.match(made, 0) == (192, True)
    assert scheduler.plan(step()).era == b""


def test_a_session_may_take_a_token_back() -> None:
    made = request(128)
    scheduler = knowing(made, 2)
    scheduler.allocated(made, list(range(8)), scheduler.match(made, 0)[0])
    assert len(scheduler.plan(step()).loads[0].hashes) == 2
    made.block_hashes[7:] = [b"other".ljust(32)]
    assert scheduler.match(made, 0) == (64, True)
    made.num_computed_tokens = 64
    (job,) = scheduler.plan(step((made, 64, list(range(8))))).saves
    assert (job.known, job.hashes) == (0, [made.block_hashes[3], made.block_hashes[7]])


def test_the_economy_is_asked_once_for_each_request() -> None:
    economy = Economy()
    economy.observe_prefill(1000, 1e-3)
    economy.observe_load(64, 10.0)
    made = request(200)
    scheduler = knowing(made, 3, economy=economy)
    for _ in range(3):
        assert scheduler.match(made, 0) == (0, False)
        scheduler.take(report(made, [0], 0), ())
    assert (economy.recomputed, economy.loaded) == (1, 0)
    scheduler.allocated(made, list(range(13)), 0)
    made.num_computed_tokens = 0  # preempted, so it is asked again
    assert scheduler.match(made, 0) == (0, False)
    assert economy.recomputed == 2


def test_an_idle_engine_steps_until_it_knows_what_was_saved() -> None:
    made = request(200)
    scheduler = knowing(made, 0)
    scheduler.add(made)
    assert not scheduler.is_waiting()
    scheduler.plan(step((made, 200, list(range(13)))))
    scheduler.take(report(made, [0], 0, saving=True), ())
    scheduler.take(report(made, [0, 1, 2], 1), ())
    assert scheduler.is_waiting()
    scheduler.take(report(made, [1, 2], 0), ())
    assert not scheduler.is_waiting()
    made.num_computed_tokens = 200
    scheduler.finish(made, list(range(13)))
    scheduler.plan(step())
    assert not scheduler.is_waiting()


def test_an_idle_engine_does_not_step_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    made = request(200)
    scheduler = knowing(made, 0)
    scheduler.add(made)
    scheduler.plan(step((made, 200, list(range(13)))))
    assert scheduler.is_waiting()
    monkeypatch.setattr(scheduler, "_awake_until", 0.0)
    assert not scheduler.is_waiting()


def test_prefill_is_measured_while_the_engine_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    economy, made = Economy(), request(200)
    scheduler = knowing(made, 0, economy=economy)
    scheduler.add(made)
    now = [0.0]
    monkeypatch.setattr(scheduler._pace, "_clock", lambda: now[0])
    scheduler.plan(step((made, 100, list(range(13)))))
    now[0] = 2.0
    made.num_computed_tokens = 100
    scheduler.plan(step((made, 100, list(range(13)))))
    assert economy.prefill_time(100) == 2.0
    scheduler.finish(made, list(range(13)))
    now[0] = 1000.0
    scheduler.plan(step())
    assert economy.prefill_time(100) == 2.0
