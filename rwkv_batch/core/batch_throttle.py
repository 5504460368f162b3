"""Limits the batch work in a step while interactive requests arrive.

A first token waits until the running step ends, so long steps delay it.

- While an interactive row reads its prompt, batch rows run in only one of a few steps.
- For a while after the last interactive row, few batch rows decode per step, in turn. Few of their prompt tokens are
  read.
- If steps are launched in pieces (`core/prefill_interleaver.py`), more prompt tokens of batch rows are read per step.
- Without interactive requests, all batch rows are in every step.
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
"""Batch work is limited until this long after the last interactive row."""
TOKENS_PER_ROW = 4
"""Prompt tokens that take about as long as one decoding row. That row also computes logits and samples."""

MAX_ROWS_IN_PIECES, MAX_TOKENS_IN_PIECES = 32, 480
"""Maximum batch prompts, and prompt tokens in total, that a step in pieces reads."""
MAX_PREFILL_DELAY_STEPS = 8
"""Steps for which batch prefill below MAX_TOKENS_IN_PIECES waits while rows decode.

A prefill loads all weights, so one token takes as long as a hundred.
"""


class BatchThrottle:
    """Decides which batch rows are in a step. Owned by the scheduler.

    Per step: call the methods in their order here.
    """

    def __init__(
        self, limits: Limits, interactive: FairQueue, reading: Collection[Sequence], has_pieces: bool = False
    ) -> None:
        """reading: running rows with more than one uncomputed token, a live view"""
        self._has_pieces = has_pieces
        self._max_rows = limits.max_batch_rows_with_interactive
        self._interactive = interactive
        self._reading = reading
        self._last_interactive_at = -math.inf
        self.has_recent_interactive = False
        """whether an interactive row existed within INTERACTIVE_WINDOW_S"""
        self._is_limited = False
        """whether this step limits batch work"""
        self._rows_left = 0
        """batch rows that this step may hold in addition to those that decode"""
        self._skipped_steps = 0
        """consecutive steps without batch rows"""
        self._steps_delayed = 0
        """steps for which batch prefill has waited"""

    def begin(self, now: float) -> None:
        """Start planning a step. `now` is time.monotonic()."""
        if self._interactive.num_rows:
            self._last_interactive_at = now
        self.has_recent_interactive = now - self._last_interactive_at < INTERACTIVE_WINDOW_S
        self._is_limited = self._max_rows > 0 and self.has_recent_interactive
        self._rows_left = self._max_rows
        if not self._reading:
            self._skipped_steps = 0

    def decode_rows(self, ready: list[Sequence]) -> list[Sequence]:
        """Return the rows that decode in this step.

        Of the batch rows, those that sampled longest ago go first.
        """
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
        """Return whether this step runs without batch rows because an interactive row awaits its first token."""
        is_first_token_awaited = self._interactive.num_running and any(map(awaits_first_token, self._reading))
        self._skipped_steps = (self._skipped_steps + 1) % BATCH_PART if is_first_token_awaited else 0
        return self._skipped_steps > 0

    def prefill_now(self, prompt_tokens: int) -> bool:
        """Return whether batch rows read their next `prompt_tokens` tokens in this step, where rows decode."""
        if not (self._is_in_pieces and prompt_tokens):
            return True
        self._steps_delayed += 1
        if prompt_tokens < MAX_TOKENS_IN_PIECES and self._steps_delayed < MAX_PREFILL_DELAY_STEPS:
            return False
        self._steps_delayed = 0
        return True

    def max_prefill_tokens(self, budget: int) -> int:
        """Return how many of `budget` prompt tokens batch rows may read in this step."""
        if self._is_limited:
            budget = min(budget, TOKENS_PER_ROW * max(1, self._rows_left))
        return min(budget, MAX_TOKENS_IN_PIECES) if self._is_in_pieces else budget

    def max_prefill_rows(self, rows: int) -> int:
        """Return how many of `rows` batch prompts this step may read."""
        return min(rows, MAX_ROWS_IN_PIECES) if self._is_in_pieces else rows

    @property
    def _is_in_pieces(self) -> bool:
        return self._has_pieces and self.has_recent_interactive


def awaits_first_token(sequence: Sequence) -> bool:
    """Return whether the row is interactive and reads its prompt."""
    may_sample = not (sequence.job.is_batch or sequence.has_answered or sequence.has_sampled)
    return may_sample and sequence.num_uncomputed_tokens > 0
