"""Mixtures of tuned states: a text sampled from the mixed logits of several states, together with other rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from demo.random_weights import write_random_model
from rwkv_batch.engine import Engine
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.fleet.in_flight_job import Progress
from rwkv_batch.request import Finish, GenerateRequest, JobEvents
from sampling.naive import NaiveSampler
from sampling.params import SamplingParams
from state_pool.config import PoolConfig
from test.harness import (
    TOKENIZER,
    call,
    eventually_holds,
    free_slots,
    make_request,
    run,
    started_engine,
    submit,
    tiny_model,
    turn,
)
from test.model.test_model import oracle
from test.pool_integrity import integrity_faults
from test.state_files import random_state, write_state

pytestmark = pytest.mark.slow

NAMES = ("pirate", "poet", "clerk")
MIXES: list[list[tuple[str, float]]] = [
    [("pirate", 1.0), ("poet", 1.0)],
    [("poet", 3.0), ("", 1.0)],
    [("", 0.5), ("clerk", 0.25), ("pirate", 2.0), ("poet", 1.0)],
    [("poet", 2.0), ("", -1.0)],
    [("poet", 1.0)],
]
GREEDY = {"ignore_eos": True, "max_tokens": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtures")
    for seed, name in enumerate(NAMES):
        write_state(folder / f"{name}.pth", random_state(seed, width=64))
    write_random_model(folder / "oracle.pth", layers=3, width=64)
    return tiny_model(folder)


@contextlib.contextmanager
def engine_with_states(model: Path, **fields: Any) -> Iterator[Engine]:
    states = tuple(f"{name}={model.parent / name}.pth" for name in NAMES)
    pool = PoolConfig(**{"state_db": "", **fields.pop("pool", {})})
    with started_engine(model, pool, states=states, **fields) as engine:
        yield engine
        assert eventually_holds(engine, lambda: integrity_faults(engine.model_runner.pool) == [])


@pytest.fixture(scope="module", params=["plain", "overlapped"])
def engine(model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with engine_with_states(model, overlap_on_cpu=request.param == "overlapped") as engine:
        yield engine


def reference_text(model: Path, ids: list[int], mix: list[tuple[str, float]], params: SamplingParams, n: int) -> bytes:
    """Return the text that the naive sampler samples from mixed reference logits.

    The reference package computes logits per state. They are mixed here.
    """
    reference = oracle(model.parent / "oracle.pth")
    _, zero = reference.forward([0], None)
    states: list[list[Tensor]] = []
    for name, _ in mix:
        state = [torch.zeros_like(one) for one in zero]
        for layer, wkv in enumerate(random_state(NAMES.index(name), width=64) if name else ()):
            state[3 * layer + 1] = wkv.clone()
        states.append(state)
    sampler = NaiveSampler(1, 65536, torch.device("cpu"), [])
    sampler.admit(0, params)
    total, sampled = sum(weight for _, weight in mix), []
    tokens = list(ids)
    for _ in range(n):
        logits = torch.zeros(65536)
        for k, (_, weight) in enumerate(mix):
            received, states[k] = reference.forward(list(tokens), states[k])
            logits += weight / total * torch.as_tensor(received).float()
        tokens = [int(sampler.sample(logits[None], [0]).token_ids)]
        sampled += tokens
    return b"".join(TOKENIZER.byte_table[token] for token in sampled)


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_the_text_is_sampled_from_the_mixed_logits(model: Path, engine: Engine, mix: list[tuple[str, float]]) -> None:
    ids = TOKENIZER.encode("Once upon a time")
    bans = {0: float("-inf")}
    for params in (
        SamplingParams(temperature=0.0, logit_bias=bans),
        SamplingParams(temperature=0.0, presence_penalty=2, frequency_penalty=0.5, penalty_decay=0.9, logit_bias=bans),
        SamplingParams(temperature=1.0, top_p=0.8, top_k=40, seed=5, logit_bias=bans),
    ):
        text = run(engine, make_request(ids, mixture=mix, sampling=params, max_tokens=6)).texts[0]
        assert text == reference_text(model, ids, mix, params, 6)


def test_a_single_member_equals_its_state(engine: Engine) -> None:
    alone = run(engine, make_request("hello", state="poet", **GREEDY)).texts
    assert run(engine, make_request("hello", mixture=[("poet", 7.0)], **GREEDY)).texts == alone
    assert run(engine, make_request("hello", mixture=[("poet", 1.0), ("poet", 1.0)], **GREEDY)).texts == alone
    assert run(engine, make_request("hello", mixture=[("poet", 1.0), ("pirate", 0.0)], **GREEDY)).texts == alone


def test_continuations_and_max_tokens(engine: Engine) -> None:
    mix = [("poet", 1.0), ("", 1.0)]
    three = run(engine, make_request("Tell me", mixture=mix, n=3, **GREEDY))
    assert set(three.all_texts) == {run(engine, make_request("Tell me", mixture=mix, **GREEDY)).texts[0]}
    assert three.finishes[0].completion_tokens == 8


def test_slots_come_back_from_mixtures_that_are_cancelled(model: Path) -> None:
    with engine_with_states(model, max_running=4) as engine:
        free = free_slots(engine)
        jobs = [
            submit(engine, make_request("go on", mixture=MIXES[2], max_tokens=10_000, ignore_eos=True))
            for _ in range(6)
        ]
        assert jobs[0].started.wait(60)
        for job in jobs:
            engine.cancel(job.job.job_id)
            job.wait()
        run(engine, make_request("hello"))
        pool = engine.model_runner.pool
        assert eventually_holds(engine, lambda: pool.tiers.slots.num_free + len(pool.tuned.slots) == free)


def test_many_mixtures_share_few_slots(model: Path) -> None:
    """More members wait than there are slots. All are served; no deadlock."""
    pool = {"l1_sessions": 0, "prefix_cache_slots": 0, "state_slots": 1}
    with engine_with_states(model, max_running=3, pool=pool) as engine:
        mixes = [[(NAMES[i % 3], 1.0), (NAMES[(i + 1) % 3], 1.0), ("", 0.5)] for i in range(12)]
        rows = [make_request(f"few {i}", mixture=mix, **GREEDY) for i, mix in enumerate(mixes)]
        jobs = [submit(engine, row) for row in [*rows, *(make_request(f"plain {i}", **GREEDY) for i in range(8))]]
        texts = [job.wait().texts[0] for job in jobs]
        assert texts == [run(engine, job.job.rows[0]).texts[0] for job in jobs]


def test_a_constraint_and_log_probabilities(engine: Engine) -> None:
    mix = [("poet", 2.0), ("", -1.0)]
    sampling = SamplingParams(temperature=0.0, top_logprobs=2)
    received = run(engine, make_request("hello", mixture=mix, sampling=sampling, max_tokens=4))
    entries = received.logprobs
    assert all(entry.top[0][1] <= 0 and entry.logprob == entry.top[0][1] for entry in entries) and entries


@pytest.mark.parametrize(
    ("row", "kind", "why"),
    [
        (make_request("a", mixture=[("poet", 1.0), ("nobody", 1.0)]), ErrorKind.STATE_NOT_FOUND, "'nobody'"),
        (make_request("a", mixture=[("", 1.0)] * 17), ErrorKind.INVALID_FIELD, "has 17 states, the limit is 16"),
        (turn("s", "a", mixture=[("poet", 1.0), ("", 1.0)]), ErrorKind.INVALID_FIELD, "which stores no token logs"),
    ],
    ids=["unknown", "too many", "session"],
)
def test_refused(engine: Engine, row: GenerateRequest, kind: ErrorKind, why: str) -> None:
    with pytest.raises(ServiceError) as refused:
        run(engine, make_request("good"), row) if row.session is None else run(engine, row)
    assert refused.value.info.kind is kind and why in refused.value.info.message
    assert refused.value.info.field in ("states", "state")
    assert call(engine, "status")["running_rows"] == 0


def test_more_members_than_half_the_slots_are_refused(model: Path) -> None:
    pool = {"l1_sessions": 0, "prefix_cache_slots": 0}
    with engine_with_states(model, max_running=1, pool=pool) as engine:
        slots = engine.model_runner.pool.tiers.slots.num_usable
        with pytest.raises(ServiceError, match="half of this server"):
            run(engine, make_request("a", mixture=[("", 1.0)] * (slots // 2 + 1)))
        run(engine, make_request("a", mixture=[("", 1.0)] * (slots // 2), **GREEDY))


def test_a_mixture_under_a_name(model: Path, tmp_path: Path) -> None:
    pool = {"state_db": str(tmp_path / "s.db")}
    mix = [("poet", 3.0), ("", 1.0)]
    with engine_with_states(model, pool=pool) as engine:
        info = call(engine, "state_add", name="duo", mixture=mix)
        assert info.mixture == mix and info.is_kept
        text = run(engine, make_request("hello", state="duo", **GREEDY)).texts[0]
        assert text == run(engine, make_request("hello", mixture=mix, **GREEDY)).texts[0]
        assert run(engine, turn("s", "hello", state="duo", **GREEDY)).texts[0] == text
        engine.state_manager.parked.clear()
        for name, members, why in (("duo", mix, "already"), ("poet", mix, "already"), ("x", [("no", 1.0)], "'no'")):
            with pytest.raises(ServiceError, match=why):
                call(engine, "state_add", name=name, mixture=members)
        with pytest.raises(ServiceError, match="there is a mixture 'duo'"):
            call(engine, "state_add", name="duo", content=b"x")
    with engine_with_states(model, pool=pool) as engine:
        assert run(engine, make_request("hello", state="duo", **GREEDY)).texts[0] == text
        call(engine, "state_remove", name="poet")
        with pytest.raises(ServiceError, match="no tuned state 'poet'"):
            run(engine, make_request("hello", state="duo"))
        call(engine, "state_remove", name="duo")
        assert "duo" not in [info.name for info in call(engine, "state_list")]
    assert not list((tmp_path / "s.db.states").iterdir())


SAID = ["User: hello there\n\nAssistant:", "\n\nUser: and again\n\nAssistant:", "\n\nUser: once more\n\nAssistant:"]


def whole_conversation(engine: Engine, session_id: str, mix: list[tuple[str, float]], **fields: Any) -> list[bytes]:
    """A session's turns. Each must equal one prompt with the whole conversation."""
    said: list[int] = []
    texts = []
    for prompt in SAID:
        said += TOKENIZER.encode(prompt)
        sampling = SamplingParams(temperature=0.0, top_logprobs=0, logit_bias={0: float("-inf")})
        received = run(engine, turn(session_id, prompt, mixture=mix, sampling=sampling, max_tokens=9, **fields))
        assert received.finishes[0].error is None, received.finishes[0].error
        alone = run(engine, make_request(list(said), mixture=mix, sampling=sampling, max_tokens=9))
        assert received.texts == alone.texts and received.finishes[0].prompt_tokens == len(said)
        entries = received.logprobs
        said += [TOKENIZER.byte_table.index(entry.token) for entry in entries]
        texts.append(received.texts[0])
    return texts


@pytest.mark.parametrize("overlap", [False, True])
def test_sessions_of_mixtures_continue_parked_evicted_and_after_a_restart(
    model: Path, tmp_path: Path, overlap: bool
) -> None:
    pool = {"state_db": str(tmp_path / "s.db"), "l1_sessions": 6}
    mix, other = MIXES[1], MIXES[2]
    with engine_with_states(model, pool=pool, overlap_on_cpu=overlap) as engine:
        texts = whole_conversation(engine, "one", mix)
        parked = engine.state_manager.parked
        assert len(parked.slots) == 2, "its members are parked"
        goes_on = run(engine, turn("one", " and", mixture=mix, **GREEDY)).finishes[0]
        assert goes_on.prompt_tokens - goes_on.cached_tokens <= 2, "parked tokens are not read again"
        for i in range(4):  # four members per mixture evict the parked slots
            run(engine, turn(f"other-{i}", SAID[0], mixture=other, **GREEDY))
        assert len(parked.slots) == 4
        read_again = run(engine, turn("one", " what", mixture=mix, **GREEDY))
        again = read_again.texts
        assert read_again.finishes[0].cached_tokens == 0
        parked.clear()
    with engine_with_states(model, pool=pool, overlap_on_cpu=overlap) as engine:
        assert whole_conversation(engine, "two", mix, stop_strings=[b"never"]) == texts
        run(engine, turn("two", " and", mixture=mix, **GREEDY))
        assert run(engine, turn("two", " what", mixture=mix, **GREEDY)).texts == again
        after = run(engine, turn("one", " so", mixture=mix, **GREEDY)).texts
        assert run(engine, turn("two", " so", mixture=mix, **GREEDY)).texts == after
        refused: list[tuple[dict[str, Any], str]] = [
            ({}, "name these states"),
            ({"mixture": MIXES[0]}, "name these states"),
        ]
        for fields, why in refused:
            with pytest.raises(ServiceError, match=why):
                run(engine, turn("one", "x", **fields, **GREEDY))
        run(engine, turn("plain", "x", **GREEDY))
        with pytest.raises(
            ServiceError, match="not known to have begun with a mixture of poet, empty: it began with the "
        ):
            run(engine, turn("plain", "x", mixture=mix, **GREEDY))
        with pytest.raises(ServiceError, match="which has no state to export"):
            call(engine, "session_export", session_id="one")
        engine.state_manager.parked.clear()


def test_tokens_that_are_read_again_are_reported_and_bounded(model: Path, tmp_path: Path) -> None:
    """Nothing is parked, so each turn reads its whole session."""
    pool = {"state_db": str(tmp_path / "s.db"), "l1_sessions": 0}
    with engine_with_states(model, pool=pool) as engine:

        def turn_with(limit: int) -> Finish:
            asked = turn("s", SAID[1], mixture=MIXES[1], **GREEDY)
            session = msgspec.structs.replace(asked.session, max_replayed_tokens=limit)
            received = run(engine, msgspec.structs.replace(asked, session=session), return_token_ids=True)
            replayed.append(sum(events.num_replayed for events in received.events))
            return received.finishes[0]

        replayed: list[int] = []
        lengths = [0]
        for _ in range(3):
            finish = turn_with(limit=lengths[-1])
            assert finish.error is None and finish.cached_tokens == 0
            lengths.append(finish.prompt_tokens + finish.completion_tokens)
        assert replayed == lengths[:3]
        refused = turn_with(limit=lengths[-1] - 1).error
        assert refused is not None and (refused.kind, refused.field) == (ErrorKind.INVALID_FIELD, "session_id")
        assert f"{lengths[-1]} tokens of the session" in refused.message and "--max-request-tokens" in refused.message
        assert refused.given == lengths[-1]
        assert turn_with(limit=lengths[-1]).error is None, "the session is as it was"


def test_parked_tokens_do_not_count_as_read_again(model: Path, tmp_path: Path) -> None:
    with engine_with_states(model, pool={"state_db": str(tmp_path / "s.db"), "l1_sessions": 8}) as engine:
        first = turn("s", SAID[0], mixture=MIXES[1], **GREEDY)
        run(engine, first)
        replayed = sum(events.num_replayed for events in run(engine, first, return_token_ids=True).events)
        assert replayed > 0, "the last token was sampled and not read"
        session = msgspec.structs.replace(first.session, max_replayed_tokens=replayed)
        assert run(engine, msgspec.structs.replace(first, session=session)).finishes[0].error is None
        engine.state_manager.parked.clear()


def test_a_kept_turn_of_a_lost_engine_does_not_run_again(model: Path, tmp_path: Path) -> None:
    """The end of each turn is lost. The second turn starts from the parked state of the first."""
    with engine_with_states(model, pool={"state_db": str(tmp_path / "s.db")}) as engine:
        for prompt in SAID[:2]:
            kept = run(engine, turn("s", prompt, mixture=MIXES[1], chunk_size=1, **GREEDY), return_token_ids=True)
            progress = Progress(kept.job)
            for delta in [delta for events in kept.events for delta in events.deltas][:4]:
                progress.record(JobEvents(job_id="x", deltas=[delta]))
            remaining_job = progress.remaining_job()
            assert remaining_job is not None
            error = run(engine, *remaining_job.rows).finishes[0].error
            assert error is not None and error.kind is ErrorKind.ENGINE_LOST and "may have been kept" in error.message
        engine.state_manager.parked.clear()


def test_a_stop_inside_tokens_is_not_in_a_mixtures_session(model: Path, tmp_path: Path) -> None:
    with engine_with_states(model, pool={"state_db": str(tmp_path / "s.db")}) as engine:
        mix = MIXES[1]
        free = run(engine, make_request(SAID[0], mixture=mix, max_tokens=20, ignore_eos=True)).texts[0]
        text = free.decode(errors="ignore")
        stop = text[len(text) // 2 :][:5].encode()
        fields: dict[str, Any] = {"mixture": mix, "max_tokens": 20, "ignore_eos": True, "stop_strings": [stop]}
        texts = [run(engine, turn(name, SAID[0], **fields)).texts[0] for name in ("parked", "read again")]
        assert texts == [free[: free.index(stop)]] * 2
        parked = run(engine, turn("parked", " and then", mixture=mix, **GREEDY)).texts
        engine.state_manager.parked.clear()
        assert run(engine, turn("read again", " and then", mixture=mix, **GREEDY)).texts == parked
        engine.state_manager.parked.clear()
