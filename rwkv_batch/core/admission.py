"""Gives running slots to waiting rows and preempts rows. No torch, no clock.

A row is one sequence of a job. It needs three things: a *running slot* (the right to be in the steps), a *request slot*
(its index in the samplers' tables) and a *state slot* (memory for its RWKV state).

At most `max_running` rows have a running slot. A free one goes to an interactive row before a batch row. Within a class
it goes to the client with the fewest running rows (`FairQueue`).

- Batch rows do not take the last few running slots, so that an interactive row starts at once.
- If those are taken too, an interactive row preempts a batch row, until batch rows have a quarter of the running slots.
- Within a class, a client preempts a row of a client that has at least two more running rows.
- A preempted row is *paused*. It leaves the steps, keeps its state slot and its request slot, and resumes later.
- If there is only one running slot, batch rows get it for some steps after every few interactive rows.
"""

from __future__ import annotations

from itertools import islice
from typing import Protocol

from rwkv_batch.core.fair_queue import ClientRows, FairQueue
from rwkv_batch.core.sequence import NO_REQ_SLOT, RunningJob, Sequence
from rwkv_batch.core.shares import BATCH_SHARE_DIVISOR, Limits


class SlotSource(Protocol):
    """Gives rows their state slots. Implemented by `state_manager.StateManager`."""

    def is_ready(self, sequence: Sequence) -> bool:
        """Return whether the row may start: its initial state can be read, and no row computes its prefix now."""

    def allocate(self) -> int | None:
        """Return a state slot that a row may write."""

    def prepare(self, sequence: Sequence) -> None:
        """Set the initial state of a row that got its slots: zero, a tuned state, a session's or a cached prefix's."""

    def add_spare(self, sequence: Sequence) -> None:
        """Try to allocate the row's second slot, needed in every step."""

    def preempt(self, sequence: Sequence) -> None:
        """Handle a paused row: rows that wait for its prompt's cached prefix compute it themselves."""


BATCH_TURN_STEPS = 64
"""Steps for which a batch row keeps the only running slot."""


class RunningSet(Protocol):
    """Receives the rows that get or lose a running slot."""

    def add_running(self, sequence: Sequence) -> None:
        """Include the row in the following steps."""

    def remove_running(self, sequence: Sequence) -> None:
        """Leave the row out of the following steps, perhaps temporarily."""


class Admission:
    """Waiting rows, running slots and request slots. Owned by the scheduler."""

    def __init__(self, limits: Limits, state_slots: SlotSource, running_set: RunningSet) -> None:
        self._limits = limits
        self._state_slots = state_slots
        self._running_set = running_set
        self.interactive = FairQueue()
        self.batch = FairQueue()
        self._out_of_state_slots = False
        """Whether `allocate` failed in this step. Then it is not called again: each call makes the pool evict."""
        self.free_req_slots = list(range(limits.num_req_slots - 1, -1, -1))
        self.started: dict[Sequence, None] = {}
        """sampling rows with a request slot whose parameters their sampler does not have yet (an ordered set)"""
        self._guaranteed_batch_slots = limits.batch_running_slots
        """running slots that batch rows keep in this step, even if interactive rows wait"""
        self._batch_turn_steps = 0
        """steps for which a batch row still keeps the only running slot"""
        self._interactive_since_batch = 0
        """interactive rows started since a batch row last ran"""

    @property
    def paused_rows(self) -> int:
        return self.interactive.num_paused + self.batch.num_paused

    @property
    def waiting_rows(self) -> int:
        return self.interactive.num_waiting + self.batch.num_waiting

    @property
    def _free_running_slots(self) -> int:
        return self._limits.max_running - self.interactive.num_running - self.batch.num_running

    def waiting_rows_of(self, client: str) -> int:
        return self.interactive.num_waiting_of(client) + self.batch.num_waiting_of(client)

    def queue_of(self, job: RunningJob) -> FairQueue:
        return self.batch if job.is_batch else self.interactive

    def admit(self) -> None:
        """Fill the free running slots, then preempt."""
        limits = self._limits
        self._out_of_state_slots = False
        if not limits.batch_running_slots:  # only if max_running is 1
            self._update_batch_turn()
        self._fill(self.batch, self._guaranteed_batch_slots, 0)
        self._fill(self.interactive, limits.max_running, 0)
        self._fill(self.batch, limits.max_running, limits.reserved_running_slots)
        self._preempt()

    def _update_batch_turn(self) -> None:
        """Decide which class gets the only running slot in this step.

        Without this, batch rows would wait as long as interactive rows arrive.
        """
        if self.batch.num_running:
            self._interactive_since_batch = 0
            self._batch_turn_steps = max(0, self._batch_turn_steps - 1)
        elif self._interactive_since_batch >= BATCH_SHARE_DIVISOR - 1:
            self._batch_turn_steps = BATCH_TURN_STEPS
        self._guaranteed_batch_slots = 1 if self._batch_turn_steps else 0

    def _fill(self, queue: FairQueue, max_running: int, reserve: int) -> None:
        """Start rows of one class. Stop when `max_running` run or only `reserve` running slots are free."""
        if self._free_running_slots <= reserve or queue.num_running >= max_running:
            return
        waiting_clients, limits = queue.waiting_clients(), self._limits
        while waiting_clients and self._free_running_slots > reserve and queue.num_running < max_running:
            client = waiting_clients.pop()
            if self._start_one(queue, client, self._free_running_slots > limits.reserved_running_slots):
                waiting_clients.push(client)

    def _preempt(self) -> None:
        """Pause rows of clients above their share, and start waiting rows instead."""
        for queue in (self.interactive, self.batch):
            waiting_clients = queue.waiting_clients()
            while waiting_clients and self.paused_rows < self._limits.max_paused:
                client = waiting_clients.pop()
                victim = self._victim(queue, client)
                if victim is None:
                    break  # clients come in order of their running rows: no later client has fewer
                if self._start_one(queue, client, allow_running_jobs=True):
                    self.queue_of(victim.job).pause(victim)
                    self._running_set.remove_running(victim)
                    self._state_slots.preempt(victim)
                    waiting_clients.push(client)

    def _victim(self, queue: FairQueue, newcomer: ClientRows) -> Sequence | None:
        """Return the row to preempt for a row of `newcomer`, or None.

        For an interactive row this is a batch row, if batch rows have more than they are guaranteed. Otherwise it is
        the youngest row of the client with the most running rows, if that client has two more than `newcomer`.
        """
        if queue is self.interactive and self.batch.num_running > self._guaranteed_batch_slots:
            return _youngest(self.batch.largest())
        largest = queue.largest()
        if largest is None or len(largest.running) < len(newcomer.running) + 2:
            return None
        if queue is self.batch and self.batch.num_paused >= self._limits.max_paused // 2:
            return None  # interactive rows may use the other half
        return _youngest(largest)

    def _start_one(self, queue: FairQueue, client: ClientRows, allow_running_jobs: bool) -> bool:
        """Start or resume one row of the client. Returns whether it did.

        allow_running_jobs: if False, start no further row of an interactive job that already runs
        """
        if client.paused:
            longest_paused = next(iter(client.paused))
            queue.resume(longest_paused)
            self._running_set.add_running(longest_paused)
            return True
        if self._out_of_state_slots:
            return False
        for job in client.jobs:
            if job.num_running and not allow_running_jobs and not job.is_batch:
                continue
            index = self._first_ready(queue, job)
            if index is None:
                continue
            slot = self._state_slots.allocate()
            if slot is None:
                self._out_of_state_slots = True
                return False
            self._start(queue.start(job, index), slot)
            self._interactive_since_batch += queue is self.interactive
            return True
        return False

    def _first_ready(self, queue: FairQueue, job: RunningJob) -> int | None:
        """Return the index of the job's first waiting row that can start."""
        for index, sequence in enumerate(islice(job.waiting, self._limits.max_running)):
            if self._state_slots.is_ready(sequence) and (
                sequence.may_sample or self._may_start_shared_prefill(queue, job.client)
            ):
                return index
        return None

    def _may_start_shared_prefill(self, queue: FairQueue, client: str) -> bool:
        """Return whether another shared prompt may be read. Shared prompts must never hold all slots.

        Several answers to one prompt share it: one row reads the prompt, and each answer continues from its state.
        While continuations of the client wait, none of its other shared prompts is read. Continuations of other clients
        do not count, because they may wait long.
        """
        if queue.client_rows(client).num_forked:
            return False
        limits, reading = self._limits, queue.num_shared_prefills
        held = reading + queue.num_held_shared_prefixes
        return reading < limits.max_shared_prefills and held < limits.max_held_shared_prefixes

    def _start(self, sequence: Sequence, slot: int) -> None:
        sequence.assign_slots(slot, self.free_req_slots.pop())
        if sequence.may_sample and not sequence.is_prefill_only:
            self.started[sequence] = None
        self._running_set.add_running(sequence)
        self._state_slots.prepare(sequence)

    def release_req_slot(self, sequence: Sequence) -> None:
        """Free the request slot and the running slot of a finished row."""
        if sequence.req_slot != NO_REQ_SLOT:
            self.free_req_slots.append(sequence.req_slot)
            sequence.req_slot = NO_REQ_SLOT
            self.started.pop(sequence, None)
            was_paused = self.queue_of(sequence.job).end(sequence)
            if was_paused:  # it still reads its last tokens, which the session's state must contain
                self._running_set.add_running(sequence)


def _youngest(client: ClientRows | None) -> Sequence | None:
    """Return the client's youngest row that may be paused.

    Rows that read a shared prompt are skipped: they end soon.
    """
    return None if client is None else next((s for s in reversed(client.running) if s.may_sample), None)
