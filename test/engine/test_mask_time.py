"""Constrained rows skip steps to repay their mask time. The tests count steps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from rwkv_batch.core.scheduler import ScheduledRow, Scheduler
from rwkv_batch.core.sequence import Sequence
from rwkv_batch.core.shares import MAX_DEBT_ROWS, MAX_SKIPPED_STEPS, Limits, MaskTimeBalancer, StepCosts
from sampling.grammar.constraint import GrammarError
from sampling.grammar.masks import Masks
from sampling.grammar.matcher import Grammar, Matcher
from test.engine.test_constraints import by_row, mixed_rows, regex
from test.engine.test_scheduler import Slots, job, read
from test.harness import make_request, run, started_engine

PART_S = 0.01
"""A row's share of each step: four tenths for the layers, two tenths for sampling."""


class Steps:
    """A scheduler with steps of given duration."""

    def __init__(self, masks_block_step: bool = True) -> None:
        limits = Limits(64, 10_000, 256, 256, 256, masks_block_step=masks_block_step)
        self.plan = Scheduler(limits, Slots(500))

    def rows(self, count: int, constrained: bool, is_batch: bool = False) -> list[Sequence]:
        running, sequences = job(count)
        running.is_batch = is_batch
        for sequence in sequences if constrained else ():
            sequence.matcher = Matcher(Grammar(None, ""))  # type: ignore[arg-type]
        self.plan.add(running, sequences)
        return sequences

    def step(self, mask_s: float = 0.0) -> list[ScheduledRow]:
        """Run the next step. Each constrained row's mask takes this long."""
        rows = self.plan.schedule()
        read(rows)
        constrained = [row.sequence for row in rows if row.sequence.matcher is not None]
        tokens, free = sum(row.num_tokens for row in rows), len(rows) - len(constrained)
        seconds = [part * PART_S for part in (len(rows) - 0.2 * len(constrained), 0.4 * len(rows), 0.2 * free)]
        self.plan.mask_time.count(StepCosts(tokens, len(rows), free, *seconds))
        self.plan.mask_time.charge_masks(constrained, (mask_s + 0.2 * PART_S) * len(constrained))
        return rows

    def steps_of_rows(self, steps: int, mask_s: float) -> Counter[Sequence]:
        return Counter(row.sequence for _ in range(steps) for row in self.step(mask_s))


def test_a_row_repays_the_time_of_its_masks() -> None:
    steps = Steps()
    free, constrained = steps.rows(4, constrained=False), steps.rows(4, constrained=True)
    counts = steps.steps_of_rows(300, mask_s=PART_S / 2)
    assert {counts[row] for row in free} == {300}, "others are in every step"
    assert all(199 <= counts[row] <= 202 for row in constrained), "two steps with masks take the time of three without"


def test_a_row_repays_the_time_of_jump_forward_tokens() -> None:
    steps = Steps()
    _, (constrained,) = steps.rows(1, constrained=False), steps.rows(1, constrained=True)
    steps.step()
    steps.plan.mask_time.charge(constrained, 0.0, tokens=3)
    counts = steps.steps_of_rows(20, mask_s=0.0)
    assert counts[constrained] == 18, "with the unpaid token, both rows have the same number"


def test_a_row_with_a_slow_grammar_still_gets_steps() -> None:
    steps = Steps()
    (free,), (constrained,) = steps.rows(1, constrained=False), steps.rows(1, constrained=True)
    counts = steps.steps_of_rows(80, mask_s=100 * PART_S)
    assert (counts[free], counts[constrained]) == (80, 80 // (1 + MAX_SKIPPED_STEPS))
    assert steps.steps_of_rows(2 * MAX_DEBT_ROWS, mask_s=0.0)[constrained] < 2 * MAX_DEBT_ROWS
    assert steps.steps_of_rows(20, mask_s=0.0)[constrained] == 20, "the debt of one slow mask is limited"


def test_there_is_no_debt_if_all_rows_are_constrained() -> None:
    steps = Steps()
    constrained = steps.rows(4, constrained=True)
    assert {steps.steps_of_rows(20, mask_s=PART_S / 2)[row] for row in constrained} == {20}
    steps.rows(1, constrained=False)
    assert len(steps.step()) == 5, "nor to a later row"


@pytest.mark.parametrize(("held_is_batch", "free_is_batch", "gives"), [(False, True, False), (True, False, True)])
def test_interactive_rows_skip_no_step_for_batch_work(held_is_batch: bool, free_is_batch: bool, gives: bool) -> None:
    steps = Steps()
    steps.rows(2, constrained=False, is_batch=free_is_batch)
    (constrained,) = steps.rows(1, constrained=True, is_batch=held_is_batch)
    assert (steps.steps_of_rows(20, mask_s=PART_S)[constrained] < 20) == gives


def test_there_is_no_debt_if_masks_do_not_block_steps() -> None:
    steps = Steps(masks_block_step=False)
    steps.rows(2, constrained=False)
    (constrained,) = steps.rows(1, constrained=True)
    assert steps.steps_of_rows(20, mask_s=PART_S)[constrained] == 20


@pytest.mark.slow
def test_rows_that_skip_steps_give_the_same_text(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill, charge = Masks.fill, MaskTimeBalancer.charge_masks
    rows = [
        *mixed_rows(),
        make_request("Spell", constraint=regex("[a-z]{60}"), max_tokens=60),
        make_request("Go on", max_tokens=200),
    ]
    with started_engine(model, samplers=("cpu",)) as engine:
        mask_steps: list[int] = []
        """numbers of the steps that computed masks"""

        def noted(masks: Masks, matchers: list[Matcher]) -> tuple[torch.Tensor, list[GrammarError | None]]:
            mask_steps.append(engine.throughput.steps)
            return fill(masks, matchers)

        expected = by_row(run(engine, *rows))
        monkeypatch.setattr(Masks, "fill", noted)
        monkeypatch.setattr(
            MaskTimeBalancer, "charge_masks", lambda balancer, constrained, _: charge(balancer, constrained, 1e6)
        )
        assert by_row(run(engine, *rows)) == expected
        assert mask_steps[-1] - mask_steps[0] > 2 * len(mask_steps), "rows without a constraint have steps of their own"
