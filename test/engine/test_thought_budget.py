"""A thought that uses up its tokens ends: with and without jump-forward, and inside no character."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rwkv_batch.engine import Engine
from sampling.grammar.constraint import THINK_END, Constraint, Form
from sampling.grammar.matcher import ThoughtBudget
from sampling.params import SamplingParams
from test.harness import TOKENIZER, make_request, run, started_engine

END = f"\n{THINK_END}".encode()
FREE = Constraint(form=Form.REGEX, source="(?s:.*)", after=THINK_END, thought_tokens=6)


@pytest.fixture(scope="module", params=[-1, 32])
def engine(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Engine]:
    """Engines without and with jump-forward decoding."""
    with started_engine(tiny_model) as running:
        running.jobs.jump_forward.max_rows = request.param
        yield running


def test_the_end_of_a_thought_is_forced(engine: Engine) -> None:
    params = [SamplingParams(seed=seed) for seed in range(4)]
    rows = [make_request("a", sampling=one, constraint=FREE, max_tokens=20, ignore_eos=True) for one in params]
    free = [make_request("a", sampling=one, max_tokens=6, ignore_eos=True) for one in params]
    for text, thought in zip(run(engine, *rows).all_texts, run(engine, *free).all_texts, strict=True):
        before, found, after = text.partition(END)
        assert found and after, "the text goes on after it"
        assert before == thought or before.startswith(thought), "a character is completed first"


def test_a_constraint_follows_the_forced_end(engine: Engine) -> None:
    constraint = Constraint(form=Form.CHOICE, source='["yes", "no"]', after=THINK_END, thought_tokens=3)
    (text,) = run(engine, make_request("a", constraint=constraint, max_tokens=40, ignore_eos=True)).all_texts
    assert text.partition(END)[2] in (b"yes", b"no")


def test_budgets_count_until_the_thought_ends() -> None:
    end = TOKENIZER.encode(END.decode())

    def forced_after(text: str, tokens: int) -> list[bool]:
        budget, found = ThoughtBudget(tokens, end, TOKENIZER.byte_table), []
        for byte in text.encode():  # token byte + 1 is one byte
            budget.advance(byte + 1)
            found.append(bool(budget.forced))
            if budget.is_over:
                break
        return found

    assert forced_after("abc", 3) == [False, False, True]
    assert forced_after("ab中", 3) == [False, False, False, False, True], "not inside a character"
    assert forced_after(f"a{THINK_END}bcdef", 20) == [False] * 9, "the thought has ended"
    budget = ThoughtBudget(1, end, TOKENIZER.byte_table)
    for token in (66, *end):
        assert not budget.is_over
        budget.advance(token)
    assert budget.is_over and not budget.forced
