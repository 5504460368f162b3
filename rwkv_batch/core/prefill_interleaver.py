"""Lets new interactive prompts overtake a running step with batch rows.

A launched step cannot be interrupted, and a step with batch rows takes longer than a short prompt. So the engine
launches such a step in pieces of a few layers. It launches each piece when the one before it begins to run. Between
two pieces it checks for interactive requests and launches their prefill first. It also checks before it builds a
step's inputs or delivers a step's tokens. Both take about as long as a piece.

Each step has its own activation buffers, so nothing is computed twice.

Invariant: between two pieces, jobs are only added. Any operation that may end a row of the large step waits until all
its pieces are launched. Otherwise the step would write to a slot that belongs to another row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.sequence import RunningJob
from rwkv_batch.core.shares import BATCH_SHARE_DIVISOR

MAX_INTERLEAVED_STEPS = BATCH_SHARE_DIVISOR - 1
"""Maximum prefill steps that overtake one step.

`BatchThrottle` skips the same number of steps, so batch work gets at least one launch in seven.
"""
BetweenPieces = Callable[[], None]
"""Called between two pieces of a step, on the engine's thread."""
Step = TypeVar("Step")


class PrefillInterleaver(Generic[Step]):
    """Interleaves interactive prefill with the pieces of one step.

    Per step, call in this order:

    - `begin` and `interleave_now`
    - the callback that `begin` returned, between every two pieces
    - `finish`
    - `interleave_now` when the previous step's tokens are read, and `finish`

    Call `reset` when no step is in flight.
    """

    def __init__(
        self,
        admit_arrivals: Callable[[], bool],
        plan_prefill: Callable[[Collection[RunningJob]], list[ScheduledRow]],
        launch: Callable[[list[ScheduledRow]], Step],
        process_outputs: Callable[[Step], None],
    ) -> None:
        """
        admit_arrivals: admits new jobs; returns whether there were any
        plan_prefill: `Scheduler.schedule_interactive_prefill`
        launch, process_outputs: the engine's functions for a whole step
        """
        self._admit_arrivals = admit_arrivals
        self._plan_prefill = plan_prefill
        self._launch = launch
        self._process_outputs = process_outputs
        self._step_jobs: frozenset[RunningJob] = frozenset()
        self._steps_left = 0
        self._may_have_prefill = False
        """whether prompts may be waiting although no job arrived since the last check"""
        self._step: Step | None = None
        """the overtaking step whose outputs are not processed yet"""
        self.has_failed = False
        """Whether an overtaking step raised. The error then ends the engine, not only the large step's jobs."""

    def begin(self, rows: list[ScheduledRow]) -> BetweenPieces | None:
        """Prepare for a step over these rows. Returns the callback between pieces, or None without batch rows."""
        self.reset()
        if not any(row.sequence.job.is_batch for row in rows):
            return None
        self._step_jobs = frozenset(row.sequence.job for row in rows)
        self._steps_left = MAX_INTERLEAVED_STEPS
        return self._between_pieces

    def reset(self) -> None:
        """Allow no overtaking until the next `begin`, and drop references to jobs."""
        self._steps_left, self._may_have_prefill, self._step_jobs = 0, False, frozenset()

    def interleave_now(self) -> None:
        """Launch waiting prefill while no piece is being launched."""
        if self._step is None:
            self._launch_prefill()

    def finish(self) -> None:
        if self._step is not None:
            step, self._step = self._step, None
            self._process_outputs(step)

    def _between_pieces(self) -> None:
        self.has_failed = True  # stays set if one of these raises
        self.finish()  # the next piece is already launched, so the device does not wait for the host
        self._launch_prefill()
        self.has_failed = False

    def _launch_prefill(self) -> None:
        if not self._steps_left or not (self._admit_arrivals() or self._may_have_prefill):
            return
        rows = self._plan_prefill(self._step_jobs)
        self._may_have_prefill = bool(rows)
        if rows:
            self._steps_left -= 1
            self._step = self._launch(rows)
