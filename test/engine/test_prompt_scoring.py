"""Log-probabilities of prompts, compared with the log-softmax of a separate forward."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rwkv_batch.engine import Engine
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.request import FinishReason, GenerateRequest, PromptLogprobs, TokenLogprob
from rwkv_batch.runner import prompt_logprobs
from sampling.params import SamplingParams
from test.harness import TOKENIZER, RunningJob, call, make_request, run, started_engine, submit, tiny_model, turn
from test.logprob_oracle import LogprobOracle

CLOSE = 1e-4
LONG = TOKENIZER.encode("one two three, a long text over many chunks. " * 12)
SOME = [TOKENIZER.encode(text) for text in ("Hi", "The weather in Paris", "猫が好き", "x = f(a, b)\n\nreturn x" * 3)]
ALL = PromptLogprobs(top=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["plain", "overlapped", "two stages"])
def engine(model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    how: dict[str, Any] = {
        "plain": {},
        "overlapped": {"overlap_on_cpu": True},
        "two stages": {"devices": ("cpu", "cpu"), "overlap_on_cpu": True},
    }[request.param]
    with started_engine(model, **how) as engine:
        yield engine


@pytest.fixture(scope="module")
def oracle(model: Path) -> LogprobOracle:
    return LogprobOracle(model)


def score(ids: list[int], **fields: Any) -> GenerateRequest:
    return make_request(ids, **{"max_tokens": 0, "prompt_logprobs": ALL, **fields})


def received(ran: RunningJob, row: int = 0) -> list[TokenLogprob]:
    deltas = [delta for events in ran.events for delta in events.deltas if delta.row == row]
    return [entry for delta in deltas for entry in delta.prompt_logprobs or ()]


def check(entries: list[TokenLogprob], oracle: LogprobOracle, ids: list[int], start: int = 1) -> None:
    expected = oracle.logprobs(ids)
    assert [entry.token for entry in entries] == [TOKENIZER.byte_table[i] for i in ids[start:]]
    for at, entry in enumerate(entries, start):
        row = expected[at - 1]
        assert entry.logprob == pytest.approx(float(row[ids[at]]), abs=CLOSE)
        assert [value for _, value in entry.top] == pytest.approx(row.topk(len(entry.top))[0].tolist(), abs=CLOSE)


def test_a_batch_of_prompts_of_different_lengths(engine: Engine, oracle: LogprobOracle) -> None:
    together = run(engine, *[score(ids) for ids in [*SOME, LONG]])
    for row, ids in enumerate([*SOME, LONG]):
        check(received(together, row), oracle, ids)
        finish = together.finishes[row]
        assert (finish.reason, finish.prompt_tokens, finish.completion_tokens) == (FinishReason.LENGTH, len(ids), 0)
        alone = [entry.logprob for entry in received(run(engine, score(ids)))]
        assert [entry.logprob for entry in received(together, row)] == pytest.approx(alone, abs=1e-5)
    assert call(engine, "status")["running_rows"] == 0


def test_a_prompt_is_scored_and_continued(engine: Engine, oracle: LogprobOracle) -> None:
    plain = run(engine, make_request(LONG, max_tokens=8))
    scored = run(engine, score(LONG, max_tokens=8))
    assert scored.texts == plain.texts
    check(received(scored), oracle, LONG)
    first = next(i for i, events in enumerate(scored.events) if any(delta.text for delta in events.deltas))
    late = [delta for events in scored.events[first + 1 :] for delta in events.deltas]
    assert not any(delta.prompt_logprobs for delta in late), "text came before the prompt's log-probabilities"


@pytest.mark.parametrize("start", [1, 2, 31, 32, 33, 64, len(LONG) - 1, len(LONG)])
def test_only_the_end_of_a_prompt(engine: Engine, oracle: LogprobOracle, start: int) -> None:
    """Chunks have 32 tokens. The step that reads the previous token scores a token at a chunk's start."""
    scored = run(engine, score(LONG, prompt_logprobs=PromptLogprobs(start=start, top=1)))
    check(received(scored), oracle, LONG, start)


def test_scoring_does_not_change_other_rows(engine: Engine) -> None:
    sampled = SamplingParams(temperature=1.0, seed=4, top_logprobs=2)
    prompt = SOME[1]

    def entries(ran: RunningJob) -> list[TokenLogprob]:
        return [entry for events in ran.events for delta in events.deltas for entry in delta.logprobs or ()]

    alone = run(engine, make_request(prompt, sampling=sampled, max_tokens=30))
    crowd = submit(engine, *[score(LONG, use_prefix_cache=False) for _ in range(12)])
    among = run(engine, make_request(prompt, sampling=sampled, max_tokens=30))
    assert (among.texts, entries(among)) == (alone.texts, entries(alone))
    assert len(crowd.wait().finishes) == 12


@pytest.mark.parametrize("prompt", [SOME[1], SOME[0][:1]], ids=["shared", "one token"])
def test_candidates_share_the_prompt(engine: Engine, oracle: LogprobOracle, prompt: list[int]) -> None:
    candidates = [TOKENIZER.encode(text) for text in (" is fine.", " x", "猫", "\n\nUser")]
    before = call(engine, "status")["computed_tokens"]
    expected = PromptLogprobs(start=len(prompt), top=1)
    ran = run(engine, score(prompt, candidates=candidates, prompt_logprobs=expected), score(SOME[3]))
    for row, candidate in enumerate(candidates):
        check(received(ran, row), oracle, prompt + candidate, len(prompt))
    check(received(ran, len(candidates)), oracle, SOME[3])
    assert [ran.finishes[row].prompt_tokens for row in range(4)] == [len(prompt) + len(one) for one in candidates]
    most = len(prompt) + sum(1 + len(one) for one in candidates) + len(SOME[3])
    assert call(engine, "status")["computed_tokens"] - before <= most, "the prompt was read more than once"


def test_n_continuations_score_their_prompt_once(engine: Engine, oracle: LogprobOracle) -> None:
    ran = run(engine, score(SOME[1], n=3, max_tokens=3, sampling=SamplingParams(seed=1)))
    check(received(ran, 0), oracle, SOME[1])
    assert not received(ran, 1) and not received(ran, 2)
    assert len({ran.texts[row] for row in range(3)}) == 3


def test_a_cached_prefix_ends_before_scored_tokens(engine: Engine, oracle: LogprobOracle) -> None:
    shared = TOKENIZER.encode("This beginning is the same for every prompt, and it is long enough to be kept. " * 12)
    ends = [TOKENIZER.encode(f" Question {i}?") for i in range(6)]
    for end in ends:
        run(engine, make_request(shared + end, max_tokens=1))
    whole = run(engine, score(shared + ends[0]))
    check(received(whole), oracle, shared + ends[0])
    assert whole.finishes[0].cached_tokens == 0
    same = (len(set(tokens)) == 1 for tokens in zip(*(shared + end for end in ends), strict=False))
    common = sum(itertools.takewhile(bool, same))
    for start, cached in ((common, 0), (common + 1, common)):
        part = run(engine, score(shared + ends[1], prompt_logprobs=PromptLogprobs(start=start)))
        check(received(part), oracle, shared + ends[1], start)
        assert part.finishes[0].cached_tokens == cached


def test_logits_of_a_whole_prompt_never_exist(
    engine: Engine, oracle: LogprobOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    stage = engine.model_runner.pipeline.stages[-1]
    real = stage.logits_of

    def logits_of(x: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        taken.append(len(tokens))
        return real(x, tokens, out)

    monkeypatch.setattr(stage, "logits_of", logits_of)
    monkeypatch.setattr(prompt_logprobs, "HEAD_ROWS", 7)
    check(received(run(engine, score(LONG))), oracle, LONG)
    assert max(taken) == 7 and sum(taken) == len(LONG) - 1


def test_a_row_that_only_reads(engine: Engine) -> None:
    ran = run(
        engine,
        make_request(LONG, max_tokens=0),
        make_request("a", max_tokens=0),
        make_request("a b", n=2, max_tokens=0),
    )
    assert [finish.reason for finish in ran.finishes.values()] == [FinishReason.LENGTH] * 4
    assert ran.all_texts == [b""] * 4
    assert not any(received(ran, row) for row in range(4))


def test_cancelled_while_it_is_scored(engine: Engine) -> None:
    free = call(engine, "status")["free_slots"]
    jobs = [submit(engine, *[score(LONG * 7, use_prefix_cache=False, n=2)] * 4) for _ in range(4)]
    assert jobs[0].started.wait(60)
    for job in jobs:
        engine.cancel(job.job.job_id)
    for job in jobs:
        assert {finish.reason for finish in job.wait().finishes.values()} == {FinishReason.CANCELLED}
        for row in range(8):
            deltas = [delta for events in job.events for delta in events.deltas if delta.row == row]
            assert [delta.finish is not None for delta in deltas].index(True) == len(deltas) - 1
    assert call(engine, "status")["free_slots"] == free


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (turn("scored", "a b", prompt_logprobs=ALL), "session_id"),
        (turn("scored", "a b", candidates=[[5]]), "session_id"),
        (turn("scored", "a b", max_tokens=0), "max_tokens"),
        (make_request("a b", max_tokens=-1), "max_tokens"),
        (make_request("a b", candidates=[[5], []]), "candidates"),
        (make_request("a b", candidates=[[70000]]), "candidates"),
        (make_request("a b", candidates=[[5]], n=2), "candidates"),
        (make_request("a b", prompt_logprobs=PromptLogprobs(start=0)), "prompt_logprobs"),
        (make_request("a b", prompt_logprobs=PromptLogprobs(top=-1)), "prompt_logprobs"),
    ],
)
def test_invalid_scoring_fields_are_refused_by_name(engine: Engine, row: GenerateRequest, field: str) -> None:
    with pytest.raises(ServiceError) as refusal:
        run(engine, row)
    assert (refusal.value.info.kind, refusal.value.info.field) == (ErrorKind.INVALID_FIELD, field)


def test_the_end_token_has_a_log_probability(engine: Engine) -> None:
    """It was sampled and has no text. Clients that score by `echo` expect an entry per sampled token."""
    forced = SamplingParams(temperature=0.0, logit_bias={0: 1e9}, top_logprobs=1)
    ran = run(engine, make_request("Hello", sampling=forced))
    entries = [entry for events in ran.events for delta in events.deltas for entry in delta.logprobs or ()]
    assert [entry.token for entry in entries] == [b""] and ran.texts[0] == b""
    assert (ran.finishes[0].reason, ran.finishes[0].completion_tokens) == (FinishReason.STOP, 1)
    stopped = SamplingParams(temperature=0.0, logit_bias={11: 1e9}, top_logprobs=1)
    ran = run(engine, make_request("Hello", sampling=stopped, stop_ids=[11]))
    assert not [entry for events in ran.events for delta in events.deltas for entry in delta.logprobs or ()]
