"""One definition whatever the load: logits, tokens, log-probabilities and states depend on a row's own tokens alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch

from demo.random_weights import write_random_model
from rwkv_batch.model.weights import open_weights
from rwkv_batch.request import GenerateRequest, SessionTurn
from rwkv_batch.runner.pipeline import Pipeline
from sampling.params import SamplingParams
from state_pool.config import PoolConfig
from test.batch_invariance import count_differences
from test.conftest import IS_LONG, rest_slow
from test.harness import RunningJob, make_request, paused_engine, run, started_engine, submit, tiny_model

pytestmark = pytest.mark.slow

SESSIONS, TURNS = 5 if IS_LONG else 3, 3
FORMATS = [("int8", 8, "fp32"), ("int8", 16, "fp32"), ("int8", 8, "fp16"), ("int8", 8, "int8"), ("fp32", 8, "fp32")]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute threads wait for each other: with several test processes, one thread is faster."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("dtype", "bits", "wkv_state"), rest_slow(FORMATS, long=FORMATS[1:3]))
def test_steps_give_the_same_bits_under_any_load(tmp_path: Path, dtype: str, bits: int, wkv_state: str) -> None:
    weights = open_weights(write_random_model(tmp_path / "tiny.pth", layers=2, width=192, vocab=256))
    pipeline = Pipeline(weights, ("cpu",), dtype, "cpu", wkv_state, activation_bits=bits)
    number = 80 if wkv_state == "fp32" else 32
    counted = count_differences(pipeline.stages[0], number, 24, 256)
    assert not counted["differ"], counted


@dataclass
class Answer:
    """What a turn's row was sent."""

    text: bytes
    tokens: list[Any]
    """token, log-probability, the most likely tokens and all logits"""
    finish: tuple[str, int]
    cached_tokens: int = field(compare=False)


def random_turns(seed: int) -> list[list[GenerateRequest]]:
    """Return each session's turns, with all samplers and logits."""
    rng = Random(seed)

    def request(session: int, number: int) -> GenerateRequest:
        prompt = [rng.randrange(1, 60000) for _ in range(rng.choice((1, rng.randint(2, 20), rng.randint(21, 90))))]
        sampling = rng.choice(
            (
                SamplingParams(temperature=0.0, top_logprobs=2),
                SamplingParams(seed=rng.randrange(1000), top_k=40, presence_penalty=0.5, top_logprobs=2),
                SamplingParams(seed=rng.randrange(1000), temperature=1.3, top_p=0.8, top_logprobs=0),
            )
        )
        own = SessionTurn(session_id=f"s{session}", resume_prompt=prompt)
        return make_request(
            prompt, session=own, sampling=sampling, max_tokens=rng.randint(1, 12), ignore_eos=True, return_logits=True
        )

    return [[request(session, number) for number in range(TURNS)] for session in range(SESSIONS)]


def answer(job: RunningJob) -> Answer:
    """Return the answer of a job's first row."""
    assert job.wait().refusal is None, job.refusal
    finish = job.finishes[0]
    assert finish.error is None, finish.error
    tokens = [
        token for events in job.events for delta in events.deltas if delta.row == 0 for token in delta.logprobs or []
    ]
    return Answer(job.texts[0], tokens, (finish.reason, finish.completion_tokens), finish.cached_tokens)


def others(rng: Random, count: int) -> list[GenerateRequest]:
    return [
        make_request([rng.randrange(1, 60000)] * rng.randint(1, 50), max_tokens=rng.randint(1, 40))
        for _ in range(count)
    ]


def check_engine(model: Path, folder: Path, seed: int, **fields: Any) -> None:
    """Compare turns alone with turns under load.

    In company, with other pieces of prompts, and resumed from every tier.
    """
    turns = random_turns(seed)
    rng = Random(seed)
    in_slots = PoolConfig(state_db="", l1_sessions=16)
    with started_engine(model, in_slots, **fields) as engine:
        alone = [[answer(run(engine, request)) for request in own] for own in turns]

    with started_engine(model, in_slots, **fields, prefill_chunk=7, prefill_tokens_per_step=40) as engine:
        for number in range(TURNS):
            with paused_engine(engine):
                company = submit(engine, *others(rng, 15))
                jobs = [submit(engine, own[number]) for own in rng.sample(turns, SESSIONS)]
            for job in jobs:
                session = int(job.job.rows[0].session.session_id[1:])  # type: ignore[union-attr]
                assert answer(job) == alone[session][number], f"turn {number} of session {session} in company"
            company.wait()

    parked = PoolConfig(state_db=str(folder / f"{seed}.db"), durability="turn", l1_sessions=1, l2_sessions=1)
    for numbers in (range(TURNS - 1), range(TURNS - 1, TURNS)):  # a restart: the last turns come from the database
        with started_engine(model, parked, **fields) as engine:
            for number in numbers:
                for session in rng.sample(range(SESSIONS), SESSIONS):
                    resumed = answer(run(engine, turns[session][number]))
                    assert resumed == alone[session][number], f"turn {number} of session {session} resumed"

    header = [rng.randrange(1, 60000) for _ in range(150)]
    prompts = [msgspec.structs.replace(own[0], prompt=header + own[0].prompt, session=None) for own in turns]
    with started_engine(model, PoolConfig(state_db="", prefix_cache_slots=0), **fields) as engine:
        alone_with_header = [answer(run(engine, prompt)) for prompt in prompts]
    with started_engine(model, PoolConfig(state_db=""), **fields) as engine:
        with_hits = [answer(run(engine, prompt)) for prompt in prompts]
    assert with_hits == alone_with_header
    assert with_hits[-1].cached_tokens >= 32, "no prompt came from the prefix cache"


@pytest.mark.parametrize("wkv_state", rest_slow(["fp32", "int8"], long=["int8"]))
def test_answers_are_the_same_under_any_load(tmp_path: Path, wkv_state: str) -> None:
    model = tiny_model(tmp_path, layers=2, width=192)
    check_engine(model, tmp_path, 1, dtype="int8", wkv_state=wkv_state)
