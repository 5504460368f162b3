"""Rows with filters in an engine: any batch, sessions, constraints, and the prompt as history."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rwkv_batch.engine import Engine
from rwkv_batch.request import GenerateRequest, Resumed
from sampling.grammar.constraint import Constraint, Form
from sampling.params import Filters, SamplingParams
from test.conftest import rest_slow
from test.harness import TOKENIZER, make_request, run, started_engine, turn

EVERY = Filters(
    min_p=0.001,
    typical_p=0.99,
    top_n_sigma=5.0,
    xtc_probability=0.3,
    repetition_penalty=1.1,
    dry_multiplier=0.8,
    dynatemp_range=0.2,
    min_tokens=4,
)
MIROSTAT = Filters(mirostat=2, mirostat_tau=4.0)


@pytest.fixture(scope="module", params=rest_slow(["cpu", "naive"], long=["naive"]))
def engine(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Engine]:
    with started_engine(tiny_model, samplers=(request.param,)) as running:
        yield running


def sampled(filters: Filters | None, seed: int, **fields: object) -> GenerateRequest:
    params = SamplingParams(top_p=0.9, top_k=60, presence_penalty=0.5, seed=seed, filters=filters)
    return make_request("One two one two one", sampling=params, **{"max_tokens": 7, **fields})


def test_a_text_is_the_same_alone_and_in_a_batch(engine: Engine) -> None:
    for filters in (EVERY, MIROSTAT):
        (alone,) = run(engine, sampled(filters, 7)).all_texts
        others = [sampled(one, seed, n=2) for seed, one in enumerate((None, EVERY, MIROSTAT, Filters(min_p=0.2)))]
        constrained = sampled(filters, 3, constraint=Constraint(form=Form.REGEX, source="[a-z]{5}"))
        texts = run(engine, *others[:2], sampled(filters, 7), *others[2:], constrained).all_texts
        assert texts[4] == alone and len(texts[-1]) == 5


def test_the_prompt_is_history(engine: Engine) -> None:
    """A token of the prompt is penalised: the next best one is sampled."""
    best, second = TOKENIZER.encode("A")[0], TOKENIZER.encode("B")[0]
    filters, bias = Filters(repetition_penalty=100.0, repeat_last_n=2), {best: 1000.0, second: 500.0}
    params = SamplingParams(temperature=0.0, filters=filters, logit_bias=bias)
    prompts = ([best, 11], [best, 11, 12], [11])
    rows = [make_request(prompt, max_tokens=1, sampling=params) for prompt in prompts]
    assert run(engine, *rows).all_texts == [b"B", b"A", b"A"]
    first = run(engine, turn("s", "x", max_tokens=2, sampling=params))
    assert first.all_texts == [b"AB"]


def test_a_lost_engines_tokens_are_history(engine: Engine) -> None:
    whole = run(engine, sampled(EVERY, 5, max_tokens=10, ignore_eos=True, chunk_size=1), return_token_ids=True)
    ids = [token for events in whole.events for delta in events.deltas for token in delta.token_ids]
    resumed = Resumed(token_ids=ids[:4], shown=0)
    rest = run(engine, sampled(EVERY, 5, max_tokens=10, ignore_eos=True, resumed=resumed))
    assert whole.all_texts[0].endswith(rest.all_texts[0])
