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
from rwkv_batch.core.sequence import NO_REQ_SLOT, RunningJob, Sequence
from rwkv_batch.core.slot_source import SlotSource

BATCH_TURN_STEPS = 64
"""For so many steps a batch row has the only place there is, before it gives way again."""


class RunningSet(Protocol):
    """Whoever runs the rows that have a place."""

    def add_running(self, sequence: Sequence) -> None:
        """The row belongs into the steps from now on."""

    def remove_running(self, sequence: Sequence) -> None:
        """It does not any more, at least for a while."""


class Admission:
    """Waiting rows, places and seats. Owned by the scheduler."""

    def __init__(self, limits: Limits, slots: SlotSource, steps: RunningSet) -> None:
        self._limits = limits
        self._slots = slots
        self._steps = steps
        self.interactive = FairQueue()
        self.batch = FairQueue()
        self._out_of_slots = False
        """asked for once a step: the pool makes room each time it has none"""
        self.free_req_slots = list(range(limits.num_req_slots - 1, -1, -1))
        self._batch_running_slots = limits.batch_running_slots
        """places that batch rows need not leave to interactive ones in this step"""
        self._batch_turn_steps = 0
        """of the only place, to a batch row"""
        self._interactive_since_batch = 0
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
    def _free_running_slots(self) -> int:
        return self._limits.max_running - self.interactive.num_running - self.batch.num_running

    def waiting_rows_of(self, client: str) -> int:
        """A client's rows that have not begun."""
        return self.interactive.num_waiting_of(client) + self.batch.num_waiting_of(client)

    def queue_of(self, job: RunningJob) -> FairQueue:
        """The queue of the job's class."""
        return self.batch if job.is_batch else self.interactive

    def admit(self) -> None:
        """Give out the free places, then let rows give way. Once before each step."""
        limits = self._limits
        self._out_of_slots = False
        if not limits.batch_running_slots:
            self._update_batch_turn()
        self._fill(self.batch, self._batch_running_slots, 0)
        self._fill(self.interactive, limits.max_running, 0)
        self._fill(self.batch, limits.max_running, limits.reserved_running_slots)
        self._preempt()

    def _update_batch_turn(self) -> None:
        """Say whose the only place is in this step: batch work would else wait for as long as others come."""
        if self.batch.num_running:
            self._interactive_since_batch = 0
            self._batch_turn_steps = max(0, self._batch_turn_steps - 1)
        elif self._interactive_since_batch >= BATCH_PART - 1:
            self._batch_turn_steps = BATCH_TURN_STEPS
        self._batch_running_slots = 1 if self._batch_turn_steps else 0

    def _fill(self, queue: FairQueue, max_running: int, reserve: int) -> None:
        """Start rows of one class until `max_running` run or only `reserve` places are left."""
        if self._free_running_slots <= reserve or queue.num_running >= max_running:
            return
        waiting_clients, limits = queue.waiting_clients(), self._limits
        while waiting_clients and self._free_running_slots > reserve and queue.num_running < max_running:
            client = waiting_clients.pop()
            if self._start_one(queue, client, self._free_running_slots > limits.reserved_running_slots):
                waiting_clients.push(client)

    def _preempt(self) -> None:
        """Rows that wait take the places of rows that have more than their share; the reserve stays as it is."""
        for queue in (self.interactive, self.batch):
            waiting_clients = queue.waiting_clients()
            while waiting_clients and self.paused_rows < self._limits.max_paused:
                client = waiting_clients.pop()
                victim = self._victim(queue, client)
                if victim is None:
                    break  # all others of the line have as many rows, or more
                if self._start_one(queue, client, allow_second_row=True):
                    self.queue_of(victim.job).pause(victim)
                    self._steps.remove_running(victim)
                    self._slots.preempt(victim)
                    waiting_clients.push(client)

    def _victim(self, queue: FairQueue, newcomer: ClientRows) -> Sequence | None:
        """The row that gives way to one of `newcomer`: the youngest of the client that has the most."""
        if queue is self.interactive and self.batch.num_running > self._batch_running_slots:
            return _youngest(self.batch.largest())
        largest = queue.largest()
        if largest is None or len(largest.running) < len(newcomer.running) + 2:
            return None
        if queue is self.batch and self.batch.num_paused >= self._limits.max_paused // 2:
            return None  # the rest is for interactive rows
        return _youngest(largest)

    def _start_one(self, queue: FairQueue, client: ClientRows, allow_second_row: bool) -> bool:
        """Start or resume a row of the client; without `allow_second_row`, of a job that has none. False: none can."""
        for sequence in client.paused:
            queue.resume(sequence)
            self._steps.add_running(sequence)
            return True
        if self._out_of_slots:
            return False
        for job in client.jobs:
            if job.num_running and not allow_second_row and not job.is_batch:
                continue
            index = self._first_ready(queue, job)
            if index is None:
                continue
            slot = self._slots.allocate()
            if slot is None:
                self._out_of_slots = True
                return False
            self._assign_slots(queue.start(job, index), slot)
            self._interactive_since_batch += queue is self.interactive
            return True
        return False

    def _first_ready(self, queue: FairQueue, job: RunningJob) -> int | None:
        """The first of the job's waiting rows that can start; rows behind a busy session step aside."""
        for index, sequence in enumerate(islice(job.waiting, self._limits.max_running)):
            if self._slots.is_ready(sequence) and (
                sequence.samples or self._may_start_shared_prefill(queue, job.client)
            ):
                return index
        return None

    def _may_start_shared_prefill(self, queue: FairQueue, client: str) -> bool:
        """Whether one more prompt may be read for several rows: such prompts must never hold all slots.

        A client's earlier continuations go first; other clients' may wait long, and are not waited for.
        """
        if queue.client_rows(client).num_forked:
            return False
        limits, reading = self._limits, queue.num_shared_prefills
        held = reading + queue.num_held_shared_prefixes
        return reading < limits.max_shared_prefills and held < limits.max_held_shared_prefixes

    def _assign_slots(self, sequence: Sequence, slot: int) -> None:
        sequence.assign_slots(slot, self.free_req_slots.pop())
        self._steps.add_running(sequence)
        self._slots.prepare(sequence)

    def release_req_slot(self, sequence: Sequence) -> None:
        """The row draws no more: its place and its seat are free."""
        if sequence.req_slot != NO_REQ_SLOT:
            self.free_req_slots.append(sequence.req_slot)
            sequence.req_slot = NO_REQ_SLOT
            if self.queue_of(sequence.job).end(sequence):
                self._steps.add_running(sequence)  # it was paused


def _youngest(client: ClientRows | None) -> Sequence | None:
    """The client's row that started last and may be paused: one that reads for several rows soon ends by itself."""
    return None if client is None else next((s for s in reversed(client.running) if s.samples), None)
