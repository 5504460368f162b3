"""Rows under a grammar give back what they take beyond a row without one: masks, following it, text that is certain.

On a CPU that takes turns with the step, and every row waits for it. So a row owes the others the time that it took, and
once that is more than a row's part of a step it leaves a step to them: rows without a constraint decode as fast as if
no other had one. A token that is certain counts as one that is drawn, so by that no row comes ahead of others. Where
all rows are constrained nothing is owed. Nor is it on a GPU, which runs while masks are computed. Batch rows that take
turns beside interactive ones pay in steps that they would have missed, so there others gain nothing by it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from rwkv_batch.core.limits import Limits
from rwkv_batch.core.sequence import Sequence

MAX_SKIPPED_STEPS = 3
"""In a row: however slow its grammar is, a row is in one of four steps."""
MAX_DEBT_ROWS = 16
"""Parts of a step: a mask that something else held up is no reason to wait for long."""
SMOOTHING = 0.1


class StepCosts(NamedTuple):
    """What a step took until only rows under a grammar had not drawn, in seconds."""

    tokens: int
    """that it read"""
    num_sampling: int
    """rows that draw in it"""
    unconstrained: int
    """those of them that had drawn: the ones without a constraint"""
    launch_s: float
    layers_s: float
    """of that, for all tokens"""
    sample_s: float
    """of that, for the rows that had drawn"""


class MaskTimeBalancer:
    """Owned by the scheduler. Engine thread."""

    def __init__(self, limits: Limits) -> None:
        self._is_on = limits.masks_block_step
        self._token_s = 0.0
        """what a token takes in the layers, smoothed"""
        self._sample_s = 0.0
        """what the draw of a row without a constraint takes, smoothed"""
        self._row_s = 0.0
        """what such a row takes of a step, smoothed"""

    def count(self, costs: StepCosts) -> None:
        """A step was launched."""
        if not costs.num_sampling:
            return
        self._token_s = _smoothed(self._token_s, costs.layers_s / costs.tokens)
        if costs.unconstrained:
            self._sample_s = _smoothed(self._sample_s, costs.sample_s / costs.unconstrained)
        rest_s = (costs.launch_s - costs.layers_s - costs.sample_s) / costs.num_sampling
        self._row_s = _smoothed(self._row_s, rest_s + self._token_s + self._sample_s)

    def charge_masks(self, rows: Collection[Sequence], seconds: float) -> None:
        """The masks and draws of these rows took so long together."""
        for sequence in rows:
            self.charge(sequence, max(0.0, seconds / len(rows) - self._sample_s))

    def charge(self, sequence: Sequence, seconds: float, tokens: int = 0) -> None:
        """A row was followed for so long, and has so many tokens that it did not draw: each counts as a step's."""
        if self._is_on:
            debt_s = sequence.mask_time_debt_s + seconds + tokens * self._row_s
            sequence.mask_time_debt_s = min(debt_s, MAX_DEBT_ROWS * self._row_s)

    def active_rows(self, ready: list[Sequence]) -> list[Sequence]:
        """Those of the rows that could decode which do: some that are held leave the step to those that are not.

        Interactive rows leave none to batch work.
        """
        if not self._is_on or all(sequence.matcher is None for sequence in ready):
            return ready
        unconstrained = [sequence for sequence in ready if sequence.matcher is None]
        has_interactive = not all(sequence.job.is_batch for sequence in unconstrained)
        return [s for s in ready if s.matcher is None or not self._skip_step(s, bool(unconstrained), has_interactive)]

    def _skip_step(self, sequence: Sequence, has_unconstrained: bool, has_interactive: bool) -> bool:
        delays_others = has_interactive or (has_unconstrained and sequence.job.is_batch)
        if not delays_others:
            sequence.mask_time_debt_s = 0.0
        if sequence.mask_time_debt_s <= self._row_s or sequence.skipped_steps == MAX_SKIPPED_STEPS:
            sequence.skipped_steps = 0
            return False
        sequence.mask_time_debt_s -= self._row_s
        sequence.skipped_steps += 1
        return True


def _smoothed(before: float, now: float) -> float:
    return before + (now - before) * SMOOTHING if before else now
