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

MOST_STEPS_ASIDE = 3
"""In a row: however slow its grammar is, a row is in one of four steps."""
MOST_OWED = 16
"""Parts of a step: a mask that something else held up is no reason to wait for long."""
SMOOTHING = 0.1


class StepCosts(NamedTuple):
    """What a step took until only rows under a grammar had not drawn, in seconds."""

    tokens: int
    """that it read"""
    drawing: int
    """rows that draw in it"""
    free: int
    """those of them that had drawn: the ones without a constraint"""
    launch_s: float
    layers_s: float
    """of that, for all tokens"""
    draw_s: float
    """of that, for the rows that had drawn"""


class ConstrainedTurns:
    """Owned by the scheduler. Engine thread."""

    def __init__(self, limits: Limits) -> None:
        self._is_on = limits.masks_take_turns
        self._token_s = 0.0
        """what a token takes in the layers, smoothed"""
        self._draw_s = 0.0
        """what the draw of a row without a constraint takes, smoothed"""
        self._row_s = 0.0
        """what such a row takes of a step, smoothed"""

    def count(self, costs: StepCosts) -> None:
        """A step was launched."""
        if not costs.drawing:
            return
        self._token_s = _smoothed(self._token_s, costs.layers_s / costs.tokens)
        if costs.free:
            self._draw_s = _smoothed(self._draw_s, costs.draw_s / costs.free)
        rest_s = (costs.launch_s - costs.layers_s - costs.draw_s) / costs.drawing
        self._row_s = _smoothed(self._row_s, rest_s + self._token_s + self._draw_s)

    def charge_draws(self, rows: Collection[Sequence], seconds: float) -> None:
        """The masks and draws of these rows took so long together."""
        for sequence in rows:
            self.charge(sequence, max(0.0, seconds / len(rows) - self._draw_s))

    def charge(self, sequence: Sequence, seconds: float, tokens: int = 0) -> None:
        """A row was followed for so long, and has so many tokens that it did not draw: each counts as a step's."""
        if self._is_on:
            owed = sequence.owed_s + seconds + tokens * self._row_s
            sequence.owed_s = min(owed, MOST_OWED * self._row_s)

    def present(self, ready: list[Sequence]) -> list[Sequence]:
        """Those of the rows that could decode which do: some that are held leave the step to those that are not.

        Interactive rows leave none to batch work.
        """
        if not self._is_on or all(sequence.matcher is None for sequence in ready):
            return ready
        free = [sequence for sequence in ready if sequence.matcher is None]
        has_interactive = not all(sequence.job.is_batch for sequence in free)
        return [s for s in ready if s.matcher is None or not self._stands_aside(s, bool(free), has_interactive)]

    def _stands_aside(self, sequence: Sequence, has_free: bool, has_interactive: bool) -> bool:
        owes_anybody = has_interactive or (has_free and sequence.job.is_batch)
        if not owes_anybody:
            sequence.owed_s = 0.0
        if sequence.owed_s <= self._row_s or sequence.steps_aside == MOST_STEPS_ASIDE:
            sequence.steps_aside = 0
            return False
        sequence.owed_s -= self._row_s
        sequence.steps_aside += 1
        return True


def _smoothed(before: float, now: float) -> float:
    return before + (now - before) * SMOOTHING if before else now
