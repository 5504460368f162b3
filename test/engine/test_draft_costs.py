"""When rows draft: costs by measurement, acceptance, and what pays, without an engine."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from rwkv_batch.core.draft_costs import SKIPPED_STEPS, Added, StepTimes, best_length
from rwkv_batch.core.drafters import MAX_DRAFT_TOKENS, Draft, LookupDrafter, ModelDrafter, RowDrafter, Wanted
from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.speculation import Speculation
from test.harness import make_request


def test_a_draft_is_as_long_as_it_pays() -> None:
    assert best_length(0.0, 0.1) == best_length(0.9, 5.0) == (0, 0.0)
    lengths = [best_length(rate, 0.1)[0] for rate in (0.3, 0.5, 0.7, 0.9, 1.0)]
    assert lengths == sorted(lengths) and lengths[-1] == MAX_DRAFT_TOKENS


def test_costs_are_measured_per_step_and_per_token() -> None:
    times = StepTimes()
    assert times.cost(4, 0.0).token == 4 * times.cost(1, 0.0).token, "nothing is measured"
    for drafted in (
        0,
        *[9] * SKIPPED_STEPS,
        *range(1, 17),
        0,
        *range(1, 17),
    ):  # the first steps with drafts do not count
        times.count(4, drafted, 0.010 + (0.002 + 0.001 * drafted if drafted else 0))
    assert times.cost(4, 0.005) == pytest.approx((0.8, 0.4, 2.0))
    times.count(8, 0, 60.0)  # captures a graph
    times.count(8, 0, 0.010)
    assert times.cost(8, 0.005) == pytest.approx((1.6, 0.8, 4.0)), "of the next size that is measured"
    times.count(4, 9, 60.0)
    assert times.cost(4, 0.005).fixed < 1.5, "one that waited for something else counts little"


def test_rows_draft_together_or_not_at_all() -> None:
    """All rows share what a step with drafts takes longer. Probes take a small share of the time."""
    slots: Any = SimpleNamespace(allocate=lambda: 5, drop_ref=lambda _: None)
    for rates, expected in (((0.7, 0.7, 0.7, 0.7), {4: 1000}), ((0.7, 0.0, 0.0, 0.0), {0: 994, 4: 6})):
        speculation = Speculation("auto", slots, lambda _: None)
        speculation.times.plain_s = dict.fromkeys(range(5), 0.002)
        speculation.times.added[4] = Added(5.0, 50.0, 505.0, 0.0075, 0.0755)  # 1.4 ms and 0.01 ms a token
        counts = Counter(
            sum(
                row.sequence.draft is not None
                for row in speculation.add_drafts([row_that_decodes(predicted(one)) for one in rates])
            )
            for _ in range(1000)
        )
        assert counts == expected


def predicted(rate: float) -> RowDrafter:
    return RowDrafter(LookupDrafter("prediction", [1, 2, 3], start=1), rate)


def row_that_decodes(drafter: RowDrafter, max_tokens: int = 40) -> Any:
    sequence = SimpleNamespace(
        draft=None,
        members=[],
        scored=None,
        cache_points=[],
        drafters=[drafter],
        shared=None,
        token_ids=[7],
        prompt_end=1,
        request=make_request("", max_tokens=max_tokens),
        read_slot=3,
        write_slot=3,
        slot=3,
        has_sampled=True,
    )
    return ScheduledRow(sequence, 1, samples_token=True)  # type: ignore[arg-type]


def test_tokens_after_a_wrong_one_say_nothing_of_new_rows() -> None:
    """A drafter whose tokens are right with 0.9 gets half of sixteen accepted."""
    slots, rng = SimpleNamespace(drop_ref=lambda _: None), random.Random(0)
    speculation = Speculation("auto", slots, lambda _: None)  # type: ignore[arg-type]
    for _ in range(300):
        accepted = next((i for i in range(16) if rng.random() > 0.9), 16)
        sequence = SimpleNamespace(draft=Draft(RowDrafter(ModelDrafter(), 0.6), [1] * 16, 0, num_accepted=accepted))
        speculation.drop(sequence)  # type: ignore[arg-type]
    assert speculation._expected_rate("model") == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize(("rate", "least"), [(0.0, 0.98), (0.7, 1.2), (0.9, 1.7)])
def test_drafts_pay_with_the_times_of_a_gpu(monkeypatch: pytest.MonkeyPatch, rate: float, least: float) -> None:
    """Plain steps take 1.94 ms, with drafts 2.75, guesses 0.33; the first ones took ten times as long."""
    clock, rng, guessed = 100.0, random.Random(1), 0
    monkeypatch.setattr("rwkv_batch.core.speculation.time", SimpleNamespace(monotonic=lambda: clock))

    def guess(wanted: list[Wanted]) -> Any:
        nonlocal clock, guessed
        (one,), guessed = wanted, guessed + 1
        one.drafter.num_read, one.drafter.guesses = one.length, [7] * one.num_tokens
        seconds = 0.00033 * one.num_tokens * (10 if guessed < 5 else 1)
        clock += seconds
        return SimpleNamespace(seconds=seconds, read=lambda: None)

    slots = SimpleNamespace(allocate=lambda: 5, drop_ref=lambda _: None)
    speculation = Speculation("auto", slots, lambda _: None, SimpleNamespace(guess=guess))  # type: ignore[arg-type]
    for answer in range(8):
        row = row_that_decodes(RowDrafter(ModelDrafter(), speculation._expected_rate("model")), max_tokens=256)
        sequence, began = row.sequence, clock
        while len(sequence.token_ids) < 257:
            begun, drafted = clock, 0
            speculation.add_drafts([row])
            sequence.token_ids.append(7)
            clock += 0.00194
            if (draft := sequence.draft) is not None:
                clock += 0.0008 + 0.00001 * len(draft.tokens)
                drafted, right = len(draft.tokens), [rng.random() < rate for _ in draft.tokens]
                draft.num_accepted = next((i for i, one in enumerate(right) if not one), drafted)
                sequence.token_ids += [7] * draft.num_accepted
                speculation.drop(sequence)
            speculation.count_step([row], begun, drafted)
        ratio = 256 * 0.00194 / (clock - began)
        clock += 1.0
        assert answer < 3 or ratio > least, answer
