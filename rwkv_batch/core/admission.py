"""Who gets a place in the steps, and who gives one up. No torch, no clock.

At most `max_running` rows have a place. A free one goes to an interactive row before a batch row, and within a class
to the client with the fewest (`FairQueue`). Batch rows leave the last few places free, so that an interactive row finds
one at once; when those are taken, it displaces a batch row, down to a quarter of the places, which batch rows keep. A
client displaces rows of its class of another that has at least two more. A displaced row is *paused*: it leaves the
steps and keeps its slot and its seat, so that it goes on later as if nothing had happened.

Where there is one place only, batch rows have it for some steps after every few interactive rows.
"""

from __future__ import annotations

from itertools import islice
from typing import Protocol

from rwkv_batch.core.fair_queue import ClientRows, FairQueue
from rwkv_batch.core.limits import BATCH_PART, Limits
from rwkv_batch.core.sequence import NO_SEAT, RunningJob, Sequence
from rwkv_batch.core.slot_source import SlotSource

LENT_STEPS = 64
"""For so many steps a batch row has the only place there is, before it gives way again."""


class Steps(Protocol):
    """Whoever runs the rows that have a place."""

    def enter(self, sequence: Sequence) -> None:
        """The row belongs into the steps from now on."""

    def leave(self, sequence: Sequence) -> None:
        """It does not any more, at least for a while."""


class Admission:
    """Waiting rows, places and seats. Owned by the scheduler."""

    def __init__(self, limits: Limits, slots: SlotSource, steps: Steps) -> None:
        self._limits = limits
        self._slots = slots
        self._steps = steps
        self.interactive = FairQueue()
        self.batch = FairQueue()
        self._slots_are_out = False
        """asked for once a step: the pool makes room each time it has none"""
        self.free_seats = list(range(limits.num_seats - 1, -1, -1))
        self._batch_places = limits.batch_places
        """places that batch rows need not leave to interactive ones in this step"""
        self._lent_steps = 0
        """of the only place, to a batch row"""
        self._served_before_batch = 0
        """interactive rows that have begun since a batch row last had a place"""

    @property
    def paused_rows(self) -> int:
        """Rows that gave way and keep their slots."""
        return self.interactive.num_paused + self.batch.num_paused

    @property
    def waiting_rows(self) -> int:
        """Rows that have not begun."""
        return self.interactive.num_waiting + self.batch.num_waiting

    @property
    def _free_places(self) -> int:
        return self._limits.max_running - self.interactive.num_running - self.batch.num_running

    def waiting_rows_of(self, client: str) -> int:
        """A client's rows that have not begun."""
        return self.interactive.waiting_of(client) + self.batch.waiting_of(client)

    def queue_of(self, job: RunningJob) -> FairQueue:
        """The queue of the job's class."""
        return self.batch if job.is_batch else self.interactive

    def admit(self) -> None:
        """Give out the free places, then let rows give way. Once before each step."""
        limits = self._limits
        self._slots_are_out = False
        if not limits.batch_places:
            self._lend()
        self._fill(self.batch, self._batch_places, 0)
        self._fill(self.interactive, limits.max_running, 0)
        self._fill(self.batch, limits.max_running, limits.reserved_places)
        self._displace()

    def _lend(self) -> None:
        """Say whose the only place is in this step: batch work would else wait for as long as others come."""
        if self.batch.num_running:
            self._served_before_batch = 0
            self._lent_steps = max(0, self._lent_steps - 1)
        elif self._served_before_batch >= BATCH_PART - 1:
            self._lent_steps = LENT_STEPS
        self._batch_places = 1 if self._lent_steps else 0

    def _fill(self, queue: FairQueue, most: int, reserve: int) -> None:
        """Start rows of one class until `most` run or only `reserve` places are left."""
        if self._free_places <= reserve or queue.num_running >= most:
            return
        turns, limits = queue.turns(), self._limits
        while turns and self._free_places > reserve and queue.num_running < most:
            client = turns.take()
            if self._start_one(queue, client, self._free_places > limits.reserved_places):
                turns.put(client)

    def _displace(self) -> None:
        """Rows that wait take the places of rows that have more than their share; the reserve stays as it is."""
        for queue in (self.interactive, self.batch):
            turns = queue.turns()
            while turns and self.paused_rows < self._limits.max_paused:
                client = turns.take()
                victim = self._victim(queue, client)
                if victim is None:
                    break  # all others of the line have as many rows, or more
                if self._start_one(queue, client, beside_others=True):
                    self.queue_of(victim.job).pause(victim)
                    self._steps.leave(victim)
                    self._slots.give_way(victim)
                    turns.put(client)

    def _victim(self, queue: FairQueue, newcomer: ClientRows) -> Sequence | None:
        """The row that gives way to one of `newcomer`: the youngest of the client that has the most."""
        if queue is self.interactive and self.batch.num_running > self._batch_places:
            return _youngest(self.batch.largest())
        largest = queue.largest()
        if largest is None or len(largest.running) < len(newcomer.running) + 2:
            return None
        if queue is self.batch and self.batch.num_paused >= self._limits.max_paused // 2:
            return None  # the rest is for interactive rows
        return _youngest(largest)

    def _start_one(self, queue: FairQueue, client: ClientRows, beside_others: bool) -> bool:
        """Start or resume a row of the client; without `beside_others`, of a job that has none. False: none can."""
        for sequence in client.paused:
            queue.resume(sequence)
            self._steps.enter(sequence)
            return True
        if self._slots_are_out:
            return False
        for job in client.jobs:
            if job.seated and not beside_others and not job.is_batch:
                continue
            index = self._first_ready(queue, job)
            if index is None:
                continue
            slot = self._slots.allocate()
            if slot is None:
                self._slots_are_out = True
                return False
            self._seat(queue.start(job, index), slot)
            self._served_before_batch += queue is self.interactive
            return True
        return False

    def _first_ready(self, queue: FairQueue, job: RunningJob) -> int | None:
        """The first of the job's waiting rows that can start; rows behind a busy session step aside."""
        for index, sequence in enumerate(islice(job.waiting, self._limits.max_running)):
            if self._slots.is_ready(sequence) and (sequence.draws or self._may_read_for_several(queue, job.client)):
                return index
        return None

    def _may_read_for_several(self, queue: FairQueue, client: str) -> bool:
        """Whether one more prompt may be read for several rows: such prompts must never hold all slots.

        A client's earlier continuations go first; other clients' may wait long, and are not waited for.
        """
        if queue.of(client).num_forked:
            return False
        limits, reading = self._limits, queue.num_reading_for_several
        held = reading + queue.num_held_for_several
        return reading < limits.reading_for_several and held < limits.prompts_for_several

    def _seat(self, sequence: Sequence, slot: int) -> None:
        sequence.take_seat(slot, self.free_seats.pop())
        self._steps.enter(sequence)
        self._slots.prepare(sequence)

    def give_up_seat(self, sequence: Sequence) -> None:
        """The row draws no more: its place and its seat are free."""
        if sequence.seat != NO_SEAT:
            self.free_seats.append(sequence.seat)
            sequence.seat = NO_SEAT
            if self.queue_of(sequence.job).end(sequence):
                self._steps.enter(sequence)  # it was paused


def _youngest(client: ClientRows | None) -> Sequence | None:
    """The client's row that started last and may be paused: one that reads for several rows soon ends by itself."""
    return None if client is None else next((s for s in reversed(client.running) if s.draws), None)
