"""Speculative decoding changes no text: rows with drafts that are right, wrong or half right, compared with none."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from demo.random_weights import write_random_model
from rwkv_batch.core.drafters import (
    MATCHES,
    MAX_LOOKUP_TOKENS,
    MAX_SESSION_TEXTS,
    TOKENS_PER_CALL,
    Drafter,
    LookupDrafter,
    ModelDrafter,
    SessionTexts,
)
from rwkv_batch.core.sequence import Sequence
from rwkv_batch.core.speculation import make_drafters
from rwkv_batch.engine import Engine
from rwkv_batch.request import GenerateRequest, Job, PromptLogprobs, SessionTurn, TokenLogprob
from sampling.params import Filters, Method, SamplingParams
from state_pool.config import PoolConfig
from state_pool.session_key import SessionKey
from state_pool.sessions import Lease, Session
from test.conftest import rest_slow
from test.engine.test_constraints import LOOPS, PERSON, choice, lark, regex, schema
from test.engine.test_step_parts import FakeGraphs
from test.harness import (
    RunningJob,
    call,
    eventually_holds,
    free_slots,
    make_request,
    paused_engine,
    run,
    started_engine,
    tiny_model,
    turn,
)
from test.pool_integrity import integrity_faults

pytestmark = pytest.mark.slow

CASES = 400 if "RWKV_LONG_TESTS" in os.environ else 4
"""Groups of some three jobs, per loop."""
FORMS = (
    lark('start: "The answer of the oracle is: " /[a-z]{3,8}/ ", and nothing else matters.\\n" /[0-9]+/ "!"'),
    schema(PERSON),
    choice("a long answer, certain from its first letter on", "another", "no"),
    regex("id-[0-9]{2}-(foo|bar)-end"),
    regex("[a-e ]{5,30}"),
)
FILTERS = (
    Filters(min_p=0.01, repetition_penalty=1.2, min_tokens=3),
    Filters(mirostat=2, mirostat_tau=4.0),
    Filters(xtc_probability=0.5, dry_multiplier=0.8, typical_p=0.95),
    Filters(top_n_sigma=2.0, dynatemp_range=0.3, bad_words=((11, 12), (300, 301))),
)
KINDS = ("right", "wrong", "random", "half right", "late", "pauses", "lookup", "lookup", "model", "model")


def random_sampling(rng: random.Random) -> SamplingParams:
    seed = rng.randrange(1 << 40)
    logprobs = rng.choice((None, 0, 2))
    return rng.choice(
        (
            SamplingParams(temperature=0.0, top_logprobs=logprobs),
            SamplingParams(temperature=0.0, frequency_penalty=0.3, penalty_decay=0.9, top_logprobs=logprobs),
            SamplingParams(seed=seed, top_p=0.8, temperature=0.7, top_logprobs=logprobs),
            SamplingParams(seed=seed, top_k=40, presence_penalty=0.5, frequency_penalty=0.2),
            SamplingParams(seed=seed, method=Method.NOISE, noise=1.0),
            SamplingParams(seed=seed, temperature=1.2, logit_bias={300: 5.0, 33: -float("inf")}),
            SamplingParams(seed=seed, logit_bias=dict.fromkeys((300, 301, 302), 30.0), top_logprobs=logprobs),
            SamplingParams(seed=seed, top_p=0.9, filters=rng.choice(FILTERS), top_logprobs=logprobs),
        )
    )


def random_request(rng: random.Random, session: str = "") -> GenerateRequest:
    prompt = [rng.randrange(1, 60000) for _ in range(rng.choice((1, rng.randint(2, 9), rng.randint(10, 70))))]
    sampling = random_sampling(rng)
    fields: dict[str, Any] = {
        "max_tokens": rng.choice((1, 2, rng.randint(3, 12), rng.randint(13, 48))),
        "ignore_eos": rng.random() < 0.5,
        "include_stop": rng.random() < 0.3,
        "chunk_size": rng.choice((0, 1, 4)),
        "stop_strings": rng.sample([b"e", b"th", b"\n", b"a b", b"zzz", b"or the"], rng.choice((0, 0, 1, 3))),
        "stop_ids": [rng.randrange(60000)] * (rng.random() < 0.2),
        "return_logits": sampling.top_logprobs is not None and rng.random() < 0.2,
    }
    if session:
        fields["session"] = SessionTurn(session_id=session, resume_prompt=prompt)
    else:
        fields["n"] = rng.choice((1, 1, 1, 3))
        if rng.random() < 0.15:
            fields["prompt_logprobs"] = PromptLogprobs(top=1)
    if rng.random() < 0.35:
        fields["constraint"] = rng.choice(FORMS)
    return make_request(prompt, sampling=sampling, **fields)


@dataclass
class Row:
    """All that a row's client sees and that may not depend on drafts."""

    text: bytes
    ids: list[int]
    logprobs: list[Any]
    prompt_logprobs: list[Any]
    finish: tuple[Any, ...]


def comparable(logprob: TokenLogprob, request: GenerateRequest) -> TokenLogprob:
    """Return a log-probability without logits if there is a grammar: tokens that it forces may have none."""
    return logprob if request.constraint is None else msgspec.structs.replace(logprob, logits=b"")


def rows_of(job: RunningJob) -> list[Row]:
    assert job.refusal is None, job.refusal
    rows = []
    requests = [request for request in job.job.rows for _ in range(request.num_rows)]
    for number, request in enumerate(requests):
        deltas = [delta for events in job.events for delta in events.deltas if delta.row == number]
        error = next((events.error for events in job.events if events.error), None)
        finish = job.finishes.get(number)
        end = (
            (error,) if finish is None else (finish.reason, finish.completion_tokens, finish.stop_string, finish.error)
        )
        rows.append(
            Row(
                job.texts.get(number, b""),
                [token for delta in deltas for token in delta.token_ids],
                [comparable(one, request) for delta in deltas for one in delta.logprobs or []],
                [one for delta in deltas for one in delta.prompt_logprobs or []],
                end,
            )
        )
    return rows


class TestDrafter:
    """Proposes tokens of the known answer, or others."""

    __test__ = False
    name = "test"

    def __init__(self, kind: str, answer: list[int], start: int, rng: random.Random) -> None:
        self._kind, self._answer, self._start, self._rng = kind, answer, start, rng

    def propose(self, ids: Any, length: int, count: int) -> list[int]:
        rng, at = self._rng, length - self._start
        right = self._answer[at : at + rng.randint(0, count)]
        wrong = [rng.randrange(1, 60000) for _ in right]
        if self._kind == "wrong":
            return wrong
        if self._kind == "random":
            return [rng.randrange(1, 60000) for _ in range(rng.randint(0, count))]
        if self._kind == "half right":
            return [one if rng.random() < 0.5 else other for one, other in zip(right, wrong, strict=True)]
        if self._kind == "pauses":  # rows with and without known tokens meet in a step
            return right[:3] if length % 5 else []
        if self._kind == "late":  # right, then wrong
            cut = rng.randint(0, len(right))
            return right[:cut] + wrong[cut:]
        return right


class Answers:
    """Known answers by job and row, from which drafters are made."""

    def __init__(self) -> None:
        self.ids: dict[tuple[str, int], list[int]] = {}
        self.rng = random.Random(0)

    def drafters(self, sequence: Sequence) -> list[Drafter]:
        kind = self.rng.choice(KINDS)
        if kind == "model":
            return [ModelDrafter()]
        answer = self.ids.get((sequence.job.job_id, sequence.row))
        if answer is None or kind == "lookup":
            return make_drafters(sequence)
        return [TestDrafter(kind, answer, sequence.prompt_end, self.rng)]


@contextmanager
def engines(model: Path, folder: Path, loop: str) -> Iterator[tuple[Engine, Engine, Answers]]:
    """Yield an engine without drafts, one with them, and the answers that its drafters know."""
    fields = {"max_running": 24, **LOOPS.get(loop, {"overlap_on_cpu": True})}
    pools = [PoolConfig(state_db=str(folder / f"{name}.db")) for name in ("off", "on")]
    answers = Answers()
    # The model itself is a draft that is right where rows are greedy; another one is always wrong.
    draft = model if loop != "plain" else write_random_model(folder / "draft.safetensors", layers=1, width=64, seed=1)
    with (
        started_engine(model, pools[0], **fields) as off,
        started_engine(model, pools[1], speculate="model", draft_model=str(draft), **fields) as on,
    ):
        on.speculation.make_drafters = answers.drafters
        if loop == "parts":  # as on a GPU: decode rows by a graph, rows with drafts by another launch
            for engine in (off, on):
                engine.model_runner.graphs.decode = FakeGraphs(engine.model_runner)  # type: ignore[assignment]
                engine.model_runner.drafts.may_sample_ahead = True
        yield off, on, answers


def check_case(off: Engine, on: Engine, answers: Answers, seed: int) -> int:
    """Run a few jobs on both engines, one after the other and then together. Compares all rows and states.

    Returns the number of jobs.
    """
    rng = random.Random(seed)
    answers.rng = random.Random(seed)
    turns = [random_request(rng, f"s{seed}") for _ in range(rng.choice((0, 0, 1, 3)))]
    single = [[random_request(rng) for _ in range(rng.choice((1, 1, 4)))] for _ in range(rng.choice((1, 2, 3)))]
    jobs = [[turn] for turn in turns] + single
    expected = [run(off, *rows, return_token_ids=True) for rows in jobs]
    for number, job in enumerate(expected):
        for row, known in enumerate(rows_of(job)):
            answers.ids[f"{seed}-{number}", row] = known.ids
    jobs = [[predicted(rng, request, job) for request in rows] for job, rows in zip(expected, jobs, strict=True)]
    with paused_engine(on):
        running = [submit_as(on, f"{seed}-{number}", rows) for number, rows in enumerate(jobs) if number >= len(turns)]
    # Turns run one after the other: one with a grammar is admitted later.
    ended = [submit_as(on, f"{seed}-{number}", jobs[number]).wait() for number in range(len(turns))]
    for number, (before, after) in enumerate(zip(expected, [*ended, *running], strict=True)):
        got, want = rows_of(after.wait()), rows_of(before)
        for row, (one, other) in enumerate(zip(got, want, strict=True)):
            assert one == other, f"seed {seed}, job {number}, row {row} of {len(before.job.rows)}"
    if turns:
        states = [call(engine, "session_export", session_id=f"s{seed}") for engine in (off, on)]
        assert states[0] == states[1], f"seed {seed}: the session's states differ"
    return len(jobs)


def predicted(rng: random.Random, request: GenerateRequest, answer: RunningJob) -> GenerateRequest:
    """Return the request with a prediction: the first row's answer, with other tokens now and then."""
    ids = [one if rng.random() < 0.9 else rng.randrange(1, 60000) for one in rows_of(answer)[0].ids]
    return msgspec.structs.replace(request, prediction=ids if rng.random() < 0.7 else [])


def submit_as(engine: Engine, job_id: str, rows: list[GenerateRequest]) -> RunningJob:
    running = RunningJob(Job(job_id=job_id, rows=rows, return_token_ids=True))
    engine.submit(running.job, running.sink, running.on_admitted)
    return running


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("loop", rest_slow(["parts", *LOOPS], 2, long=["naive"]))
def test_drafts_change_nothing(model: Path, tmp_path: Path, loop: str) -> None:
    with engines(model, tmp_path, loop) as (off, on, answers):
        jobs = sum(check_case(off, on, answers, seed) for seed in range(CASES))
        drafted, accepted = map(sum, zip(*on.speculation.totals.values(), strict=True))
        print(f"{loop}: {jobs} jobs, {accepted} of {drafted} drafted tokens accepted")
        assert drafted > accepted > 0
        assert on.speculation.totals["model"].drafted
        assert set(off.speculation.totals.values()) == {(0, 0)}
        pool, drafts = on.model_runner.pool, on.speculation._slots
        assert eventually_holds(on, lambda: not integrity_faults(pool, drafts=drafts._free)), "every slot has its owner"


def test_a_later_launch_of_the_step_keeps_the_drafts_logits(model: Path) -> None:
    """A graph decodes three rows after the row with a draft was launched, and reuses the memory of logits."""
    rows = [make_request(f"row {i}", max_tokens=48, ignore_eos=True, speculation="off") for i in range(4)]
    with started_engine(model, speculate="ngram", overlap_on_cpu=True) as engine:
        engine.model_runner.graphs.decode = FakeGraphs(engine.model_runner)  # type: ignore[assignment]
        expected = rows_of(run(engine, *rows, return_token_ids=True))
        rng = random.Random(0)
        engine.speculation.make_drafters = lambda one: [TestDrafter("pauses", expected[0].ids, one.prompt_end, rng)]
        drafting = msgspec.structs.replace(rows[0], speculation="")
        assert rows_of(run(engine, drafting, *rows[1:], return_token_ids=True)) == expected
        assert engine.speculation.totals["test"].accepted > 10


def test_a_repeated_text_takes_few_steps(model: Path) -> None:
    """Rejected drafts are in no count of the answer but their own."""
    repeated = make_request("x", max_tokens=49, sampling=SamplingParams(temperature=0.0, logit_bias={300: 100.0}))
    other = make_request("x", max_tokens=17, prediction=[7, 8, 9], ignore_eos=True)
    with started_engine(model, speculate="ngram") as engine:
        slots = free_slots(engine)
        job = run(engine, repeated)
        assert job.finishes[0].completion_tokens == 49 and engine.throughput.steps <= 8
        assert job.finishes[0].accepted_drafts["ngram"] >= 40
        assert engine.throughput.generated_tokens == 49
        finish = run(engine, other).finishes[0]
        assert finish.rejected_drafts["prediction"] >= 3 and finish.completion_tokens == 17
        before = dict(engine.speculation.totals)
        off = run(engine, msgspec.structs.replace(repeated, speculation="off")).finishes[0]
        assert not off.accepted_drafts and engine.speculation.totals == before
        assert free_slots(engine) == slots


def test_a_lookup_continues_after_the_latest_occurrence() -> None:
    lookup = LookupDrafter("ngram")
    text = [1, 2, 3, 4, 5, 9, 2, 3, 7, 2, 3]
    assert lookup.propose(text, len(text), 3) == [7, 2, 3]
    assert LookupDrafter("ngram").propose([5, 6, 5, 6], 4, 5) == [5, 6, 5, 6, 5], "in circles"
    assert LookupDrafter("ngram").propose([1, 2, 3], 3, 5) == []
    long = [*range(1000, 1000 + 3 * TOKENS_PER_CALL), 1000, 1001]
    lookup = LookupDrafter("ngram")
    assert lookup.propose(long, len(long), 2) == [1002, 1003], "the first tokens are indexed first"


def test_a_lookup_finds_what_a_turn_repeats_of_its_session() -> None:
    lookup = LookupDrafter("ngram", session=[1, 2, 3, 4, 5, 6])
    assert lookup.propose([9, 3], 2, 3) == [], "no two tokens match"
    assert lookup.propose([9, 3, 4], 3, 3) == [5, 6, 9], "and then the turn"
    assert lookup.propose([9, 3, 4, 5, 6], 5, 2) == [9, 3]
    assert lookup.propose([9, 3, 4, 5, 6, 9, 3, 4], 8, 2) == [5, 6]


def test_the_texts_of_sessions_go_with_them(model: Path, tmp_path: Path) -> None:
    pool = PoolConfig(state_db=str(tmp_path / "s.db"))
    with started_engine(model, pool, speculate="ngram") as engine:
        texts = engine.speculation.texts
        for number in range(2):
            job = run(engine, turn("s", f"turn {number}", max_tokens=5), return_token_ids=True)
            (kept,) = texts._texts.values()
            assert kept[-5:].tolist() == rows_of(job)[0].ids
        length = len(kept)
        run(engine, turn("t", "another", max_tokens=5))
        assert len(texts._texts) == 2 and length > 10
        for name in "st":
            call(engine, "session_delete", session_id=name)
        assert eventually_holds(engine, lambda: not texts._texts)


def test_the_texts_of_the_latest_sessions_are_kept() -> None:
    texts, sessions = SessionTexts(), [Session(SessionKey(str(i)), i, 0.0, 0.0) for i in range(MAX_SESSION_TEXTS + 1)]
    for session in (*sessions[:-1], sessions[0], sessions[-1]):
        texts.add(Lease(session, session), [session.row_id])
    kept = [list(texts.before(Lease(session, session))) for session in sessions]
    assert kept[:3] == [[0, 0], [], [2]] and kept[-1] == [MAX_SESSION_TEXTS], "the second one is the oldest"


def test_a_lookup_forgets_what_is_long_ago() -> None:
    """Its memory does not grow with the text."""
    text = list(range(4 * MAX_LOOKUP_TOKENS))
    for first, expected in ((len(text) - 2000, [len(text) - 1996]), (5, [])):
        lookup, again = LookupDrafter("ngram"), text + text[first : first + 4]
        for length in (*range(TOKENS_PER_CALL, len(text), TOKENS_PER_CALL), len(again)):
            found = lookup.propose(again, length, 1)
        assert found == expected
        kept = sum(len(ends) for ends in (*lookup._ends, *lookup._older_ends))
        assert kept <= 2 * len(MATCHES) * (MAX_LOOKUP_TOKENS + TOKENS_PER_CALL)


def test_a_prediction_is_followed_over_a_replaced_word() -> None:
    prediction = [11, 12, 13, 14, 15, 16, 17]
    drafter = LookupDrafter("prediction", prediction, start=2)
    assert drafter.propose([1, 2], 2, 3) == [11, 12, 13]
    assert drafter.propose([1, 2, 11, 12, 99], 5, 3) == [14, 15, 16]
    text = [1, 2, 11, 12, 99, 98, 97, 96, 15, 16]
    proposed = [drafter.propose(text, length, 3) for length in range(6, 11)]
    assert proposed == [[15, 16, 17], [], [], [], [17]], "too many wrong tokens, until two match again"
