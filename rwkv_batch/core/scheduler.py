"""Decides who runs: admits waiting rows fairly between jobs, and fills each step. No torch, no clock.

Fairness. Jobs take turns: a free seat goes to the job whose turn it is, and a job that already holds
seats leaves the last few free for jobs that hold none, so that a bulk job of a thousand rows never
keeps an interactive one waiting for a seat. Prompt tokens are shared out the same way: one chunk per
job and round, until the step's budget is spent. Decoding rows are in every step, and while there are some the
budget is smaller, because the next token of each waits until the step ends.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from rwkv_batch.core.sequence import NO_SEAT, Phase, RunningJob, Sequence
from rwkv_batch.core.slot_source import SlotSource

LEAST_SHARE = 32
"""Prompt tokens that a job gets at its turn, however many jobs have prompts to read."""


@dataclass(slots=True)
class ScheduledRow:
    """A sequence's part in one step."""

    sequence: Sequence
    num_tokens: int
    draws: bool
    """whether a token is drawn after it"""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step and the running set may hold."""

    max_running: int
    max_waiting_rows: int
    prefill_tokens_per_step: int
    prefill_chunk: int
    prefill_tokens_beside: int
    """prompt tokens of a step in which rows decode"""

    @property
    def reserved_seats(self) -> int:
        """Seats kept for jobs that hold none."""
        return min(max(1, self.max_running // 16), self.max_running - 1)


class Scheduler:
    """Rows waiting, rows running. Owned by the engine thread."""

    def __init__(self, limits: Limits, slots: SlotSource) -> None:
        self.limits = limits
        self._slots = slots
        self._jobs: deque[RunningJob] = deque()
        """jobs with waiting rows, whose turn it is first"""
        self._forked: deque[Sequence] = deque()
        """continuations of prompts that were read for several rows: each prompt's slot is held until all of them run"""
        self._running: dict[Sequence, None] = {}
        """insertion-ordered set"""
        self._steps = 0
        self._free_seats = list(range(limits.max_running - 1, -1, -1))
        self.waiting_rows = 0

    @property
    def running_rows(self) -> int:
        """Rows that hold a slot."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._running or self._jobs or self._forked)

    def has_room_for(self, rows: int) -> bool:
        """Whether so many rows may wait; an idle engine takes a job of any size up to the limit."""
        return self.waiting_rows + rows <= self.limits.max_waiting_rows

    def add(self, job: RunningJob, rows: list[Sequence]) -> None:
        """Rows that want to run."""
        if not job.waiting:
            self._jobs.append(job)
        job.waiting.extend(rows)
        self.waiting_rows += len(rows)

    def add_forked(self, rows: list[Sequence]) -> None:
        """Continuations of a prompt that was read for them; they go before everyone else's."""
        self._forked.extend(rows)
        self.waiting_rows += len(rows)

    def forget_waiting(self, job: RunningJob) -> list[Sequence]:
        """Take back a job's waiting rows (it was cancelled)."""
        rows = [sequence for sequence in self._forked if sequence.job is job]
        for sequence in rows:
            self._forked.remove(sequence)
        if job.waiting:
            self._jobs.remove(job)
            rows.extend(job.waiting)
            job.waiting.clear()
        self.waiting_rows -= len(rows)
        return rows

    def running_of(self, job: RunningJob) -> list[Sequence]:
        """A job's running rows."""
        return [sequence for sequence in self._running if sequence.job is job]

    def schedule(self) -> list[ScheduledRow]:
        """The rows of the next step: all that decode, and prompt chunks up to the budget."""
        self._steps += 1
        self._admit_forked()
        self._admit()
        decoding = [s for s in self._running if s.num_uncomputed_tokens == 1 and s.may_run]
        decoding.sort(key=attrgetter("first_slot"))  # neighbours in a step lie together in memory: faster to read
        rows = [ScheduledRow(s, 1, s.draws) for s in decoding]
        limits = self.limits
        return rows + self._prefill_rows(limits.prefill_tokens_beside if rows else limits.prefill_tokens_per_step)

    def _admit_forked(self) -> None:
        """Continuations first: they free the slots of the prompts they share."""
        while self._forked and len(self._free_seats) > self.limits.reserved_seats:
            slot = self._slots.allocate()
            if slot is None:
                return
            self._seat(self._forked.popleft(), slot)

    def _may_read_for_several(self) -> bool:
        """Whether one more prompt may be read for several rows: such prompts must never hold all slots."""
        reading = sum(not sequence.draws and sequence.phase is Phase.RUNNING for sequence in self._running)
        return not self._forked and reading < max(1, self.limits.max_running // 8)

    def _admit(self) -> None:
        """Give free seats and slots to waiting rows, a row per job and round."""
        blocked = 0
        while self._jobs and self._free_seats and blocked < len(self._jobs):
            job = self._jobs[0]
            self._jobs.rotate(-1)
            if (job.seated and len(self._free_seats) <= self.limits.reserved_seats) or not self._seat_first(job):
                blocked += 1
                continue
            blocked = 0
            if not job.waiting:
                self._jobs.remove(job)

    def _seat_first(self, job: RunningJob) -> bool:
        """Seat the first of the job's waiting rows that can start; rows behind a busy session step aside."""
        for index, sequence in enumerate(islice(job.waiting, self.limits.max_running)):
            if not self._slots.is_ready(sequence) or not (sequence.draws or self._may_read_for_several()):
                continue
            slot = self._slots.allocate()
            if slot is None:
                return False
            del job.waiting[index]
            self._seat(sequence, slot)
            return True
        return False

    def _seat(self, sequence: Sequence, slot: int) -> None:
        self.waiting_rows -= 1
        sequence.slot, sequence.seat = slot, self._free_seats.pop()
        sequence.phase = Phase.RUNNING
        sequence.job.seated += 1
        self._running[sequence] = None
        self._slots.prepare(sequence)

    def _prefill_rows(self, budget: int) -> list[ScheduledRow]:
        """Prompt chunks within the budget: a chunk per job and round, none above its job's share, turns taken."""
        by_job: dict[RunningJob, deque[Sequence]] = {}
        for sequence in self._running:
            if sequence.num_uncomputed_tokens > 1:
                by_job.setdefault(sequence.job, deque()).append(sequence)
        rows: list[ScheduledRow] = []
        queues = deque(by_job.values())
        queues.rotate(-self._steps)
        share = max(LEAST_SHARE, budget // max(1, len(queues)))
        while queues and budget > 0:
            queue = queues.popleft()
            sequence = queue.popleft()
            num_tokens = min(self._chunk(sequence), share, budget)
            budget -= num_tokens
            rows.append(
                ScheduledRow(sequence, num_tokens, sequence.draws and num_tokens == sequence.num_uncomputed_tokens)
            )
            if queue:
                queues.append(queue)
        return rows

    def _chunk(self, sequence: Sequence) -> int:
        """Tokens to read next: up to the chunk size, stopping at a border worth caching."""
        limit = min(sequence.num_uncomputed_tokens, self.limits.prefill_chunk)
        if sequence.cache_points:
            limit = min(limit, sequence.cache_points[0] - sequence.num_computed_tokens)
        return limit

    def give_up_seat(self, sequence: Sequence) -> None:
        """The row draws no more; it may stay in the steps to read what its session must contain."""
        if sequence.seat != NO_SEAT:
            self._free_seats.append(sequence.seat)
            sequence.seat = NO_SEAT
            sequence.job.seated -= 1

    def remove(self, sequence: Sequence) -> None:
        """The row leaves the steps. Its slot is the caller's to give back."""
        self.give_up_seat(sequence)
        self._running.pop(sequence, None)
        sequence.phase = Phase.DONE
