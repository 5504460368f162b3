"""Preempted rows on a real engine: the same texts as without preemption, and nothing is left behind."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rwkv_batch.core.fair_queue import FairQueue
from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.sequence import Sequence
from rwkv_batch.engine import Engine
from rwkv_batch.request import FinishReason, GenerateRequest, Priority
from rwkv_batch.runner.step_sampling import InFlightStep
from sampling.params import SamplingParams
from state_pool.config import PoolConfig
from test.conftest import rest_slow
from test.harness import RunningJob, call, free_slots, make_request, run, started_engine, submit, turn

STEPS_BETWEEN = 8


@pytest.fixture(scope="module", params=rest_slow(["overlapped", "plain"]))
def engine(model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    pool = PoolConfig(state_db="", l1_sessions=4, l2_sessions=4)
    with started_engine(model, pool, max_running=8, overlap_on_cpu=request.param == "overlapped") as engine:
        yield engine


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> list[Sequence]:
    """Every preempted row, once per preemption."""
    seen: list[Sequence] = []
    pause = FairQueue.pause

    def noting(queue: FairQueue, sequence: Sequence) -> None:
        seen.append(sequence)
        pause(queue, sequence)

    monkeypatch.setattr(FairQueue, "pause", noting)
    return seen


def bulk() -> list[GenerateRequest]:
    """Rows of every kind whose sampler has penalties."""
    rows = [
        make_request(
            f"bulk row {i} " * (1 + i % 5),
            max_tokens=20 + 3 * i,
            ignore_eos=True,
            stop_strings=[b"never said"],
            sampling=SamplingParams(
                seed=i, top_k=40, presence_penalty=0.7, frequency_penalty=0.3, penalty_decay=0.99, top_logprobs=i % 2
            ),
        )
        for i in range(14)
    ]
    return [*rows, make_request("many", n=5, max_tokens=30, ignore_eos=True, sampling=SamplingParams(seed=50))]


def chat_until(engine: Engine, job: RunningJob) -> None:
    """Submit interactive requests of four clients until the job ends. They come every few steps."""
    launch, steps, chats = engine.model_runner.launch, itertools.count(), list[RunningJob]()

    def launching(*arguments: Any) -> InFlightStep:
        if next(steps) % STEPS_BETWEEN == 0:
            chats.extend(
                submit(engine, make_request("hi", max_tokens=3, ignore_eos=True), client=f"chat{i}") for i in range(4)
            )
        return launch(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine.model_runner, "launch", launching)
        job.wait()
    for chat in chats:
        chat.wait()


def test_preempted_rows_give_the_same_text(engine: Engine, paused: list[Sequence]) -> None:
    expected = run(engine, *bulk(), client="bulk").all_texts
    assert not paused
    job = submit(engine, *bulk(), client="bulk")
    chat_until(engine, job)
    assert len(paused) > 10 and len(set(paused)) > 3
    assert job.all_texts == expected
    assert all(finish.reason is FinishReason.LENGTH for finish in job.finishes.values())


def test_preempted_sessions_give_the_same_text(engine: Engine, paused: list[Sequence]) -> None:
    def turns(name: str, disturb: bool) -> list[bytes]:
        texts = []
        for prompt in ("one", " two", " three"):
            sampling = SamplingParams(temperature=1.0, seed=3, frequency_penalty=0.5)
            jobs = [
                submit(
                    engine,
                    turn(f"{name}{i}", prompt, max_tokens=25, ignore_eos=True, stop_strings=[b"ab", b"e t"],
                         sampling=sampling),
                    client="bulk", priority=Priority.BATCH,
                )
                for i in range(7)
            ]  # fmt: skip
            if disturb:
                for job in jobs:
                    chat_until(engine, job)
            texts += [job.wait().texts.get(0, b"") for job in jobs]
        return texts

    expected = turns("alone", False)
    assert turns("among", True) == expected
    assert any(sequence.lease is None and sequence.request.session is not None for sequence in paused)
    call(engine, "session_delete", session_id="a", delete_prefix=True)


@pytest.mark.parametrize("way", ["cancel", "timeout"])
def test_paused_rows_end_and_leave_nothing(engine: Engine, paused: list[Sequence], way: str) -> None:
    free = free_slots(engine)
    endless = [make_request("endless", max_tokens=10**6, ignore_eos=True)] * 10
    job = submit(engine, *endless, client="bulk", timeout_s=1000.0 if way == "timeout" else None)
    assert job.started.wait(60)
    chats = [submit(engine, make_request("hi", max_tokens=10**6, ignore_eos=True), client=f"c{i}") for i in range(4)]
    for chat in chats:
        assert chat.started.wait(60)
    assert paused
    if way == "cancel":
        engine.cancel(job.job.job_id)
    else:
        engine._inbox.put(lambda: engine.jobs.expire(time.monotonic() + 2000.0))
    reason = FinishReason.CANCELLED if way == "cancel" else FinishReason.TIMEOUT
    assert {finish.reason for finish in job.wait().finishes.values()} == {reason}
    for chat in chats:
        engine.cancel(chat.job.job_id)
        chat.wait()
    run(engine, *[make_request("after", max_tokens=2)] * 12)
    status = call(engine, "status")
    assert (status["free_slots"], status["paused_rows"], status["running_rows"]) == (free, 0, 0)
    assert len(engine.scheduler.admission.free_req_slots) == engine.model_runner.limits.num_req_slots


def test_no_row_waits_for_the_prefix_of_a_preempted_row(model: Path, paused: list[Sequence]) -> None:
    """It resumes after the rows before it end, which may take hours."""
    system = "A long system prompt that everybody sends. " * 60
    endless = {"max_tokens": 10**6, "ignore_eos": True}
    pool = PoolConfig(state_db="")
    with started_engine(model, pool, max_running=4, prefill_tokens_per_step=8, prefill_chunk=8) as engine:
        run(engine, make_request(system + "first", max_tokens=1))
        launch, chats = engine.model_runner.launch, list[RunningJob]()

        def launching(rows: list[ScheduledRow], *more: Any) -> InFlightStep:
            if any(row.sequence.cache_points for row in rows) and not chats:  # it reads its prompt
                chats.extend(submit(engine, make_request("hi", **endless), client=name) for name in ("a", "b"))
            return launch(rows, *more)

        rows = [make_request("x", **endless), make_request("y", **endless), make_request(system + "second", **endless)]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(engine.model_runner, "launch", launching)
            jobs = [submit(engine, *rows, client="bulk", priority=Priority.BATCH)]
            assert jobs[0].started.wait(60)
        jobs += chats
        assert len(jobs) == 3 and all(job.started.wait(60) for job in jobs)
        assert [sequence.row for sequence in paused] == [2] and paused[0].cache_points, "it was reading"
        assert submit(engine, make_request(system + "third", max_tokens=1), client="c").done.wait(60), (
            "another reads it"
        )
        for job in jobs:
            engine.cancel(job.job.job_id)
            job.wait()
