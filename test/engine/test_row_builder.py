"""What a job's rows may request, and the rows it starts with. No model."""

from __future__ import annotations

from typing import Any

import pytest

from rwkv_batch.core.row_builder import RowBuilder
from rwkv_batch.core.scheduler import Scheduler
from rwkv_batch.core.sequence import NOTHING_SCORED, RunningJob, Sequence
from rwkv_batch.core.shares import Limits
from rwkv_batch.errors import ErrorInfo, ErrorKind, ServiceError
from rwkv_batch.request import GenerateRequest, Job, PromptLogprobs, Resumed, SessionTurn
from rwkv_batch.tokenizer import Tokenizer
from sampling.params import SamplingParams
from test.engine.test_scheduler import Slots
from test.engine.test_scheduler import job as waiting_job

VOCAB = 300
TURN = SessionTurn(session_id="s", resume_prompt=[1])


@pytest.fixture
def plan() -> Scheduler:
    return Scheduler(Limits(4, 10, 64, 16, 64, max_waiting_rows_per_client=5), Slots(9))


@pytest.fixture
def builder(plan: Scheduler) -> RowBuilder:
    return RowBuilder(plan, lambda request: None, Tokenizer(), VOCAB)


def row(prompt: list[int] | None = None, **fields: Any) -> GenerateRequest:
    ids = [1, 2, 3] if prompt is None else prompt
    return GenerateRequest(**{"prompt": ids, "max_tokens": 9, "sampling": SamplingParams(seed=7), **fields})


def job(*rows: GenerateRequest, **fields: Any) -> Job:
    return Job(job_id="j", rows=list(rows), **fields)


def error_of(builder: RowBuilder, *rows: GenerateRequest, **fields: Any) -> ErrorInfo:
    with pytest.raises(ServiceError) as caught:
        builder.check(job(*rows, **fields))
    return caught.value.info


@pytest.mark.parametrize(
    ("asked", "field", "message", "given"),
    [
        (row([]), "prompt", "a prompt is empty; give at least one token", None),
        (row(session=SessionTurn(session_id="s", resume_prompt=[])), "prompt",
         "a prompt is empty; give at least one token", None),
        (row([1, VOCAB]), "prompt", "prompt: token id 300 is outside the model's vocabulary 0..299", VOCAB),
        (row([1, -1, -2]), "prompt", "prompt: token id -1 is outside the model's vocabulary 0..299", -1),
        (row(session=SessionTurn(session_id="s", resume_prompt=[VOCAB])), "session",
         "session: token id 300 is outside the model's vocabulary 0..299", VOCAB),
        (row(stop_ids=[VOCAB]), "stop_tokens",
         "stop_tokens: token id 300 is outside the model's vocabulary 0..299", VOCAB),
        (row(sampling=SamplingParams(logit_bias={VOCAB: 1.0})), "logit_bias",
         "logit_bias: token id 300 is outside the model's vocabulary 0..299", VOCAB),
        (row(resumed=Resumed(token_ids=[VOCAB], shown=0)), "resumed",
         "resumed: token id 300 is outside the model's vocabulary 0..299", VOCAB),
        (row(candidates=[[1], [VOCAB]]), "candidates",
         "candidates: token id 300 is outside the model's vocabulary 0..299", VOCAB),
        (row(max_tokens=-1), "max_tokens", "max_tokens: must be at least 0, and at least 1 in a session, got -1", -1),
        (row(max_tokens=0, session=TURN), "max_tokens",
         "max_tokens: must be at least 0, and at least 1 in a session, got 0", 0),
        (row(session=TURN, prompt_logprobs=PromptLogprobs()), "session_id",
         "session_id: a session's turn cannot be scored; leave the session out", "s"),
        (row(session=TURN, candidates=[[1]]), "session_id",
         "session_id: a session's turn cannot be scored; leave the session out", "s"),
        (row(candidates=[[1], [2]], n=2), "candidates",
         "candidates: each must have at least one token, and n must be 1", 2),
        (row(candidates=[[1], []]), "candidates", "candidates: each must have at least one token, and n must be 1", 1),
        (row(prompt_logprobs=PromptLogprobs(start=0)), "prompt_logprobs",
         "prompt_logprobs: start must be at least 1 and top 0..300, got start 0, top 0", "start 0, top 0"),
        (row(prompt_logprobs=PromptLogprobs(top=VOCAB + 1)), "prompt_logprobs",
         "prompt_logprobs: start must be at least 1 and top 0..300, got start 1, top 301", "start 1, top 301"),
        (row(prompt_logprobs=PromptLogprobs(top=-1)), "prompt_logprobs",
         "prompt_logprobs: start must be at least 1 and top 0..300, got start 1, top -1", "start 1, top -1"),
        (row(resumed=Resumed(token_ids=[1] * 9, shown=0)), "resumed",
         "resumed: 9 tokens for 1 rows; allowed are fewer than max_tokens (9) and one row", 9),
        (row(resumed=Resumed(token_ids=[1], shown=0), n=2), "resumed",
         "resumed: 1 tokens for 2 rows; allowed are fewer than max_tokens (9) and one row", 1),
        (row(session=TURN, n=2), "session_id",
         "a request with a session must have one row, 2 were given; send one request per row", None),
    ],
)  # fmt: skip
def test_an_impossible_row_is_refused_by_its_field(
    builder: RowBuilder, asked: GenerateRequest, field: str, message: str, given: Any
) -> None:
    info = error_of(builder, asked)
    assert (info.kind, info.field, info.message, info.given) == (ErrorKind.INVALID_FIELD, field, message, given)


def test_the_first_and_last_ids_and_the_edges_of_all_limits_are_allowed(builder: RowBuilder) -> None:
    last = VOCAB - 1
    bias = SamplingParams(logit_bias={0: 1.0, last: 1.0})
    builder.check(job(row([0, last], stop_ids=[0, last], sampling=bias, max_tokens=0)))
    builder.check(job(row(prompt_logprobs=PromptLogprobs(start=1, top=VOCAB))))
    builder.check(job(row(resumed=Resumed(token_ids=[1] * 8, shown=0)), row(session=None)))
    builder.check(job(row(session=TURN, max_tokens=1)))
    builder.check(job(row(candidates=[[1], [last]])))


def test_the_queue_has_a_limit_for_all_and_for_each_client(builder: RowBuilder, plan: Scheduler) -> None:
    full = "the queue is full: {}, {} more would exceed the limit of {}; retry in 1 s or send fewer rows"
    builder.check(job(*[row()] * 5, client="a"))
    info = error_of(builder, *[row()] * 6, client="a")
    expected = full.format("0 rows of this client wait", 6, "5 for one client (max_waiting_rows_per_client)")
    assert (info.kind, info.message, info.retry_after_s) == (ErrorKind.OVERLOADED, expected, 1)
    builder.check(job(*[row()] * 10))
    assert error_of(builder, *[row()] * 11).message == full.format("0 rows wait", 11, "10 (max_waiting_rows)")
    plan.add(*waiting_job(3, client="a"))
    builder.check(job(row(n=2), client="a"))
    assert error_of(builder, row(n=3), client="a").message.startswith(
        "the queue is full: 3 rows of this client wait, 3 more"
    )
    builder.check(job(*[row()] * 7))
    assert error_of(builder, *[row()] * 8).message == full.format("3 rows wait", 8, "10 (max_waiting_rows)")
    builder.check(job(*[row()] * 99, was_admitted=True, client="a"))
    assert Limits(4, 40, 64, 16, 64).waiting_rows_per_client == 30, "by default"


def build(builder: RowBuilder, *rows: GenerateRequest, **fields: Any) -> list[Sequence]:
    made = job(*rows, **fields)
    return builder.build(RunningJob(made, lambda events: None, {}, made.num_rows))


def test_answers_to_one_prompt_start_as_one_row_that_reads_it(builder: RowBuilder) -> None:
    scored = row([1, 2, 3], n=2, prompt_logprobs=PromptLogprobs(start=1))
    shared, single, *short = build(builder, scored, row(), row([1], n=2))
    assert (shared.row, shared.token_ids, shared.may_sample, shared.fork_count) == (0, [1, 2], False, 2)
    assert (shared.scored, shared.prompt_tokens) == (range(1, 3), 3)
    assert (single.row, single.token_ids, single.may_sample) == (2, [1, 2, 3], True)
    assert [(one.row, one.may_sample, one.request.sampling.seed) for one in short] == [(3, True, 7), (4, True, 8)]
    mixed = build(builder, row(n=2, mixture=[("x", 1.0), ("y", 1.0)]))
    assert [one.may_sample for one in mixed] == [True, True], "members of a mixture read the prompt themselves"
    continued = builder.continuations(shared.job, 0, scored)
    assert [(one.row, one.token_ids, one.may_sample) for one in continued] == [
        (0, [1, 2, 3], True),
        (1, [1, 2, 3], True),
    ]


def test_each_answer_has_its_own_seed_and_candidate(builder: RowBuilder) -> None:
    maximum = 2**64 - 1
    rows = builder.continuations(*shared_by(row(n=3, sampling=SamplingParams(seed=maximum), ignore_eos=True)))
    assert [one.request.sampling.seed for one in rows] == [maximum, 0, 1]
    assert [one.request.sampling.logit_bias for one in rows] == [{0: float("-inf")}] * 3
    ranked = builder.continuations(
        *shared_by(row([1], candidates=[[5], [6, 7]], max_tokens=0, prompt_logprobs=PromptLogprobs()))
    )
    assert [one.token_ids for one in ranked] == [[1, 5], [1, 6, 7]]
    assert [one.scored for one in ranked] == [range(1, 2), range(1, 3)]
    assert builder.continuations(*shared_by(row()))[0].scored == NOTHING_SCORED


def shared_by(request: GenerateRequest) -> tuple[RunningJob, int, GenerateRequest]:
    return RunningJob(job(request), lambda events: None, {}, request.num_rows), 0, request
