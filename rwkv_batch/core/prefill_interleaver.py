"""A step that holds batch work is launched in pieces, and prompts whose first token is awaited go between two of them.

A step that runs cannot be left, and one with a batch's rows takes longer than a short prompt. So it is launched a few
layers at a time, each piece when the one before begins. When an interactive request comes meanwhile, a step of its own
reads its prompt before the next piece: what the rows of the step under way have so far stays in memory that no other
touches, so nothing is computed twice. What the host does for many rows takes as long as a piece: there is a look before
a step's inputs are made, too, and one before clients are told what a step has drawn.

Within a step jobs are only added: what may end one of its rows waits until all pieces are launched, since the rest of
the step would write to a slot that has been given to another row by then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from rwkv_batch.core.limits import BATCH_PART
from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.sequence import RunningJob

MAX_INTERLEAVED_STEPS = BATCH_PART - 1
"""Steps of prompts within one step. With as many in which batch rows stand aside before the next (`BatchThrottle`), batch
work has one launch in seven, however many requests come."""
BetweenPieces = Callable[[], None]
"""Called between two pieces of a step, on the engine's thread."""
Step = TypeVar("Step")
"""What the engine knows a launched step by."""


class PrefillInterleaver(Generic[Step]):
    """The engine's, for one step at a time: `begin`, `interleave_now`, a call between every two pieces, `finish`; then `interleave_now` when
    the step before it was read, and `finish`; `reset` when none is in flight."""

    def __init__(
        self,
        admit_arrivals: Callable[[], bool],
        plan_prefill: Callable[[Collection[RunningJob]], list[ScheduledRow]],
        launch: Callable[[list[ScheduledRow]], Step],
        process_outputs: Callable[[Step], None],
    ) -> None:
        """`admit_arrivals` admits jobs and says whether there were any; `plan_prefill`: `Scheduler.first_tokens`; `launch` and
        `process_outputs`: the engine's, of a whole step."""
        self._admit_arrivals = admit_arrivals
        self._plan_prefill = plan_prefill
        self._launch = launch
        self._process_outputs = process_outputs
        self._step_jobs: frozenset[RunningJob] = frozenset()
        self._steps_left = 0
        """steps that may still be let in"""
        self._may_have_prefill = False
        """whether there may be prompts to let in, though nobody has come since the last look"""
        self._step: Step | None = None
        """let in, and not concluded"""
        self.has_failed = False
        """What was raised came from here: it is no failure of the step under way, and ends the engine."""

    def begin(self, rows: list[ScheduledRow]) -> BetweenPieces | None:
        """A step over these rows is launched next; what to call between its pieces. None: it need not be in pieces."""
        self.reset()
        if not any(row.sequence.job.is_batch for row in rows):
            return None
        self._step_jobs = frozenset(row.sequence.job for row in rows)
        self._steps_left = MAX_INTERLEAVED_STEPS
        return self._between_pieces

    def reset(self) -> None:
        """No step with batch work is under way: its jobs are kept no longer, and nobody is let in before the next."""
        self._steps_left, self._may_have_prefill, self._step_jobs = 0, False, frozenset()

    def interleave_now(self) -> None:
        """No piece is being launched: prompts go before the next, and are concluded when it is on its way."""
        if self._step is None:
            self._launch_prefill()

    def finish(self) -> None:
        """All pieces were launched, or nothing more is for now."""
        if self._step is not None:
            step, self._step = self._step, None
            self._process_outputs(step)

    def _between_pieces(self) -> None:
        self.has_failed = True
        self.finish()  # the piece behind it is on its way, so the device does not wait for the host
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
