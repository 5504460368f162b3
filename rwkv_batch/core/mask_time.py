"""Balances the time that constrained rows cost against rows without a constraint.

On a CPU every row of a step waits while masks are computed. So the time is a debt of the constrained row. When the debt
exceeds a row's share of a step, the row skips a step. Rows without a constraint thus decode at full speed.

- A jump-forward token counts like a sampled one, so jumping ahead gives no advantage.
- If all rows are constrained, there is no debt.
- On a GPU there is no debt: the device computes meanwhile.
- Batch rows that take turns next to interactive ones skip steps anyway, so skipping more gains nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from rwkv_batch.core.limits import Limits
from rwkv_batch.core.sequence import Sequence

MAX_SKIPPED_STEPS = 3
"""Maximum consecutive skipped steps. A row is in at least one of four steps."""
MAX_DEBT_ROWS = 16
"""Maximum debt, in shares of a step. It limits the effect of one slow mask."""
SMOOTHING = 0.1


class StepCosts(NamedTuple):
    """Seconds that a step took until only constrained rows had not sampled."""

    tokens: int
    """tokens read"""
    num_sampling: int
    """rows that sample in it"""
    unconstrained: int
    """rows among them without a constraint"""
    launch_s: float
    layers_s: float
    """part of launch_s: the layers, for all tokens"""
    sample_s: float
    """part of launch_s: sampling of the rows without a constraint"""


class MaskTimeBalancer:
    """Owned by the scheduler. Engine thread."""

    def __init__(self, limits: Limits) -> None:
        self._is_on = limits.masks_block_step
        self._token_s = 0.0
        """smoothed time of a token in the layers"""
        self._sample_s = 0.0
        """smoothed sampling time of a row without a constraint"""
        self._row_s = 0.0
        """smoothed share of such a row in a step"""

    def count(self, costs: StepCosts) -> None:
        """Record the costs of a launched step."""
        if not costs.num_sampling:
            return
        self._token_s = _smoothed(self._token_s, costs.layers_s / costs.tokens)
        if costs.unconstrained:
            self._sample_s = _smoothed(self._sample_s, costs.sample_s / costs.unconstrained)
        rest_s = (costs.launch_s - costs.layers_s - costs.sample_s) / costs.num_sampling
        self._row_s = _smoothed(self._row_s, rest_s + self._token_s + self._sample_s)

    def charge_masks(self, rows: Collection[Sequence], seconds: float) -> None:
        """Charge these rows for the time of their masks and sampling."""
        for sequence in rows:
            self.charge(sequence, max(0.0, seconds / len(rows) - self._sample_s))

    def charge(self, sequence: Sequence, seconds: float, tokens: int = 0) -> None:
        """Charge a row for grammar time and for `tokens` that it jumped forward."""
        if self._is_on:
            debt_s = sequence.mask_time_debt_s + seconds + tokens * self._row_s
            sequence.mask_time_debt_s = min(debt_s, MAX_DEBT_ROWS * self._row_s)

    def active_rows(self, ready: list[Sequence]) -> list[Sequence]:
        """Return the rows that decode in this step, without constrained rows that skip it.

        Interactive rows do not skip steps for batch rows.
        """
        if not self._is_on or all(sequence.matcher is None for sequence in ready):
            return ready
        unconstrained = [sequence for sequence in ready if sequence.matcher is None]
        has_interactive = not all(sequence.job.is_batch for sequence in unconstrained)
        return [s for s in ready if s.matcher is None or not self._skips_step(s, bool(unconstrained), has_interactive)]

    def _skips_step(self, sequence: Sequence, has_unconstrained: bool, has_interactive: bool) -> bool:
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
