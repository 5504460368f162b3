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

MOST_LET_IN = BATCH_PART - 1
"""Steps of prompts within one step. With as many in which batch rows stand aside before the next (`BatchShare`), batch
work has one launch in seven, however many requests come."""
Between = Callable[[], None]
"""Called between two pieces of a step, on the engine's thread."""
Step = TypeVar("Step")
"""What the engine knows a launched step by."""


class LetIn(Generic[Step]):
    """The engine's, for one step at a time: `begin`, `look`, a call between every two pieces, `end`; then `look` when
    the step before it was read, and `end`; `rest` when none is in flight."""

    def __init__(
        self,
        take_arrivals: Callable[[], bool],
        plan: Callable[[Collection[RunningJob]], list[ScheduledRow]],
        launch: Callable[[list[ScheduledRow]], Step],
        conclude: Callable[[Step], None],
    ) -> None:
        """`take_arrivals` admits jobs and says whether there were any; `plan`: `Scheduler.first_tokens`; `launch` and
        `conclude`: the engine's, of a whole step."""
        self._take_arrivals = take_arrivals
        self._plan = plan
        self._launch = launch
        self._conclude = conclude
        self._under_way: frozenset[RunningJob] = frozenset()
        self._left = 0
        """steps that may still be let in"""
        self._looks = False
        """whether there may be prompts to let in, though nobody has come since the last look"""
        self._step: Step | None = None
        """let in, and not concluded"""
        self.has_failed = False
        """What was raised came from here: it is no failure of the step under way, and ends the engine."""

    def begin(self, rows: list[ScheduledRow]) -> Between | None:
        """A step over these rows is launched next; what to call between its pieces. None: it need not be in pieces."""
        self.rest()
        if not any(row.sequence.job.is_batch for row in rows):
            return None
        self._under_way = frozenset(row.sequence.job for row in rows)
        self._left = MOST_LET_IN
        return self._between

    def rest(self) -> None:
        """No step with batch work is under way: its jobs are kept no longer, and nobody is let in before the next."""
        self._left, self._looks, self._under_way = 0, False, frozenset()

    def look(self) -> None:
        """No piece is being launched: prompts go before the next, and are concluded when it is on its way."""
        if self._step is None:
            self._let_in()

    def end(self) -> None:
        """All pieces were launched, or nothing more is for now."""
        if self._step is not None:
            step, self._step = self._step, None
            self._conclude(step)

    def _between(self) -> None:
        self.has_failed = True
        self.end()  # the piece behind it is on its way, so the device does not wait for the host
        self._let_in()
        self.has_failed = False

    def _let_in(self) -> None:
        if not self._left or not (self._take_arrivals() or self._looks):
            return
        rows = self._plan(self._under_way)
        self._looks = bool(rows)
        if rows:
            self._left -= 1
            self._step = self._launch(rows)
