"""The engine in-process on a tiny random model: batching, isolation, fairness, ends."""

from __future__ import annotations

import math
import queue
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rwkv_batch import calls
from rwkv_batch.config import EngineConfig
from rwkv_batch.core import shares
from rwkv_batch.engine import Engine
from rwkv_batch.errors import ErrorKind, ServiceError, StartupError
from rwkv_batch.request import FinishReason, GenerateRequest, SessionTurn
from rwkv_batch.runner.step_sampling import InFlightStep, StepSampler
from sampling.params import SamplingParams
from state_pool.config import PoolConfig
from test.conftest import rest_slow
from test.harness import (
    GREEDY,
    TOKENIZER,
    RunningJob,
    call,
    free_slots,
    make_request,
    paused_engine,
    run,
    started_engine,
    submit,
    turn,
)
from test.serving import wait_for

SAMPLED = SamplingParams(
    temperature=1.0, top_k=50, top_p=0.8, presence_penalty=0.5, frequency_penalty=0.2, penalty_decay=0.99, seed=7
)


@pytest.fixture(scope="module", params=rest_slow(["overlapped", "plain"]))
def engine(model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with started_engine(model, overlap_on_cpu=request.param == "overlapped") as engine:
        yield engine


@pytest.fixture(scope="module")
def bounded(model: Path) -> Iterator[Engine]:
    with started_engine(model, max_waiting_rows=10, max_waiting_rows_per_client=5) as engine:
        yield engine


def test_a_job_that_follows_closely_begins_in_the_step_of_a_burst(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, late, begun = engine.scheduler, list[RunningJob](), list[int]()
    is_burst, step = scheduler.is_burst, engine.step

    def follow() -> bool:
        found = is_burst()
        if found and not late:
            late.append(submit(engine, make_request("c")))
        return found

    def begin() -> bool:
        begun.append(scheduler.admission.interactive.num_waiting)
        return step()

    monkeypatch.setattr(scheduler, "is_burst", follow)
    monkeypatch.setattr(engine, "step", begin)
    with paused_engine(engine):
        jobs = [submit(engine, make_request(text)) for text in "ab"]
    for running in jobs:
        running.wait()
    assert max(begun) == 3
    late[0].wait()


@pytest.mark.slow
def test_alone_or_among_two_hundred_others(engine: Engine) -> None:
    rng = random.Random(3)
    asked = [make_request("The weather in Paris is", sampling=one, max_tokens=40) for one in (GREEDY, SAMPLED)]
    alone = [run(engine, one).texts[0] for one in asked]
    others = [
        make_request("x" * rng.randint(1, 90), max_tokens=rng.randint(1, 60), sampling=SamplingParams(seed=i, top_k=20))
        for i in range(200)
    ]
    background = submit(engine, *others)
    under_load = [submit(engine, one) for one in asked]
    assert [one.wait().texts[0] for one in under_load] == alone
    assert len(background.wait().finishes) == 200
    other_seed = SamplingParams(temperature=1.0, seed=8)
    assert (
        run(engine, make_request("The weather in Paris is", sampling=other_seed, max_tokens=40)).texts[0] not in alone
    )


def test_chunks_of_a_prompt_do_not_change_the_text(model: Path, engine: Engine) -> None:
    prompt = "one two three " * 60
    whole = run(engine, make_request(prompt, max_tokens=24)).texts[0]
    with started_engine(model, prefill_chunk=7, prefill_tokens_per_step=7) as chopping:
        assert run(chopping, make_request(prompt, max_tokens=24)).texts[0] == whole


def test_deltas_make_up_the_text(engine: Engine) -> None:
    whole = run(engine, make_request("Hello", chunk_size=0, max_tokens=30))
    assert len(whole.events) == 1
    for chunk_size in (1, 4, 7):
        pieces = run(engine, make_request("Hello", chunk_size=chunk_size, max_tokens=30))
        assert pieces.texts == whole.texts
        assert sum(delta.num_tokens for events in pieces.events for delta in events.deltas) == 30


def test_counts_and_reasons(engine: Engine) -> None:
    long = run(engine, make_request("Hello there", max_tokens=9)).finishes[0]
    assert (long.reason, long.completion_tokens) == (FinishReason.LENGTH, 9)
    assert long.prompt_tokens == len(TOKENIZER.encode("Hello there"))
    text = run(engine, make_request("Hello there", max_tokens=9)).texts[0].decode(errors="ignore")
    stop = text[3:6].encode()
    stopped = run(engine, make_request("Hello there", max_tokens=9, stop_strings=[stop]))
    assert stopped.finishes[0].reason is FinishReason.STOP
    assert stop not in stopped.texts[0] and text.encode().startswith(stopped.texts[0])


def test_n_continuations_equal_rows_of_their_own(engine: Engine) -> None:
    sampling = SamplingParams(temperature=1.0, seed=100)
    prompt = "Tell me a story about"
    together = run(engine, make_request(prompt, n=4, sampling=sampling), make_request("another", max_tokens=3))
    for i in range(4):
        alone = run(engine, make_request(prompt, sampling=SamplingParams(temperature=1.0, seed=100 + i)))
        assert together.texts[i] == alone.texts[0]
    assert together.finishes[4].completion_tokens == 3
    one_token = run(engine, make_request("a", n=3, sampling=sampling))
    assert len(one_token.finishes) == 3


@pytest.mark.parametrize(
    ("client", "limit"), [("", "limit of 10 (max_waiting_rows)"), ("key", "limit of 5 for one client")]
)
def test_the_queue_is_bounded_and_a_refused_job_leaves_nothing(bounded: Engine, client: str, limit: str) -> None:
    least = 6 if client else 11
    with pytest.raises(ServiceError) as refusal:
        run(bounded, *[make_request("x")] * least, client=client)
    assert refusal.value.info.kind is ErrorKind.OVERLOADED and refusal.value.info.retry_after_s
    assert limit in str(refusal.value)
    assert len(run(bounded, *[make_request("x")] * (least - 1), client=client).finishes) == least - 1


@pytest.mark.parametrize("client", ["", "key"])
def test_a_job_that_another_engine_has_admitted_is_not_refused(bounded: Engine, client: str) -> None:
    assert len(run(bounded, *[make_request("x")] * 11, client=client, was_admitted=True).finishes) == 11


def test_an_id_of_a_running_job_is_refused(engine: Engine) -> None:
    with paused_engine(engine):
        first = submit(engine, make_request("one"))
        second = RunningJob(msgspec.structs.replace(first.job, rows=[make_request("two")]))
        engine.submit(second.job, second.sink, second.on_admitted)
    second.wait()
    assert second.refusal is not None and second.refusal.info.field == "job_id"
    assert "is in use; choose another" in str(second.refusal)
    assert first.wait().texts[0] and not second.events


def test_cancel_frees_every_slot(engine: Engine) -> None:
    before = free_slots(engine)
    jobs = [submit(engine, *[make_request("cancel me", max_tokens=100000, ignore_eos=True)] * 3) for _ in range(40)]
    assert jobs[0].started.wait(60)
    for job in jobs:
        engine.cancel(job.job.job_id)
    for job in jobs:
        assert {finish.reason for finish in job.wait().finishes.values()} == {FinishReason.CANCELLED}
    assert free_slots(engine) == before


def test_timeout_ends_the_rows(engine: Engine) -> None:
    for seconds in (0.3, 3.0, 30.0):  # a busy machine may sample nothing for a while
        ended = run(engine, make_request("endless", max_tokens=10**6, ignore_eos=True), timeout_s=seconds)
        assert ended.finishes[0].reason is FinishReason.TIMEOUT
        if ended.finishes[0].completion_tokens:
            break
    assert ended.finishes[0].completion_tokens > 0 and ended.texts[0]


def test_label_is_cancelled_together(engine: Engine) -> None:
    kept = submit(engine, make_request("keep", max_tokens=10**6, ignore_eos=True), label="v1")
    cleaned = [
        submit(engine, make_request("x", max_tokens=10**6, ignore_eos=True), label="big_batch") for _ in range(3)
    ]
    assert all(job.answered.wait(60) for job in cleaned)
    assert call(engine, "count_label", label="big_batch") == 3
    assert call(engine, "status")["jobs"] == {"v1": 1, "big_batch": 3}
    assert call(engine, "cancel_label", label="big_batch", client="another") == 0
    assert call(engine, "cancel_label", label="big_batch") == 3
    assert all(job.wait().finishes[0].reason is FinishReason.CANCELLED for job in cleaned)
    assert call(engine, "status")["jobs"] == {"v1": 1}
    engine.cancel(kept.job.job_id)
    kept.wait()


@pytest.mark.parametrize(
    ("rows", "field"),
    [
        ([turn("twice", "one"), turn("twice", "two")], "session_id"),
        ([turn("twice", "one"), make_request("two")], "session_id"),
        ([turn("twice", "one", n=2)], "session_id"),
        ([make_request("x", session=SessionTurn(session_id="empty", resume_prompt=[]))], "prompt"),
    ],
    ids=["two turns", "another row", "two continuations", "nothing to read"],
)
def test_an_invalid_session_turn_is_refused(engine: Engine, rows: list[GenerateRequest], field: str) -> None:
    with pytest.raises(ServiceError) as refusal:
        run(engine, *rows)
    assert (refusal.value.info.kind, refusal.value.info.field) == (ErrorKind.INVALID_FIELD, field)
    assert call(engine, "session_status", limit=10, offset=0).total == 0


def test_logprobs_come_with_the_text(engine: Engine) -> None:
    plain = run(engine, make_request("Hello", max_tokens=6))
    reported = run(
        engine, make_request("Hello", max_tokens=6, sampling=SamplingParams(temperature=0.0, top_logprobs=3))
    )
    entries = reported.logprobs
    assert reported.texts == plain.texts
    assert b"".join(entry.token for entry in entries) == reported.texts[0]
    for entry in entries:
        assert len(entry.top) == 3 and entry.logprob <= 0
        assert entry.top[0] == (entry.token, pytest.approx(entry.logprob))
        assert [value for _, value in entry.top] == sorted((value for _, value in entry.top), reverse=True)


def test_mixed_parameters_share_a_step(engine: Engine) -> None:
    kinds = [SamplingParams(temperature=0.0), SAMPLED, SamplingParams(top_p=0.5, seed=1), SamplingParams(seed=2)]
    alone = [run(engine, make_request("mixed", sampling=kind)).texts[0] for kind in kinds]
    together = run(engine, *[make_request("mixed", sampling=kind) for kind in kinds])
    assert together.all_texts == alone


def test_a_failed_step_ends_its_jobs_and_not_the_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    free = free_slots(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine.model_runner, "launch", lambda *_: 1 / 0)
        failed = submit(engine, make_request("x")).wait()
    assert failed.events[-1].error is not None and "ZeroDivisionError" in failed.events[-1].error.message
    assert run(engine, make_request("x", max_tokens=2)).finishes[0].completion_tokens == 2
    assert free_slots(engine) == free


def test_stopped_engine_refuses(model: Path) -> None:
    with started_engine(model) as engine:
        running = submit(engine, make_request("x", max_tokens=10**6, ignore_eos=True))
        assert running.started.wait(60)
    assert running.wait().events[-1].error is not None
    refused = submit(engine, make_request("x"))
    assert refused.refusal is not None and refused.refusal.info.kind is ErrorKind.DRAINING


def test_start_raises_any_error_of_loading(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leaving(*_: object) -> None:
        raise SystemExit(3)

    monkeypatch.setattr("rwkv_batch.engine.ModelRunner", leaving)
    engine = Engine(EngineConfig(model_path=str(model), pool=PoolConfig(state_db=""), devices=("cpu",)))
    with pytest.raises(SystemExit):
        engine.start()
    late = submit(engine, make_request("x"))
    assert late.refusal is not None and late.refusal.info.kind is ErrorKind.ENGINE_LOST


def test_a_sampler_is_made_once_for_all_its_names(engine: Engine) -> None:
    expected = engine.model_runner.step_sampler.sampler("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(expected), "__init__", lambda *_: pytest.fail("made twice"))
        assert engine.model_runner.step_sampler.sampler("flashinfer") is expected


def test_a_lost_device_ends_the_engine_and_all_jobs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with started_engine(model) as engine:
        running = submit(engine, make_request("x", max_tokens=10**6, ignore_eos=True))
        assert running.started.wait(60)
        answers: queue.Queue[Any] = queue.Queue()

        def lost(*_: object) -> InFlightStep:
            engine.call(calls.ListSessions(10, 0), answers.put)  # after the engine's end
            raise RuntimeError("the device is lost")

        monkeypatch.setattr(engine.model_runner, "is_device_lost", lambda: True)
        monkeypatch.setattr(engine.model_runner, "launch", lost)
        error = running.wait().events[-1].error
        assert error is not None and error.kind is ErrorKind.ENGINE_LOST
        assert answers.get(timeout=60).info.kind is ErrorKind.ENGINE_LOST
        engine._thread.join(60)
        assert not engine.is_alive
        late = submit(engine, make_request("x"))
        assert late.refusal is not None and late.refusal.info.kind is ErrorKind.ENGINE_LOST


def test_pieces_on_an_unsupported_device_are_refused_at_start(model: Path) -> None:
    no_graphs = r"batch_step_layers 2 needs .*: decode graphs need the cuda kernels on every device, not cpu; leave"
    with pytest.raises(StartupError, match=no_graphs), started_engine(model, batch_step_layers=2):
        pass


def test_an_error_between_two_pieces_ends_the_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ending only the step's jobs is not enough. The state of the overtaking rows is unknown."""
    with started_engine(model) as engine:
        launch, late = engine.model_runner.launch, []

        def in_pieces(rows: Any, started: Any, after: Any = (), between: Any = None) -> InFlightStep:
            if between is not None:
                late.append(submit(engine, make_request("x")))
                between()
            return launch(rows, started, after)

        monkeypatch.setattr(type(engine.model_runner), "has_pieces", True)
        monkeypatch.setattr(engine.model_runner, "launch", in_pieces)
        monkeypatch.setattr(engine.scheduler, "schedule_interactive_prefill", lambda _: 1 / 0)
        bulk = submit(engine, *[make_request("x")] * 9)
        for lost in (bulk.wait().events[-1], late[0].wait().events[-1]):
            assert lost.error is not None and lost.error.kind is ErrorKind.ENGINE_LOST
        engine._thread.join(60)
        assert not engine.is_alive


@pytest.mark.parametrize("at_work", ["split", "read"])
def test_prefill_that_arrives_while_the_host_works_on_a_step_overtakes_it(
    model: Path, monkeypatch: pytest.MonkeyPatch, at_work: str
) -> None:
    """It overtakes before inputs of a step with batch rows are built.

    It also overtakes before a step's tokens are delivered.
    """
    with started_engine(model) as engine:
        asked, launch, let_in = (
            getattr(engine.model_runner, at_work),
            engine.model_runner.launch,
            engine._interleaver._launch,
        )
        late: list[RunningJob] = []
        launched: list[int] = []

        def while_it_comes(*given: Any, **named: Any) -> Any:
            if not late and engine.scheduler.admission.batch.num_running:
                late.append(submit(engine, make_request("x", max_tokens=1)))
            return asked(*given, **named)

        def in_order(rows: Any, started: Any, after: Any = (), between: Any = None) -> InFlightStep:
            launched.extend([len(rows)] if late else [])
            return launch(rows, started, after)

        within: list[int] = []
        monkeypatch.setattr(type(engine.model_runner), "has_pieces", True)
        monkeypatch.setattr(engine.model_runner, at_work, while_it_comes)
        monkeypatch.setattr(engine.model_runner, "launch", in_order)
        engine._interleaver._launch = lambda rows: within.append(len(rows)) or let_in(rows)  # type: ignore[func-returns-value]
        bulk = submit(engine, *[make_request("a prompt", max_tokens=20, ignore_eos=True)] * 9)
        assert all(finish.completion_tokens == 20 for finish in bulk.wait().finishes.values())
        assert late[0].wait().finishes[0].completion_tokens == 1
        assert within == [1] and launched[:2] == [1, 9], "it ran before the batch rows"


def test_the_last_step_with_batch_work_is_released(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a long prompt would stay in memory until the next request."""
    with started_engine(model) as engine:
        launch, seen = engine.model_runner.launch, []

        def launched(rows: Any, started: Any, after: Any = (), between: Any = None) -> InFlightStep:
            seen.append(len(engine._interleaver._step_jobs))
            return launch(rows, started, after)

        monkeypatch.setattr(type(engine.model_runner), "has_pieces", True)
        monkeypatch.setattr(engine.model_runner, "launch", launched)
        run(engine, *[make_request("a prompt", max_tokens=4)] * 9)
        assert max(seen) == 1
        wait_for(lambda: not engine._interleaver._step_jobs, 20, "the job is forgotten")


def test_prompts_of_batch_rows_are_read_in_pieces_while_interactive_requests_come(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a thousand of their tokens takes longer than decoding all rows. Each takes one step."""
    with started_engine(model) as engine:
        launch, reported = engine.model_runner.launch, []

        def launched(rows: Any, started: Any, after: Any = (), between: Any = None) -> InFlightStep:
            if any(row.num_tokens > 1 for row in rows):
                reported.append((rows[0].sequence.job.is_batch, between is not None))
            return launch(rows, started, after)

        monkeypatch.setattr(shares, "INTERACTIVE_WINDOW_S", math.inf)  # jobs may arrive slowly
        monkeypatch.setattr(type(engine.model_runner), "has_pieces", True)
        monkeypatch.setattr(engine.model_runner, "launch", launched)
        for rows in (9, 1, 9):
            run(engine, *[make_request("a prompt of some tokens")] * rows)
        assert set(reported[:1]) == {(True, False)}, "the batch is alone"
        assert set(reported[1:]) == {(False, False), (True, True)}, "nothing runs before an awaited prompt"


def test_steps_on_a_cpu_reuse_the_memory_of_their_logits(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory costs a page fault per 4 KiB. All compute threads wait for these faults."""
    seen: list[torch.Tensor] = []  # kept alive, so that no address is reused
    plain = StepSampler.sample

    def sample(self: StepSampler, step: InFlightStep, logits: torch.Tensor, last_tokens: Any) -> None:
        seen.append(logits)
        plain(self, step, logits, last_tokens)

    monkeypatch.setattr(StepSampler, "sample", sample)
    with started_engine(model) as engine:
        run(engine, *(make_request(f"row {i}", max_tokens=8, ignore_eos=True) for i in range(5)))
    assert len(seen) >= 8
    assert {logits.data_ptr() for logits in seen} == {seen[0].data_ptr()}
