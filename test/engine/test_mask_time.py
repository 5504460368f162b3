"""Rows under a grammar leave steps to others for what they take beyond them, told by counting steps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from rwkv_batch.core.limits import Limits
from rwkv_batch.core.mask_time import MAX_DEBT_ROWS, MAX_SKIPPED_STEPS, MaskTimeBalancer, StepCosts
from rwkv_batch.core.scheduler import ScheduledRow, Scheduler
from rwkv_batch.core.sequence import Sequence
from sampling.grammar.errors import GrammarError
from sampling.grammar.masks import Masks
from sampling.grammar.matcher import Grammar, Matcher
from test.engine.test_constraints import by_row, mixed_rows, regex
from test.engine.test_scheduler import Slots, job, read
from test.harness import make_request, run, started_engine, tiny_model

PART_S = 0.01
"""A row's part of each step here: four tenths for the layers, two for a draw."""


class Steps:
    """A scheduler and its steps, which take as long as they are told to."""

    def __init__(self, masks_block_step: bool = True) -> None:
        limits = Limits(64, 10_000, 256, 256, 256, masks_block_step=masks_block_step)
        self.plan = Scheduler(limits, Slots(500))

    def rows(self, count: int, held: bool, is_batch: bool = False) -> list[Sequence]:
        """Rows come, of one job."""
        running, sequences = job(count)
        running.is_batch = is_batch
        for sequence in sequences if held else ():
            sequence.matcher = Matcher(Grammar(None, ""))  # type: ignore[arg-type]
        self.plan.add(running, sequences)
        return sequences

    def step(self, mask_s: float = 0.0) -> list[ScheduledRow]:
        """Run the next step, in which the mask of each row takes so long."""
        rows = self.plan.schedule()
        read(rows)
        held = [row.sequence for row in rows if row.sequence.matcher is not None]
        tokens, free = sum(row.num_tokens for row in rows), len(rows) - len(held)
        seconds = [part * PART_S for part in (len(rows) - 0.2 * len(held), 0.4 * len(rows), 0.2 * free)]
        self.plan.mask_time.count(StepCosts(tokens, len(rows), free, *seconds))
        self.plan.mask_time.charge_masks(held, (mask_s + 0.2 * PART_S) * len(held))
        return rows

    def mask_time(self, steps: int, mask_s: float) -> Counter[Sequence]:
        """In how many of so many steps each row is."""
        return Counter(row.sequence for _ in range(steps) for row in self.step(mask_s))


def test_a_row_gives_back_the_time_of_its_masks() -> None:
    steps = Steps()
    free, held = steps.rows(4, held=False), steps.rows(4, held=True)
    mask_time = steps.mask_time(300, mask_s=PART_S / 2)
    assert {mask_time[row] for row in free} == {300}, "others are in every step"
    assert all(199 <= mask_time[row] <= 202 for row in held), "two steps with masks take as long as three without"


def test_a_row_gives_back_what_certain_text_takes() -> None:
    steps = Steps()
    _, (held,) = steps.rows(1, held=False), steps.rows(1, held=True)
    steps.step()
    steps.plan.mask_time.charge(held, 0.0, tokens=3)
    mask_time = steps.mask_time(20, mask_s=0.0)
    assert mask_time[held] == 18, "with the one that it has not given back yet it has as many tokens as the other"


def test_a_slow_grammar_leaves_its_row_a_part_of_the_steps() -> None:
    steps = Steps()
    (free,), (held,) = steps.rows(1, held=False), steps.rows(1, held=True)
    mask_time = steps.mask_time(80, mask_s=100 * PART_S)
    assert (mask_time[free], mask_time[held]) == (80, 80 // (1 + MAX_SKIPPED_STEPS))
    assert steps.mask_time(2 * MAX_DEBT_ROWS, mask_s=0.0)[held] < 2 * MAX_DEBT_ROWS
    assert steps.mask_time(20, mask_s=0.0)[held] == 20, "what something else held up is forgotten soon"


def test_rows_that_are_all_held_owe_nobody() -> None:
    steps = Steps()
    held = steps.rows(4, held=True)
    assert {steps.mask_time(20, mask_s=PART_S / 2)[row] for row in held} == {20}
    steps.rows(1, held=False)
    assert len(steps.step()) == 5, "nor to one that comes later"


@pytest.mark.parametrize(("held_is_batch", "free_is_batch", "gives"), [(False, True, False), (True, False, True)])
def test_interactive_rows_leave_no_step_to_batch_work(held_is_batch: bool, free_is_batch: bool, gives: bool) -> None:
    steps = Steps()
    steps.rows(2, held=False, is_batch=free_is_batch)
    (held,) = steps.rows(1, held=True, is_batch=held_is_batch)
    assert (steps.mask_time(20, mask_s=PART_S)[held] < 20) == gives


def test_nothing_is_owed_where_masks_are_computed_beside_the_step() -> None:
    steps = Steps(masks_block_step=False)
    steps.rows(2, held=False)
    (held,) = steps.rows(1, held=True)
    assert steps.mask_time(20, mask_s=PART_S)[held] == 20


def test_rows_that_take_turns_say_what_they_say_in_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill, charge = Masks.fill, MaskTimeBalancer.charge_masks
    rows = [
        *mixed_rows(),
        make_request("Spell", constraint=regex("[a-z]{60}"), max_tokens=60),
        make_request("Go on", max_tokens=200),
    ]
    with started_engine(tiny_model(tmp_path), samplers=("cpu",)) as engine:
        drawn: list[int] = []
        """numbers of the steps in which masks were computed"""

        def noted(masks: Masks, matchers: list[Matcher]) -> tuple[torch.Tensor, list[GrammarError | None]]:
            drawn.append(engine.throughput.steps)
            return fill(masks, matchers)

        expected = by_row(run(engine, *rows))
        monkeypatch.setattr(Masks, "fill", noted)
        monkeypatch.setattr(MaskTimeBalancer, "charge_masks", lambda mask_time, held, _: charge(mask_time, held, 1e6))
        assert by_row(run(engine, *rows)) == expected
        assert drawn[-1] - drawn[0] > 2 * len(drawn), "rows without a constraint have steps of their own"
