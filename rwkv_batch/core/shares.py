"""Shares of a step: limits, batch work, constrained rows, prompt tokens. No torch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from heapq import nsmallest
from operator import attrgetter
from typing import NamedTuple

from rwkv_batch.core.fair_queue import FairQueue
from rwkv_batch.core.sequence import RunningJob, Sequence

BATCH_SHARE_DIVISOR = 4
"""Batch work gets at least 1 / BATCH_SHARE_DIVISOR of the running slots and of prefill."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one engine. All are counts."""

    max_running: int
    max_waiting_rows: int
    prefill_tokens_per_step: int
    prefill_chunk: int
    max_prefill_tokens_with_decode: int
    groups: int = 1
    """micro-batches that decoding rows are split into"""
    max_waiting_rows_per_client: int = 0
    """0: three quarters of `max_waiting_rows`"""
    mixed_rows: int = 0
    """up to this many decoding rows, prefill shares their graph and costs little"""
    min_gathered_prefill_tokens: int = 0
    """with this many queued prompt tokens, every round includes prefill, else every fifth. 0: always"""
    max_batch_rows_with_interactive: int = 0
    """batch rows that decode in a step while interactive requests arrive; 0: all"""

    jump_forward_max_rows: int = 32
    """up to this many running rows, rows jump forward"""
    masks_block_step: bool = False
    """whether all rows of a step wait while masks are computed"""

    @property
    def rows_in_step(self) -> int:
        """Maximum decoding rows of a step: a group's share and an eighth (`Scheduler._rebalance_groups`)."""
        share = -(-self.max_running // self.groups)
        return self.max_running if self.groups == 1 else min(self.max_running, share + max(1, share // 8))

    @property
    def rows_in_mixed_step(self) -> int:
        return min(self.rows_in_step, self.mixed_rows)

    @property
    def waiting_rows_per_client(self) -> int:
        return self.max_waiting_rows_per_client or max(1, self.max_waiting_rows * 3 // 4)

    @property
    def reserved_running_slots(self) -> int:
        """Running slots left free for interactive jobs without a running row."""
        return min(max(1, self.max_running // 16), self.max_running - 1)

    @property
    def batch_running_slots(self) -> int:
        """Running slots that interactive rows may not take from batch rows."""
        return min(max(1, self.max_running // BATCH_SHARE_DIVISOR), self.max_running - 1)

    @property
    def max_held_shared_prefixes(self) -> int:
        """Maximum shared prompts of one class whose continuations wait. Each holds a slot until all of them run.

        Both classes together, and half the slots for waiting turns, must leave a slot free.
        """
        return 2 * self.max_shared_prefills if self.max_running >= 8 else 1

    @property
    def max_shared_prefills(self) -> int:
        return max(1, self.max_running // 8)

    @property
    def max_paused(self) -> int:
        """Maximum paused rows. Each keeps its state slot and its request slot."""
        return max(1, self.max_running // 2)

    @property
    def num_req_slots(self) -> int:
        return self.max_running + self.max_paused


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
    """Limits the batch work in a step while interactive requests arrive. Owned by the scheduler.

    A first token waits until the running step ends, so long steps delay it.

    - While an interactive row reads its prompt, batch rows run in only one of a few steps.
    - After the last interactive row, few batch rows decode per step for a while, in turn. Few of their prompt tokens
      are read.
    - If steps are launched in pieces (`core/prefill_interleaver.py`), more prompt tokens of batch rows are read per
      step.
    - Without interactive requests, all batch rows are in every step.

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

    def choose_decode_rows(self, ready: list[Sequence]) -> list[Sequence]:
        """Return the rows that decode in this step. Of the batch rows, those that sampled longest ago go first."""
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
        """Return whether this step leaves out batch rows: an interactive row awaits its first token."""
        is_first_token_awaited = self._interactive.num_running and any(map(awaits_first_token, self._reading))
        self._skipped_steps = (self._skipped_steps + 1) % BATCH_SHARE_DIVISOR if is_first_token_awaited else 0
        return self._skipped_steps > 0

    def prefill_now(self, prompt_tokens: int) -> bool:
        """Return whether batch rows read their next `prompt_tokens` tokens in this step. The step has decoding rows."""
        if not (self._is_in_pieces and prompt_tokens):
            return True
        self._steps_delayed += 1
        if prompt_tokens < MAX_TOKENS_IN_PIECES and self._steps_delayed < MAX_PREFILL_DELAY_STEPS:
            return False
        self._steps_delayed = 0
        return True

    def max_prefill_tokens(self, budget: int) -> int:
        if self._is_limited:
            budget = min(budget, TOKENS_PER_ROW * max(1, self._rows_left))
        return min(budget, MAX_TOKENS_IN_PIECES) if self._is_in_pieces else budget

    def max_prefill_rows(self, rows: int) -> int:
        return min(rows, MAX_ROWS_IN_PIECES) if self._is_in_pieces else rows

    @property
    def _is_in_pieces(self) -> bool:
        return self._has_pieces and self.has_recent_interactive


def awaits_first_token(sequence: Sequence) -> bool:
    """Return whether the row is interactive and reads its prompt."""
    may_sample = not (sequence.job.is_batch or sequence.has_answered or sequence.has_sampled)
    return may_sample and sequence.num_uncomputed_tokens > 0


MAX_SKIPPED_STEPS = 3
"""A row is in at least one of four steps."""
MAX_DEBT_ROWS = 16
"""Maximum debt, in shares of a step. It limits the effect of one slow mask."""
SMOOTHING = 0.1


class StepCosts(NamedTuple):
    """Seconds that a step took until only constrained rows had not sampled."""

    tokens: int
    num_sampling: int
    unconstrained: int
    """rows among them without a constraint"""
    launch_s: float
    layers_s: float
    """part of launch_s: the layers, for all tokens"""
    sample_s: float
    """part of launch_s: sampling of the rows without a constraint"""


class MaskTimeBalancer:
    """Balances the time that constrained rows cost against rows without a constraint. Engine thread.

    On a CPU every row of a step waits while masks are computed. So the time is a debt of the constrained row. When the
    debt exceeds a row's share of a step, the row skips a step. Rows without a constraint thus decode at full speed.

    - A jump-forward token counts like a sampled one, so jumping ahead gives no advantage.
    - If all rows are constrained, there is no debt.
    - On a GPU there is no debt: the device computes meanwhile.
    - Batch rows that take turns next to interactive ones skip steps anyway, so skipping more gains nothing.
    """

    def __init__(self, limits: Limits) -> None:
        self._is_on = limits.masks_block_step
        self._token_s = 0.0
        """smoothed time of a token in the layers"""
        self._sample_s = 0.0
        """smoothed sampling time of a row without a constraint"""
        self._row_s = 0.0
        """smoothed share of such a row in a step"""

    def count(self, costs: StepCosts) -> None:
        if not costs.num_sampling:
            return
        self._token_s = _smooth(self._token_s, costs.layers_s / costs.tokens)
        if costs.unconstrained:
            self._sample_s = _smooth(self._sample_s, costs.sample_s / costs.unconstrained)
        rest_s = (costs.launch_s - costs.layers_s - costs.sample_s) / costs.num_sampling
        self._row_s = _smooth(self._row_s, rest_s + self._token_s + self._sample_s)

    def charge_masks(self, rows: Collection[Sequence], seconds: float) -> None:
        for sequence in rows if self._is_on else ():
            self.charge(sequence, max(0.0, seconds / len(rows) - self._sample_s))

    def charge(self, sequence: Sequence, seconds: float, tokens: int = 0) -> None:
        """Charge a row for grammar time and jump-forward tokens.

        tokens: those that it jumped forward
        """
        if self._is_on:
            debt_s = sequence.mask_time_debt_s + seconds + tokens * self._row_s
            sequence.mask_time_debt_s = min(debt_s, MAX_DEBT_ROWS * self._row_s)

    def active_rows(self, ready: list[Sequence]) -> list[Sequence]:
        """Return the rows that decode in this step.

        Constrained rows that skip it are left out. Interactive rows do not skip steps for batch rows.
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


def _smooth(before: float, now: float) -> float:
    return before + (now - before) * SMOOTHING if before else now


MIN_TOKENS_PER_JOB = 32


def split_budget(
    reading: list[Sequence], budget: int, chunk: Callable[[Sequence], int], rotation: int
) -> list[tuple[Sequence, int]]:
    """Return the rows that read in this step and their token counts.

    Clients share the budget evenly, and a client's jobs share its part. Unused tokens go to the next client.

    chunk: returns the most tokens that a row may read
    rotation: decides which client and which job come first
    """
    clients: dict[str, dict[RunningJob, deque[Sequence]]] = {}
    for sequence in reading:
        clients.setdefault(sequence.job.client, {}).setdefault(sequence.job, deque()).append(sequence)
    client_share = budget // max(1, len(clients))
    queues = deque(
        (_round_robin(jobs, rotation // len(clients)), max(MIN_TOKENS_PER_JOB, client_share // len(jobs)))
        for jobs in clients.values()
    )
    queues.rotate(-rotation)
    chunks: list[tuple[Sequence, int]] = []
    while queues and budget > 0:
        rows, job_share = queues.popleft()
        left = min(budget, max(client_share, job_share))
        while rows and left > 0:
            sequence = rows.popleft()
            count = min(chunk(sequence), job_share, left)
            left, budget = left - count, budget - count
            chunks.append((sequence, count))
        if rows:
            queues.append((rows, job_share))
    return chunks


def _round_robin(jobs: dict[RunningJob, deque[Sequence]], rotation: int) -> deque[Sequence]:
    queues = deque(jobs.values())
    queues.rotate(-rotation)
    rows: deque[Sequence] = deque()
    while queues:
        queue = queues.popleft()
        rows.append(queue.popleft())
        if queue:
            queues.append(queue)
    return rows
