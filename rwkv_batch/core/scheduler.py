"""Decides who runs: admits waiting rows fairly between jobs, and fills each step. No torch, no clock.

Fairness. Jobs take turns: a free seat goes to the job whose turn it is, and a job that already holds
seats leaves the last few free for jobs that hold none, so that a bulk job of a thousand rows never
keeps an interactive one waiting for a seat. Prompt tokens are shared out the same way: one chunk per
job and round, until the step's budget is spent. Decoding rows are in every step, and while there are some the
budget is smaller, because the next token of each waits until the step ends.

Micro-batches. Over several devices the rows that decode are dealt into groups, each with steps of its own, so that one
group is on the second device while the next is on the first. A row keeps its group while it decodes, new rows go to
the smallest, and a group that has become much larger than the others gives rows away. Prompts ride with the first
group's steps, and with every step while there are more of them than a step takes.
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
    groups: int = 1
    """micro-batches that rows which decode are dealt into"""

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
        self._reading: dict[Sequence, None] = {}
        """running rows that have more than one token to read"""
        self._groups: list[dict[Sequence, None]] = [{} for _ in range(limits.groups)]
        """running rows that decode"""
        self._turn = 0
        """the group whose step is next"""
        self._reads_on = False
        """whether prompts were left over by the last step that read some"""
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

    def schedule(self, oldest: int = 0) -> list[ScheduledRow]:
        """The rows of the next step: those of a group that decode, and prompt chunks up to the budget.

        `oldest`: number of the oldest step whose tokens the host has not read; a row whose token is drawn in a later
        one waits, since the first device would wait for it.
        """
        self._steps += 1
        self._admit_forked()
        self._admit()
        self._sort_in()
        rows, turn = self._decoding_rows(oldest)
        if self._reading and (turn == 0 or self._reads_on or not rows):
            limits = self.limits
            rows += self._prefill_rows(limits.prefill_tokens_beside if rows else limits.prefill_tokens_per_step)
        return rows

    def _sort_in(self) -> None:
        """Rows that have one token left to read decode from now on, in the smallest group."""
        for sequence in [s for s in self._reading if s.num_uncomputed_tokens == 1]:
            del self._reading[sequence]
            min(self._groups, key=len)[sequence] = None

    def _decoding_rows(self, oldest: int) -> tuple[list[ScheduledRow], int]:
        """The rows of the next group that has any to run, and which group that is."""
        for turn in range(self._turn, self._turn + len(self._groups)):
            group = self._groups[turn % len(self._groups)]
            for sequence in [s for s in group if s.num_uncomputed_tokens > 1]:  # closing turns
                del group[sequence]
                self._reading[sequence] = None
            self._even_out(group)
            decoding = [s for s in group if s.may_run(oldest)]
            if decoding:
                self._turn = (turn + 1) % len(self._groups)
                decoding.sort(
                    key=attrgetter("first_slot")
                )  # neighbours in a step lie together in memory: faster to read
                return [ScheduledRow(s, 1, s.draws) for s in decoding], turn % len(self._groups)
        return [], 0

    def _even_out(self, group: dict[Sequence, None]) -> None:
        """Give rows to the smallest groups once this one is larger than its share by an eighth, and by two rows."""
        share = -(-sum(map(len, self._groups)) // len(self._groups))
        if len(group) - share <= max(1, share // 8):
            return
        for sequence in list(islice(reversed(group), len(group) - share)):
            del group[sequence]
            min(self._groups, key=len)[sequence] = None

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
        self._running[sequence] = self._reading[sequence] = None
        self._slots.prepare(sequence)

    def _prefill_rows(self, budget: int) -> list[ScheduledRow]:
        """Prompt chunks within the budget: a chunk per job and round, none above its job's share, turns taken."""
        by_job: dict[RunningJob, deque[Sequence]] = {}
        for sequence in self._reading:
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
        self._reads_on = bool(queues)
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
        self._reading.pop(sequence, None)
        for group in self._groups:
            group.pop(sequence, None)
        sequence.phase = Phase.DONE
