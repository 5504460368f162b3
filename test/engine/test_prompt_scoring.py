"""Log-probabilities of prompts, compared with the log-softmax of a separate forward."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rwkv_batch.engine import Engine
from rwkv_batch.request import FinishReason, GenerateRequest, PromptLogprobs, TokenLogprob
from rwkv_batch.runner import prompt_logprobs
from sampling.params import SamplingParams
from test.harness import TOKENIZER, RunningJob, call, make_request, run, started_engine, submit
from test.logprob_oracle import LogprobOracle

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
LONG_PROMPT = TOKENIZER.encode("one two three, a long text over many chunks. " * 12)
PROMPTS = [TOKENIZER.encode(text) for text in ("Hi", "The weather in Paris", "猫が好き", "x = f(a, b)\n\nreturn x" * 3)]
WHOLE_PROMPT = PromptLogprobs(top=3)


@pytest.fixture(scope="module", params=["plain", "two stages"])
def engine(model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    settings: dict[str, Any] = {"plain": {}, "two stages": {"devices": ("cpu", "cpu"), "overlap_on_cpu": True}}[
        request.param
    ]
    with started_engine(model, **settings) as engine:
        yield engine


@pytest.fixture(scope="module")
def oracle(model: Path) -> LogprobOracle:
    return LogprobOracle(model)


def scoring_request(ids: list[int], **fields: Any) -> GenerateRequest:
    return make_request(ids, **{"max_tokens": 0, "prompt_logprobs": WHOLE_PROMPT, **fields})


def prompt_logprobs_of(job: RunningJob, row: int = 0) -> list[TokenLogprob]:
    deltas = [delta for events in job.events for delta in events.deltas if delta.row == row]
    return [entry for delta in deltas for entry in delta.prompt_logprobs or ()]


def check_logprobs(entries: list[TokenLogprob], oracle: LogprobOracle, ids: list[int], start: int = 1) -> None:
    expected = oracle.logprobs(ids)
    assert [entry.token for entry in entries] == [TOKENIZER.byte_table[i] for i in ids[start:]]
    for index, entry in enumerate(entries, start):
        row = expected[index - 1]
        assert entry.logprob == pytest.approx(float(row[ids[index]]), abs=TOLERANCE)
        assert [value for _, value in entry.top] == pytest.approx(row.topk(len(entry.top))[0].tolist(), abs=TOLERANCE)


def test_a_batch_of_prompts_of_different_lengths(engine: Engine, oracle: LogprobOracle) -> None:
    together = run(engine, *[scoring_request(ids) for ids in [*PROMPTS, LONG_PROMPT]])
    for row, ids in enumerate([*PROMPTS, LONG_PROMPT]):
        check_logprobs(prompt_logprobs_of(together, row), oracle, ids)
        finish = together.finishes[row]
        assert (finish.reason, finish.prompt_tokens, finish.completion_tokens) == (FinishReason.LENGTH, len(ids), 0)
        alone = [entry.logprob for entry in prompt_logprobs_of(run(engine, scoring_request(ids)))]
        assert [entry.logprob for entry in prompt_logprobs_of(together, row)] == pytest.approx(alone, abs=1e-5)
    assert call(engine, "status")["running_rows"] == 0


def test_a_prompt_is_scored_and_continued(engine: Engine, oracle: LogprobOracle) -> None:
    plain = run(engine, make_request(LONG_PROMPT, max_tokens=8))
    scored = run(engine, scoring_request(LONG_PROMPT, max_tokens=8))
    assert scored.texts == plain.texts
    check_logprobs(prompt_logprobs_of(scored), oracle, LONG_PROMPT)
    first = next(i for i, events in enumerate(scored.events) if any(delta.text for delta in events.deltas))
    late = [delta for events in scored.events[first + 1 :] for delta in events.deltas]
    assert not any(delta.prompt_logprobs for delta in late), "text came before the prompt's log-probabilities"


@pytest.mark.parametrize("start", [1, 2, 31, 32, 33, 64, len(LONG_PROMPT) - 1, len(LONG_PROMPT)])
def test_scoring_starts_at_any_token(engine: Engine, oracle: LogprobOracle, start: int) -> None:
    """Chunks have 32 tokens. The step that reads the previous token scores a token at a chunk's start."""
    scored = run(engine, scoring_request(LONG_PROMPT, prompt_logprobs=PromptLogprobs(start=start, top=1)))
    check_logprobs(prompt_logprobs_of(scored), oracle, LONG_PROMPT, start)


def test_scoring_does_not_change_other_rows(engine: Engine) -> None:
    sampled = SamplingParams(temperature=1.0, seed=4, top_logprobs=2)
    prompt = PROMPTS[1]

    alone = run(engine, make_request(prompt, sampling=sampled, max_tokens=30))
    background = submit(engine, *[scoring_request(LONG_PROMPT, use_prefix_cache=False) for _ in range(12)])
    under_load = run(engine, make_request(prompt, sampling=sampled, max_tokens=30))
    assert (under_load.texts, under_load.logprobs) == (alone.texts, alone.logprobs)
    assert len(background.wait().finishes) == 12


@pytest.mark.parametrize("prompt", [PROMPTS[1], PROMPTS[0][:1]], ids=["shared", "one token"])
def test_candidates_share_the_prompt(engine: Engine, oracle: LogprobOracle, prompt: list[int]) -> None:
    candidates = [TOKENIZER.encode(text) for text in (" is fine.", " x", "猫", "\n\nUser")]
    before = call(engine, "status")["computed_tokens"]
    candidates_only = PromptLogprobs(start=len(prompt), top=1)
    job = run(
        engine,
        scoring_request(prompt, candidates=candidates, prompt_logprobs=candidates_only),
        scoring_request(PROMPTS[3]),
    )
    for row, candidate in enumerate(candidates):
        check_logprobs(prompt_logprobs_of(job, row), oracle, prompt + candidate, len(prompt))
    check_logprobs(prompt_logprobs_of(job, len(candidates)), oracle, PROMPTS[3])
    assert [job.finishes[row].prompt_tokens for row in range(4)] == [len(prompt) + len(one) for one in candidates]
    max_tokens = len(prompt) + sum(1 + len(one) for one in candidates) + len(PROMPTS[3])
    assert call(engine, "status")["computed_tokens"] - before <= max_tokens, "the engine read the prompt more than once"


def test_n_continuations_score_their_prompt_once(engine: Engine, oracle: LogprobOracle) -> None:
    job = run(engine, scoring_request(PROMPTS[1], n=3, max_tokens=3, sampling=SamplingParams(seed=1)))
    check_logprobs(prompt_logprobs_of(job, 0), oracle, PROMPTS[1])
    assert not prompt_logprobs_of(job, 1) and not prompt_logprobs_of(job, 2)
    assert len({job.texts[row] for row in range(3)}) == 3


def test_a_cached_prefix_ends_before_scored_tokens(engine: Engine, oracle: LogprobOracle) -> None:
    shared = TOKENIZER.encode("This beginning is the same for every prompt, and it is long enough to be kept. " * 12)
    ends = [TOKENIZER.encode(f" Question {i}?") for i in range(6)]
    for end in ends:
        run(engine, make_request(shared + end, max_tokens=1))
    whole = run(engine, scoring_request(shared + ends[0]))
    check_logprobs(prompt_logprobs_of(whole), oracle, shared + ends[0])
    assert whole.finishes[0].cached_tokens == 0
    same = (len(set(tokens)) == 1 for tokens in zip(*(shared + end for end in ends), strict=False))
    common = sum(itertools.takewhile(bool, same))
    for start, cached in ((common, 0), (common + 1, common)):
        part = run(engine, scoring_request(shared + ends[1], prompt_logprobs=PromptLogprobs(start=start)))
        check_logprobs(prompt_logprobs_of(part), oracle, shared + ends[1], start)
        assert part.finishes[0].cached_tokens == cached


def test_logits_of_a_whole_prompt_never_exist(
    engine: Engine, oracle: LogprobOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    head_rows: list[int] = []
    stage = engine.model_runner.pipeline.stages[-1]
    real = stage.logits_of

    def logits_of(x: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        head_rows.append(len(tokens))
        return real(x, tokens, out)

    monkeypatch.setattr(stage, "logits_of", logits_of)
    monkeypatch.setattr(prompt_logprobs, "HEAD_ROWS", 7)
    check_logprobs(prompt_logprobs_of(run(engine, scoring_request(LONG_PROMPT))), oracle, LONG_PROMPT)
    assert max(head_rows) == 7 and sum(head_rows) == len(LONG_PROMPT) - 1


def test_a_row_with_no_tokens_to_sample_only_reads_its_prompt(engine: Engine) -> None:
    job = run(
        engine,
        make_request(LONG_PROMPT, max_tokens=0),
        make_request("a", max_tokens=0),
        make_request("a b", n=2, max_tokens=0),
    )
    assert [finish.reason for finish in job.finishes.values()] == [FinishReason.LENGTH] * 4
    assert job.all_texts == [b""] * 4
    assert not any(prompt_logprobs_of(job, row) for row in range(4))


def test_jobs_can_be_cancelled_while_they_are_scored(engine: Engine) -> None:
    free = call(engine, "status")["free_slots"]
    jobs = [submit(engine, *[scoring_request(LONG_PROMPT * 7, use_prefix_cache=False, n=2)] * 4) for _ in range(4)]
    assert jobs[0].started.wait(60)
    for job in jobs:
        engine.cancel(job.job.job_id)
    for job in jobs:
        assert {finish.reason for finish in job.wait().finishes.values()} == {FinishReason.CANCELLED}
        for row in range(8):
            deltas = [delta for events in job.events for delta in events.deltas if delta.row == row]
            assert [delta.finish is not None for delta in deltas].index(True) == len(deltas) - 1
    assert call(engine, "status")["free_slots"] == free


def test_the_end_token_has_a_log_probability(engine: Engine) -> None:
    """It was sampled and has no text. Clients that score by `echo` expect an entry per sampled token."""
    forced = SamplingParams(temperature=0.0, logit_bias={0: 1e9}, top_logprobs=1)
    job = run(engine, make_request("Hello", sampling=forced))
    entries = job.logprobs
    assert [entry.token for entry in entries] == [b""] and job.texts[0] == b""
    assert (job.finishes[0].reason, job.finishes[0].completion_tokens) == (FinishReason.STOP, 1)
    stopped = SamplingParams(temperature=0.0, logit_bias={11: 1e9}, top_logprobs=1)
    job = run(engine, make_request("Hello", sampling=stopped, stop_ids=[11]))
    assert not job.logprobs
