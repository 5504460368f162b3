"""Rows that end at awkward moments. The test runs the engine's loop step by step on one thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rwkv_batch.config import EngineConfig
from rwkv_batch.core.deadlines import DEADLINES_KEPT
from rwkv_batch.core.job_table import CONFIRM_TIMEOUT_S
from rwkv_batch.core.sequence import Phase, Sequence
from rwkv_batch.engine import Engine
from rwkv_batch.errors import ErrorInfo, ErrorKind
from rwkv_batch.request import FinishReason, GenerateRequest, Job, Priority, PromptLogprobs
from state_pool.config import PoolConfig
from test.conftest import rest_slow
from test.engine.test_scheduler import job as job_of
from test.harness import TOKENIZER, WAIT_S, RunningJob, has_rows_without_job, make_request, submit, turn
from test.pool_integrity import integrity_faults

HEADER = "You are a careful translator of texts about the sea and the weather. " * 6 + "\n\nUser: "
ENDLESS: dict[str, Any] = {"max_tokens": 10**6, "ignore_eos": True}


class Stepped:
    """An engine without its thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.engine._inbox.run_all()
            self.engine.step()

    def until(self, condition: Callable[[], object], what: str) -> None:
        steps, deadline = 0, time.monotonic() + WAIT_S
        while not condition():
            self.step()
            steps += len(self.rows) > 0
            if not self.rows:
                time.sleep(0.002)  # the pool's threads may need time
            assert steps < 2000 and time.monotonic() < deadline, f"not within {steps} steps: {what}"

    def end(self, job: RunningJob) -> RunningJob:
        self.until(job.done.is_set, "the job ends")
        return job

    def cancel(self, job: RunningJob) -> None:
        self.engine.cancel(job.job.job_id)
        self.engine._inbox.run_all()

    @property
    def rows(self) -> list[Sequence]:
        return list(self.engine.scheduler._running)

    @property
    def free(self) -> int:
        return self.engine.model_runner.pool.tiers.slots.num_free

    def check_idle(self, free: int | None = None) -> None:
        """Check that nothing is left of any row."""
        self.until(lambda: not self.engine.jobs._jobs, "all jobs have ended")
        self.step(3)
        admission = self.engine.scheduler.admission
        assert (self.rows, admission.waiting_rows, admission.paused_rows) == ([], 0, 0)
        assert len(admission.free_req_slots) == self.engine.model_runner.limits.num_req_slots
        assert free is None or self.free == free
        assert integrity_faults(self.engine.model_runner.pool) == []
        assert not has_rows_without_job(self.engine)


@contextmanager
def stepped(model: Path, pool: PoolConfig | None = None, **fields: Any) -> Iterator[Stepped]:
    settings = {"max_running": 4, "prefill_tokens_per_step": 64, "prefill_chunk": 16, **fields}
    pool = pool or PoolConfig(state_db="", l1_sessions=4, l2_sessions=4)
    engine = Engine(EngineConfig(model_path=str(model), pool=pool, devices=("cpu",), **settings))
    engine._load()
    engine._loaded.set()
    try:
        yield Stepped(engine)
    finally:
        engine.model_runner.pool.close()


@pytest.fixture(scope="module", params=["plain", "overlapped"])
def loop(model: Path, request: pytest.FixtureRequest) -> Iterator[Stepped]:
    with stepped(model, overlap_on_cpu=request.param == "overlapped") as loop:
        yield loop


def test_no_row_waits_for_the_prefix_of_a_cancelled_row(loop: Stepped) -> None:
    """Rows wait for the one that reads their common prefix. If it is cancelled, another reads it."""
    header = "cancelled: " + HEADER
    first, second = (submit(loop.engine, make_request(header + tail, max_tokens=3)) for tail in ("one", "two"))
    loop.step(2)
    assert [row.job.spec.job_id for row in loop.rows] == [first.job.job_id], "the second waits for the common prefix"
    assert loop.rows[0].cache_points
    loop.cancel(first)
    assert loop.end(second).finishes[0].completion_tokens == 3
    loop.check_idle()


@pytest.mark.parametrize("refusing", ["tiers.allocate", "prefixes.offer"])
def test_no_row_waits_for_a_prefix_that_is_not_cached(
    loop: Stepped, monkeypatch: pytest.MonkeyPatch, refusing: str
) -> None:
    """No slot is free, or the cache refuses the state. The slot for it is freed again."""
    free, header = loop.free, f"refused by {refusing}: " + HEADER
    first, second = (submit(loop.engine, make_request(header + tail, max_tokens=3)) for tail in ("one", "two"))
    loop.step(2)
    assert len(loop.rows) == 1
    with monkeypatch.context() as patched:
        part, method = refusing.split(".")
        patched.setattr(getattr(loop.engine.model_runner.pool, part), method, lambda *_: None)
        loop.until(lambda: not loop.rows[0].cache_points, "the border is behind it")
    loop.step(2)
    assert len(loop.rows) == 2, "the second reads the whole prompt"
    loop.end(first)
    loop.end(second)
    loop.check_idle(free - 1)  # the second offers its state


def test_a_row_without_prefix_cache_adds_nothing_to_it(loop: Stepped) -> None:
    free, cache = loop.free, loop.engine.model_runner.pool.stats()["prefix_cache"]
    for tail in ("one", "two", "three"):
        asked = make_request(f"uncached: {HEADER}{tail}", max_tokens=2, use_prefix_cache=False)
        assert loop.end(submit(loop.engine, asked)).finishes[0].cached_tokens == 0
    assert loop.engine.model_runner.pool.stats()["prefix_cache"] == cache
    loop.check_idle(free)


def test_rows_cancelled_before_they_read_a_shared_slot_release_it(loop: Stepped) -> None:
    free = loop.free
    job = submit(loop.engine, make_request("hello there", n=3, use_prefix_cache=False, **ENDLESS))
    loop.until(lambda: any(row.may_sample for row in job_rows(loop, job)), "the prompt is read for all")
    assert any(row.shared is not None for row in job_rows(loop, job))
    loop.cancel(job)
    loop.end(job)
    assert {finish.reason for finish in job.finishes.values()} == {FinishReason.CANCELLED} and len(job.finishes) == 3
    loop.check_idle(free)


def job_rows(loop: Stepped, job: RunningJob) -> list[Sequence]:
    """A job's rows that have not ended, including waiting ones."""
    running = loop.engine.jobs._jobs.get(job.job.job_id)
    return [] if running is None else list(running.live)


def test_continuations_of_a_cancelled_job_leave_the_queue(loop: Stepped) -> None:
    free = loop.free
    job = submit(loop.engine, make_request("hello there", n=12, use_prefix_cache=False, **ENDLESS))
    loop.until(
        lambda: sum(row.phase is Phase.RUNNING and row.may_sample for row in job_rows(loop, job)) >= 3, "some run"
    )
    assert loop.engine.scheduler.admission.waiting_rows >= 8
    loop.cancel(job)
    assert loop.engine.scheduler.admission.waiting_rows == 0
    loop.end(job)
    assert sorted(job.finishes) == list(range(12))
    loop.check_idle(free)


def test_each_row_of_a_shared_prompt_ends_once(loop: Stepped) -> None:
    """The row that reads the prompt is not one of them: it ends with the fork."""
    job = submit(
        loop.engine,
        make_request("hello there", n=2, max_tokens=4),
        make_request("other", n=2, max_tokens=9, ignore_eos=True),
    )
    loop.until(lambda: len(job_rows(loop, job)) == 4, "both prompts are read")
    assert all(row.may_sample for row in job_rows(loop, job))
    loop.end(job)
    assert sorted(job.finishes) == [0, 1, 2, 3]  # the sink asserts that no row ends twice
    loop.check_idle()


def test_a_cancelled_shared_prompt_ends_all_its_rows(loop: Stepped) -> None:
    free = loop.free
    job = submit(loop.engine, make_request("hello there " * 40, n=3, use_prefix_cache=False, **ENDLESS))
    loop.step(2)
    assert [row.may_sample for row in job_rows(loop, job)] == [False]
    loop.cancel(job)
    assert sorted(loop.end(job).finishes) == [0, 1, 2]
    loop.check_idle(free)


def test_a_queued_turn_of_a_deleted_session_leaves_the_queue(loop: Stepped) -> None:
    free = loop.free
    loop.end(submit(loop.engine, turn("doomed", "begin", max_tokens=2)))
    busy = submit(loop.engine, *[make_request("busy", **ENDLESS)] * 4)
    loop.until(lambda: len(loop.rows) == 3, "its rows run")
    others = [submit(loop.engine, make_request("busy", **ENDLESS)) for _ in range(3)]
    loop.until(lambda: len(loop.rows) == 4, "all places are taken")
    queued = submit(loop.engine, turn("doomed", " go on", **ENDLESS))
    loop.step(2)
    waiting = loop.engine.scheduler.admission.waiting_rows
    assert [row.phase for row in job_rows(loop, queued)] == [Phase.WAITING]
    assert loop.engine.model_runner.pool.turns.delete("doomed") == 1
    error = loop.end(queued).finishes[0].error
    assert error is not None and (error.kind, error.given) == (ErrorKind.SESSION_NOT_FOUND, "doomed")
    assert loop.engine.scheduler.admission.waiting_rows == waiting - 1
    for job in (busy, *others):
        loop.cancel(job)
        loop.end(job)
    loop.check_idle(free)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_a_kept_turn_is_not_reported_as_timed_out(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """Its deadline passes between its last token and its commit to disk."""
    with stepped(model, PoolConfig(state_db=str(tmp_path / "s.db")), overlap_on_cpu=overlap) as loop:
        gate, writer = threading.Event(), loop.engine.model_runner.pool._store.writer  # type: ignore[union-attr]
        commit = writer._transaction
        monkeypatch.setattr(writer, "_transaction", lambda jobs: (gate.wait(), commit(jobs))[1])
        job = submit(loop.engine, turn("s", "one", max_tokens=4, ignore_eos=True), timeout_s=1000.0)
        loop.until(lambda: any(row.has_answered for row in job_rows(loop, job)), "the turn is recorded")
        loop.engine.jobs.expire(time.monotonic() + 2000.0)
        loop.step(3)
        assert not job.finishes, "its outcome is not known yet"
        gate.set()
        finish = loop.end(job).finishes[0]
        assert (finish.reason, finish.error) == (FinishReason.LENGTH, None)


@pytest.mark.parametrize("durability", rest_slow(["log", "lazy", "turn", ""]))
@pytest.mark.parametrize("end", ["confirmed", "confirmed early", "cancelled", "never confirmed", "deleted", "stopped"])
def test_a_turn_is_stored_only_after_its_start_was_confirmed(
    model: Path, tmp_path: Path, durability: str, end: str
) -> None:
    """Else a lost engine has stored it, and another repeats it.

    The HTTP worker did not know of the turn when its engine was lost.
    """
    pool = PoolConfig(state_db=str(tmp_path / "s.db") if durability else "", durability=durability or "log")
    with stepped(model, pool, overlap_on_cpu=True) as loop:
        engine, free = loop.engine, loop.free

        def said(session_id: str, prompt: str) -> bytes:
            job = submit(engine, turn(session_id, prompt, max_tokens=4, ignore_eos=True))
            return loop.end(job).texts[0]

        job = submit(engine, turn("s", "one", max_tokens=4, ignore_eos=True), must_confirm=True, return_token_ids=True)
        if end == "confirmed early":
            loop.until(job.started.is_set, "its start is reported")
            engine.confirm_turn(job.job.job_id)
        else:
            loop.until(lambda: any(row.phase is Phase.ANSWERED for row in engine.jobs._leased), "the turn is complete")
            loop.step(5)
            assert not job.finishes and not engine.model_runner.pool.turns.unlogged
        if end == "confirmed":
            engine.confirm_turn(job.job.job_id)
        elif end == "cancelled":
            loop.cancel(job)
        elif end == "never confirmed":
            engine.jobs.expire(time.monotonic() + CONFIRM_TIMEOUT_S)
        elif end == "deleted":
            engine.model_runner.pool.turns.delete("s")
        elif end == "stopped":
            engine.jobs.fail_all(ErrorInfo(kind=ErrorKind.DRAINING, message="the service stops"))
        loop.end(job)
        engine.confirm_turn(job.job.job_id)
        is_kept = end.startswith("confirmed")
        assert [finish.reason is FinishReason.LENGTH for finish in job.finishes.values()] == [is_kept] * (
            end != "stopped"
        )
        said("twin", "one") if is_kept else None
        assert said("s", " two") == said("twin", " two")
        for name in ("s", "twin"):
            engine.model_runner.pool.turns.delete(name)
        loop.check_idle(free)


def test_a_branch_is_confirmed_when_it_is_complete(loop: Stepped) -> None:
    request = turn("tree", "one", branch_from=0, max_tokens=4, ignore_eos=True, chunk_size=1)
    job = submit(loop.engine, request, must_confirm=True, return_token_ids=True)
    loop.until(lambda: any(row.phase is Phase.ANSWERED for row in loop.engine.jobs._leased), "the turn is complete")
    loop.step()
    reports = [delta for events in job.events for delta in events.deltas if delta.session_history is not None]
    assert [one.is_complete_branch for one in reports] == [False, True] and not job.finishes
    loop.engine.confirm_turn(job.job.job_id)
    assert loop.end(job).finishes[0].dialogue_idx == 1
    assert loop.engine.model_runner.pool.turns.delete("tree") == 1


def test_a_confirmation_does_not_hold_up_the_jobs_behind_it(loop: Stepped) -> None:
    """Within a long step, only arrivals are admitted. They would wait for its end."""
    loop.engine.confirm_turn("an earlier job")
    job = submit(loop.engine, make_request("a", max_tokens=1))
    assert loop.engine._inbox.run_arrivals() and job.answered.is_set()
    loop.end(job)


def test_a_turn_that_still_samples_times_out(loop: Stepped) -> None:
    free = loop.free
    job = submit(loop.engine, turn("late", "one", **ENDLESS), timeout_s=1000.0)
    loop.until(job.started.is_set, "it samples")
    loop.engine.jobs.expire(time.monotonic() + 2000.0)
    assert loop.end(job).finishes[0].reason is FinishReason.TIMEOUT
    loop.check_idle(free)


def test_a_deadline_does_not_apply_to_a_later_job_of_the_same_id(loop: Stepped) -> None:
    loop.end(named(loop, "same", make_request("a", max_tokens=1), timeout_s=100.0))
    later = named(loop, "same", make_request("a", **ENDLESS))
    loop.step()
    loop.engine.jobs.expire(time.monotonic() + 101)
    loop.step(2)
    assert not later.done.is_set()
    loop.cancel(later)
    loop.end(later)
    loop.check_idle()


def named(loop: Stepped, job_id: str, *rows: GenerateRequest, **fields: Any) -> RunningJob:
    running = RunningJob(Job(job_id=job_id, rows=list(rows), **fields))
    loop.engine.submit(running.job, running.sink, running.on_admitted)
    return running


def test_a_turn_that_ends_while_paused_is_read_to_its_end(model: Path) -> None:
    """It was preempted while its last token was in flight. The session's state still has to read that token."""
    with stepped(model, overlap_on_cpu=True) as loop:
        free = loop.free
        job = submit(loop.engine, turn("s", "one", max_tokens=3, ignore_eos=True), priority=Priority.BATCH)
        loop.until(lambda: any(len(row.token_ids) - row.prompt_end == 3 for row in loop.rows), "it is launched")
        row, admission = loop.rows[0], loop.engine.scheduler.admission
        assert len(row.output.tokens) < 3
        admission.queue_of(row.job).pause(row)
        loop.engine.scheduler.remove_running(row)
        while loop.engine._in_flight:
            loop.engine._process_outputs(loop.engine._in_flight.popleft())
        assert (row.phase, admission.paused_rows) == (Phase.CLOSING, 0)
        assert loop.end(job).finishes[0].reason is FinishReason.LENGTH
        again = loop.end(submit(loop.engine, turn("s", " two", max_tokens=3, ignore_eos=True)))
        loop.end(submit(loop.engine, turn("twin", "one", max_tokens=3, ignore_eos=True)))
        assert loop.end(submit(loop.engine, turn("twin", " two", max_tokens=3, ignore_eos=True))).texts == again.texts
        assert (
            loop.engine.model_runner.pool.turns.delete("s") == loop.engine.model_runner.pool.turns.delete("twin") == 1
        )
        loop.check_idle(free)


def test_an_answered_turn_frees_its_running_slot(loop: Stepped) -> None:
    """One more step reads its last token for the session. A waiting row starts in the same step."""
    free = loop.free
    first = submit(loop.engine, turn("closing", "one", max_tokens=3, ignore_eos=True))
    others = [submit(loop.engine, make_request("busy", **ENDLESS)) for _ in range(4)]
    loop.until(lambda: any(row.phase is Phase.CLOSING for row in job_rows(loop, first)), "the turn has its answer")
    assert loop.engine.scheduler.admission.waiting_rows == 1
    loop.step()
    assert loop.engine.scheduler.admission.waiting_rows == 0
    assert loop.end(first).finishes[0].reason is FinishReason.LENGTH
    for job in others:
        loop.cancel(job)
        loop.end(job)
    assert loop.engine.model_runner.pool.turns.delete("closing") == 1
    loop.check_idle(free)


def test_text_held_for_a_stop_is_shown_at_a_timeout(loop: Stepped) -> None:
    """The text may be the beginning of a stop string."""
    said = loop.end(submit(loop.engine, make_request("hold", max_tokens=8, ignore_eos=True))).texts[0]
    held = {**ENDLESS, "chunk_size": 1, "stop_strings": [said + b" and no further"]}
    job = submit(loop.engine, make_request("hold", **held), timeout_s=1000.0)
    loop.until(lambda: any(len(row.output.tokens) == 4 for row in job_rows(loop, job)), "some is held")
    tokens = job_rows(loop, job)[0].output.tokens
    assert not job.texts
    loop.engine.jobs.expire(time.monotonic() + 2000.0)
    finish = loop.end(job).finishes[0]
    assert (finish.reason, finish.completion_tokens) == (FinishReason.TIMEOUT, 4)
    assert job.texts[0] == b"".join(TOKENIZER.byte_table[token] for token in tokens) != b""
    loop.check_idle()


def test_a_cancelled_turn_frees_the_state_before_its_held_text(loop: Stepped) -> None:
    free = loop.free
    said = loop.end(submit(loop.engine, turn("said", "hold", max_tokens=8, ignore_eos=True))).texts[0]
    job = submit(loop.engine, turn("held", "hold", **ENDLESS, stop_strings=[said + b" and no further"]))
    loop.until(lambda: any(row.rollback_state for row in job_rows(loop, job)), "some text is held")
    loop.cancel(job)
    loop.end(job)
    assert loop.engine.model_runner.pool.turns.delete("said") == 1
    loop.check_idle(free)


def test_a_running_job_keeps_its_deadline_when_those_of_ended_jobs_are_removed(loop: Stepped) -> None:
    running = named(loop, "running", make_request("a", **ENDLESS), timeout_s=1000.0)
    for number in range(2 * DEADLINES_KEPT):
        ended = named(loop, f"n{number}", make_request("a", **ENDLESS), timeout_s=2000.0)
        loop.step()
        loop.cancel(ended)
        loop.end(ended)
    loop.engine.jobs.expire(time.monotonic() + 1001.0)
    assert loop.end(running).finishes[0].reason is FinishReason.TIMEOUT
    loop.check_idle()


def test_a_failed_step_ends_the_jobs_whose_rows_it_holds(loop: Stepped) -> None:
    """A shared prompt counts while one of its own answers runs. The prompt itself has been read."""
    running, (first, shared, later, last) = job_of(4)
    shared.may_sample, shared.fork_count, shared.phase = False, 2, Phase.DONE
    affects = loop.engine.jobs.affects_live_job
    for live, expected in (([], False), ([first], False), ([later], True), ([last], False), ([first, later], True)):
        running.live = dict.fromkeys(live)
        assert affects(shared) is expected
    first.phase = Phase.DONE
    assert not affects(first), "a row that samples has no continuations"
    first.phase = Phase.RUNNING
    assert affects(first)


def test_a_failure_after_the_last_row_ended_is_not_the_jobs(loop: Stepped, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is complete but its last events are not sent yet."""
    job = submit(loop.engine, make_request("a", max_tokens=2, ignore_eos=True))
    with monkeypatch.context() as patched:
        patched.setattr(loop.engine.jobs, "deliver", lambda: None)
        loop.until(lambda: job.answered.is_set() and not job_rows(loop, job), "its row has ended")
    loop.engine.jobs.abandon_all(ErrorInfo(kind=ErrorKind.ENGINE_LOST, message="lost"))
    assert job.done.is_set() and job.events[-1].error is None
    assert job.finishes[0].completion_tokens == 2 and job.texts[0]
    loop.check_idle()


def test_a_failed_job_sends_nothing_after_its_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step fails while an earlier one is in flight. The earlier one has scores of the job's prompt."""
    with stepped(model, overlap_on_cpu=True) as loop:
        free = loop.free
        received = {"prompt_logprobs": PromptLogprobs(), "use_prefix_cache": False}
        job = submit(loop.engine, make_request("a prompt of many steps " * 20, max_tokens=0, **received))
        loop.step(2)
        assert loop.engine._in_flight and not job.done.is_set()
        with monkeypatch.context() as patched:
            patched.setattr(loop.engine.model_runner, "launch", lambda *_: 1 // 0)
            loop.step()
        loop.step(3)
        assert not loop.engine._in_flight
        assert [events.done for events in job.events].count(True) == 1 and job.events[-1].error is not None
        loop.check_idle(free)


def test_shared_prompts_never_hold_all_slots(model: Path) -> None:
    """A shared prompt holds a slot until all its continuations run. They need slots, too."""
    pool = PoolConfig(state_db="", l1_sessions=0, l2_sessions=0, prefix_cache_slots=0)
    with stepped(model, pool, max_running=4) as loop:
        free = loop.free
        held = [loop.engine.model_runner.pool.tiers.allocate() for _ in range(free - 4)]  # as sessions do
        jobs = [submit(loop.engine, make_request(f"hello there number {i}", n=3, max_tokens=4)) for i in range(12)]
        for job in jobs:
            assert len(loop.end(job).finishes) == 3
        for slot in held:
            assert slot is not None
            loop.engine.model_runner.pool.tiers.free(slot)
        loop.check_idle(free)
