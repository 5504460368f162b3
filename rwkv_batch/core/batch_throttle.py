"""How much batch work a step holds beside interactive work: a first token waits for the step that runs.

While an interactive row reads its prompt, batch rows stand aside in all but one of a few steps, since a step that also
has theirs takes much longer. While interactive requests come, and for a while after the last one, steps are short: so
many batch rows decode in each and take turns, and few tokens of their prompts are read. Or steps are launched in
pieces (`core/let_in.py`): then as many tokens of their prompts are read as such a step holds, when there are so many.
Without interactive requests all batch rows are in every step.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from heapq import nsmallest
from operator import attrgetter

from rwkv_batch.core.fair_queue import FairQueue
from rwkv_batch.core.limits import BATCH_PART, Limits
from rwkv_batch.core.sequence import Sequence

INTERACTIVE_WINDOW_S = 10.0
"""Steps are as long as batch work makes them again when no interactive row was there for so long."""
TOKENS_PER_ROW = 4
"""Prompt tokens that take about as long as a row that decodes, for which logits are made and a token is drawn."""

MAX_ROWS_IN_PIECES, MAX_TOKENS_IN_PIECES = 32, 480
"""Most rows, and tokens in all, of the batch's prompts that are read in one step in pieces."""
MAX_PREFILL_DELAY_STEPS = 8
"""Fewer tokens than PIECES_TOKENS are read every so many steps in which rows decode: the weights are read for them
alone, which takes as long for one token as for a hundred."""


class BatchThrottle:
    """Owned by the scheduler, asked once for each step, in the order of its methods."""

    def __init__(
        self, limits: Limits, interactive: FairQueue, reading: Collection[Sequence], has_pieces: bool = False
    ) -> None:
        """`reading`: rows in the steps that have more than one token to read, as they are at each moment."""
        self._has_pieces = has_pieces
        self._max_rows = limits.max_batch_rows_with_interactive
        self._interactive = interactive
        self._reading = reading
        self._last_interactive_at = -math.inf
        """when an interactive row was there last"""
        self.has_recent_interactive = False
        """whether interactive requests come"""
        self._is_limited = False
        """whether the step holds little batch work"""
        self._rows_left = 0
        """rows that a short step may hold beside the batch rows that decode in it"""
        self._skipped_steps = 0
        """in a row that batch rows have left to interactive ones"""
        self._steps_delayed = 0
        """in which prompts of batch rows have waited for others"""

    def begin(self, now: float) -> None:
        """A step is planned. `now`: of time.monotonic."""
        if self._interactive.num_rows:
            self._last_interactive_at = now
        self.has_recent_interactive = now - self._last_interactive_at < INTERACTIVE_WINDOW_S
        self._is_limited = self._max_rows > 0 and self.has_recent_interactive
        self._rows_left = self._max_rows
        if not self._reading:
            self._skipped_steps = 0

    def decode_rows(self, ready: list[Sequence]) -> list[Sequence]:
        """Those of the rows that could decode which do: of batch rows, those whose last draw is longest ago."""
        if not self._is_limited:
            return ready
        reads = any(sequence.job.is_batch for sequence in self._reading)
        max_rows = max(1, self._max_rows // 2) if reads else self._max_rows
        batch = [sequence for sequence in ready if sequence.job.is_batch]
        self._rows_left -= min(max_rows, len(batch))
        if len(batch) <= max_rows:
            return ready
        chosen = set(nsmallest(max_rows, batch, key=attrgetter("last_sample_step")))
        return [sequence for sequence in ready if not sequence.job.is_batch or sequence in chosen]

    def skip_step(self) -> bool:
        """Whether batch rows leave this step to others: a first token is waited for, and it is not their turn."""
        is_first_token_awaited = self._interactive.num_running and any(map(awaits_first_token, self._reading))
        self._skipped_steps = (self._skipped_steps + 1) % BATCH_PART if is_first_token_awaited else 0
        return self._skipped_steps > 0

    def prefill_now(self, prompt_tokens: int) -> bool:
        """Whether batch rows that have so many tokens to read next do that in this step, in which rows decode."""
        if not (self._is_in_pieces and prompt_tokens):
            return True
        self._steps_delayed += 1
        if prompt_tokens < MAX_TOKENS_IN_PIECES and self._steps_delayed < MAX_PREFILL_DELAY_STEPS:
            return False
        self._steps_delayed = 0
        return True

    def prompt_tokens(self, budget: int) -> int:
        """Most prompt tokens of batch rows in this step, of a budget of so many."""
        if self._is_limited:
            budget = min(budget, TOKENS_PER_ROW * max(1, self._rows_left))
        return min(budget, MAX_TOKENS_IN_PIECES) if self._is_in_pieces else budget

    def max_prefill_rows(self, rows: int) -> int:
        """Most batch rows whose prompts are read in this step, of so many."""
        return min(rows, MAX_ROWS_IN_PIECES) if self._is_in_pieces else rows

    @property
    def _is_in_pieces(self) -> bool:
        """Whether prompts of batch rows are read in pieces."""
        return self._has_pieces and self.has_recent_interactive


def awaits_first_token(sequence: Sequence) -> bool:
    """Whether it is an interactive row in the steps that has something to read before its first token."""
    may_sample = not (sequence.job.is_batch or sequence.has_answered or sequence.has_sampled)
    return may_sample and sequence.num_uncomputed_tokens > 0
