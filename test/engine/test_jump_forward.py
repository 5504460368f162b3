"""Jump-forward decoding saves steps and changes nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rwkv_batch.engine import Engine
from rwkv_batch.errors import ErrorKind
from rwkv_batch.request import GenerateRequest, TokenLogprob
from sampling.grammar.compiler import GrammarCompiler
from sampling.grammar.constraint import GrammarError
from sampling.grammar.masks import Masks
from sampling.grammar.matcher import Matcher
from sampling.params import Filters, Method, SamplingParams
from sampling.registry import sampler_class
from sampling.sampler import SamplesAhead
from state_pool.config import PoolConfig
from test.engine.random_schemas import random_schema
from test.engine.test_constraints import LOOPS, PERSON, by_row, choice, lark, regex, schema
from test.harness import (
    TOKENIZER,
    RunningJob,
    eventually_holds,
    free_slots,
    make_request,
    run,
    started_engine,
    submit,
    turn,
)
from test.pool_integrity import integrity_faults

pytestmark = pytest.mark.slow

PENALISED = SamplingParams(seed=5, temperature=1.2, presence_penalty=1.0, frequency_penalty=0.5, penalty_decay=0.9)
FORM = lark('start: "The answer of the oracle is: " /[a-z]{3,8}/ ", and nothing else matters.\\n" /[0-9]+/ "!"')


@pytest.fixture(scope="module", params=["plain", "pipeline"])
def engine(model: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    pool = PoolConfig(state_db=str(tmp_path_factory.mktemp("db") / "s.db"))
    with started_engine(model, pool, **LOOPS[request.param]) as started:
        yield started


@pytest.fixture
def jump_forward_disabled(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda: monkeypatch.setattr(engine.jobs.jump_forward, "max_rows", -1)


def rows() -> list[GenerateRequest]:
    samples = [SamplingParams(temperature=0.0), SamplingParams(seed=7, top_p=0.9, top_logprobs=3), PENALISED]
    samples += [
        SamplingParams(method=Method.NOISE, noise=2.0, seed=3),
        SamplingParams(top_k=20, seed=1, top_logprobs=0),
        SamplingParams(seed=1, filters=Filters(mirostat=2, mirostat_tau=4.0)),
    ]
    forms = [
        FORM,
        schema(PERSON),
        choice("a long answer, certain from its first letter on"),
        regex("id-[0-9]{2}-(foo|bar)-end"),
    ]
    held = [
        make_request(f"row {i}", constraint=form, sampling=how, max_tokens=60)
        for i, how in enumerate(samples)
        for form in forms
    ]
    return [
        *held,
        make_request("free", max_tokens=40),
        make_request("several", n=3, constraint=FORM, sampling=PENALISED, max_tokens=50),
    ]


def logprobs(running: RunningJob) -> dict[int, list[TokenLogprob]]:
    found: dict[int, list[TokenLogprob]] = {}
    for events in running.events:
        for delta in events.deltas:
            found.setdefault(delta.row, []).extend(delta.logprobs or ())
    return found


def alike(one: RunningJob, other: RunningJob) -> None:
    assert by_row(one) == by_row(other)
    ours, theirs = logprobs(one), logprobs(other)
    for row, entries in ours.items():
        assert [entry.token for entry in entries] == [entry.token for entry in theirs[row]]
        for entry, reported in zip(entries, theirs[row], strict=True):
            assert entry.logprob == pytest.approx(reported.logprob, abs=1e-4)
            assert [token for token, _ in entry.top] == [token for token, _ in reported.top]


def test_answers_equal_those_of_sampling_every_token(
    engine: Engine, jump_forward_disabled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled, fill = [0], Masks.fill

    def counted(masks: Masks, matchers: list[Matcher]) -> Any:
        sampled[-1] += len(matchers)
        return fill(masks, matchers)

    monkeypatch.setattr(Masks, "fill", counted)
    generated = engine.throughput.generated_tokens
    at_once = run(engine, *rows())
    generated = engine.throughput.generated_tokens - generated
    reported = sum(delta.num_tokens for events in at_once.events for delta in events.deltas)
    assert reported == sum(end.completion_tokens for end in at_once.finishes.values())
    assert reported <= generated <= reported + 3 * len(at_once.finishes), "jump-forward tokens count as generated"
    jump_forward_disabled()
    sampled.append(0)
    alike(at_once, run(engine, *rows()))
    assert sampled[0] < sampled[1] * 3 // 4, "jump-forward tokens are not sampled"


def test_on_a_cpu_any_number_of_rows_jumps_forward(engine: Engine) -> None:
    assert engine.jobs.jump_forward.max_rows >= engine.model_runner.limits.max_running
    before = engine.jobs.jump_forward.num_tokens
    run(
        engine,
        *(
            make_request(f"row {i}", constraint=choice("a long answer, certain from its first letter on"))
            for i in range(40)
        ),
    )
    assert engine.jobs.jump_forward.num_tokens - before >= 40 * 3


def test_rows_end_at_the_same_token(engine: Engine, jump_forward_disabled: Any) -> None:
    """Rows are cut by max_tokens at every position.

    Others are cut by stops that begin, end or lie in jump-forward text.
    """
    stops = (b"swer of", b"oracle", b"The", b" of the oracle is: ", b"matters.\n", b", and", b"!", b"e a", b"is: ")
    lengths = [make_request("x", constraint=FORM, sampling=PENALISED, max_tokens=length) for length in range(1, 28)]
    ends = [
        make_request("y", constraint=FORM, sampling=PENALISED, stop_strings=[stop], max_tokens=60) for stop in stops
    ]
    ids = [
        make_request("z", constraint=FORM, stop_ids=[token], max_tokens=60)
        for token in TOKENIZER.encode("answer oracle")
    ]
    at_once = [run(engine, *some) for some in (lengths, [*ends, *ids])]
    jump_forward_disabled()
    for ran in at_once:
        alike(ran, run(engine, *ran.job.rows))


def test_sessions_keep_the_shown_text(engine: Engine, jump_forward_disabled: Any) -> None:
    """A stop in jump-forward text, a cut turn, a whole turn: the next turn starts from the same state."""

    def talk(name: str) -> list[tuple[bytes, int]]:
        reported = []
        for i, stop in enumerate((b"oracle is", b"of the oracle is: ", b"nothing", b"never", b"\n", b"is: ")):
            how = {"constraint": FORM, "sampling": PENALISED, "stop_strings": [stop], "max_tokens": 30 if i % 2 else 12}
            for again in (
                turn(f"{name}{i}", "Speak:", **how),
                turn(f"{name}{i}", " On:", **how),
                turn(f"{name}{i}", "?"),
            ):
                ran = run(engine, again)
                reported.append((ran.all_texts[0], ran.finishes[0].cached_tokens))
        return reported

    at_once = talk(f"once{engine.loop_count}")
    jump_forward_disabled()
    assert talk(f"single{engine.loop_count}") == at_once
    assert eventually_holds(engine, lambda: integrity_faults(engine.model_runner.pool) == [])


def test_a_cancelled_row_leaves_nothing_behind(engine: Engine) -> None:
    free = free_slots(engine)
    endless = lark('start: ("again and again, " /[a-z]/ ", ")*')
    jobs = [
        submit(engine, make_request(f"{i}", constraint=endless, ignore_eos=True, max_tokens=10**6)) for i in range(6)
    ]
    for job in jobs:
        assert job.started.wait(60)
        engine.cancel(job.job.job_id)
    assert all(job.wait() for job in jobs)
    run(engine, make_request("x", max_tokens=1, use_prefix_cache=False))
    assert free_slots(engine) == free
    assert eventually_holds(engine, lambda: integrity_faults(engine.model_runner.pool) == [])


def test_a_banned_token_is_not_appended(engine: Engine) -> None:
    bans = {token: float("-inf") for token in TOKENIZER.encode(" oracle")}
    ran = submit(
        engine, make_request("x", constraint=FORM, sampling=SamplingParams(logit_bias=bans), max_tokens=60)
    ).wait()
    error = next(events.error for events in ran.events if events.error is not None)
    assert error.kind is ErrorKind.INVALID_FIELD and "with them every token that" in error.message


def test_jump_forward_tokens_are_those_that_masks_allow_alone() -> None:
    compiler = GrammarCompiler(TOKENIZER.byte_table, TOKENIZER.encode_bytes, 65536)
    rng, mask, runs = random.Random(3), np.zeros(2048, dtype=np.int32), 0

    def allowed(matcher: Matcher) -> list[int]:
        matcher.state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return [int(token) for token in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]

    for number in range(40):
        try:
            matcher = Matcher(compiler.compile(schema(random_schema(random.Random(number)))))
        except GrammarError:
            continue
        for _ in range(12):
            ended, jump_forward_tokens = False, matcher.jump_forward_tokens()
            runs += len(jump_forward_tokens) > 1
            for token in jump_forward_tokens:
                assert allowed(matcher) == [token] and not ended
                ended = matcher.advance(token)
            if ended or (token := rng.choice(allowed(matcher))) == 0 or matcher.advance(token):
                break
    assert runs > 10


@pytest.mark.parametrize("name", ["naive", "cpu"])
def test_samplers_count_jump_forward_tokens_for_penalties(name: str) -> None:
    params = [PENALISED, SamplingParams(seed=9, top_k=50), SamplingParams(temperature=0.0), PENALISED]
    params += [SamplingParams(seed=2, frequency_penalty=2.0, logit_bias={7: 3.0, 400: -2.0})]
    runs = [[5, 9, 5, 400], [7], [8, 8], [300, 5], [7, 400, 7]]
    device, vocab, req_slots = torch.device("cpu"), 1000, list(range(5))
    appended, sampled = (sampler_class(name)(5, vocab, device, [9]) for _ in range(2))
    for req_slot, own in enumerate(params):
        appended.admit(req_slot, own)
        sampled.admit(req_slot, own)
    logits = torch.randn(5, vocab)
    ahead = appended.sample_ahead(logits.clone(), req_slots, runs) if isinstance(appended, SamplesAhead) else None
    appended.append_tokens(req_slots[1:], runs[1:])
    appended.append_tokens(req_slots[:1], runs[:1])
    for req_slot, slot_tokens in enumerate(runs):
        for token in slot_tokens:
            mask = torch.zeros(1, -(-vocab // 32), dtype=torch.int32)
            mask[0, token // 32] = 1 << token % 32
            assert sampled.sample(torch.randn(1, vocab), [req_slot], mask).token_ids.tolist() == [token]
    both = [each.sample(logits.clone(), req_slots).token_ids for each in (appended, sampled)]
    assert torch.equal(*both) and (ahead is None or torch.equal(ahead, both[0]))
    for step in range(20):
        logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(step)) * 2
        expected = sampled.sample(logits.clone(), req_slots).token_ids
        if isinstance(appended, SamplesAhead):
            ahead = appended.sample_ahead(logits.repeat(2, 1), req_slots * 2, [[]] * 10)
            assert torch.equal(ahead, expected.repeat(2)), "and it counts nothing"
        assert torch.equal(appended.sample(logits.clone(), req_slots).token_ids, expected)
