"""Orders the rows of one class fairly by client. Plain data of the engine's thread.

- The next client is the one with the fewest running rows. On a tie, it is the one served longest ago.
- A client's jobs take turns, one row at a time.
- Jobs that another engine had begun come first, because their clients already receive output.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from rwkv_batch.core.sequence import RunningJob, Sequence, SharedSlot


@dataclass(slots=True, eq=False)
class ClientRows:
    client: str
    jobs: deque[RunningJob] = field(default_factory=deque)
    """jobs with waiting rows, the next one first"""
    running: dict[Sequence, None] = field(default_factory=dict)
    """rows with a running slot, the oldest first"""
    paused: dict[Sequence, None] = field(default_factory=dict)
    """preempted rows, the longest paused first"""
    num_forked: int = 0
    """waiting continuations of shared prompts that were read"""
    last_started: int = 0
    """serial number of its last start"""


class WaitingClients:
    """Clients with rows that need a running slot, the next one first."""

    def __init__(self, clients: Iterator[ClientRows]) -> None:
        self._heap = [(len(rows.running), rows.last_started, rows.client, rows) for rows in clients]
        heapq.heapify(self._heap)

    def __bool__(self) -> bool:
        return bool(self._heap)

    def pop(self) -> ClientRows:
        return heapq.heappop(self._heap)[-1]

    def push(self, rows: ClientRows) -> None:
        """Put the client back if it still has rows to start."""
        if rows.jobs or rows.paused:
            heapq.heappush(self._heap, (len(rows.running), rows.last_started, rows.client, rows))


class FairQueue:
    """Waiting, running and paused rows of one class. Owned by the scheduler."""

    def __init__(self) -> None:
        self._clients: dict[str, ClientRows] = {}
        self._serial = itertools.count(1)
        self.forked: dict[Sequence, None] = {}
        """waiting continuations of shared prompts: each prompt's slot is held until all of them run"""
        self._shared_slots: Counter[SharedSlot | None] = Counter()
        """the slots of those prompts, with the number of waiting continuations"""
        self.num_waiting = 0
        self.waiting_tokens = 0
        self.num_running = 0
        self.num_paused = 0

    def client_rows(self, client: str) -> ClientRows:
        if client not in self._clients:
            self._clients[client] = ClientRows(client)
        return self._clients[client]

    def waiting_clients(self) -> WaitingClients:
        if not self.num_waiting and not self.num_paused:
            return WaitingClients(iter(()))
        return WaitingClients(rows for rows in self._clients.values() if rows.jobs or rows.paused)

    def num_waiting_of(self, client: str) -> int:
        return sum(len(job.waiting) for job in self._clients[client].jobs) if client in self._clients else 0

    @property
    def num_rows(self) -> int:
        return self.num_waiting + self.num_running + self.num_paused

    @property
    def num_shared_prefills(self) -> int:
        """Running rows that read a prompt for several continuations."""
        return sum(not sequence.may_sample for rows in self._clients.values() for sequence in rows.running)

    @property
    def num_held_shared_prefixes(self) -> int:
        """Shared prompts with waiting continuations."""
        return len(self._shared_slots)

    def largest(self) -> ClientRows | None:
        return max(self._clients.values(), key=lambda rows: len(rows.running), default=None)

    def add(self, job: RunningJob, sequences: list[Sequence]) -> None:
        """Append a new job's rows. A job whose engine was lost goes before all jobs that have not begun."""
        jobs = self.client_rows(job.client).jobs
        others = itertools.takewhile(lambda one: one.spec.was_admitted, jobs)
        jobs.insert(sum(1 for _ in others) if job.spec.was_admitted else len(jobs), job)
        job.waiting.extend(sequences)
        self.num_waiting += len(sequences)
        self.waiting_tokens += sum(sequence.num_uncomputed_tokens for sequence in sequences)

    def add_forked(self, job: RunningJob, sequences: list[Sequence]) -> None:
        """Insert waiting continuations before the client's other rows. They free the slot that they share."""
        rows = self.client_rows(job.client)
        if job.waiting:
            rows.jobs.remove(job)
        rows.jobs.appendleft(job)
        job.waiting.extendleft(reversed(sequences))
        self.forked.update(dict.fromkeys(sequences))
        self._shared_slots.update(sequence.shared for sequence in sequences)
        rows.num_forked += len(sequences)
        self.num_waiting += len(sequences)
        self.waiting_tokens += sum(sequence.num_uncomputed_tokens for sequence in sequences)

    def _remove_forked(self, rows: ClientRows, sequence: Sequence) -> None:
        if sequence not in self.forked:
            return
        del self.forked[sequence]
        rows.num_forked -= 1
        self._shared_slots[sequence.shared] -= 1
        if not self._shared_slots[sequence.shared]:
            del self._shared_slots[sequence.shared]

    def remove_waiting(self, job: RunningJob) -> list[Sequence]:
        sequences = list(job.waiting)
        if sequences:
            self.client_rows(job.client).jobs.remove(job)
            job.waiting.clear()
        for sequence in sequences:
            self._remove_forked(self.client_rows(job.client), sequence)
        self.num_waiting -= len(sequences)
        self.waiting_tokens -= sum(sequence.num_uncomputed_tokens for sequence in sequences)
        self._drop_if_empty(job.client)
        return sequences

    def start(self, job: RunningJob, index: int) -> Sequence:
        """Give a running slot to the job's waiting row `index`. The client's next row comes from another job."""
        rows, sequence = self.client_rows(job.client), job.waiting[index]
        del job.waiting[index]
        self._remove_forked(rows, sequence)
        self.num_waiting -= 1
        self.waiting_tokens -= sequence.num_uncomputed_tokens
        rows.jobs.remove(job)
        if job.waiting:
            rows.jobs.append(job)
        self._set_running(rows, sequence)
        return sequence

    def resume(self, sequence: Sequence) -> None:
        rows = self.client_rows(sequence.job.client)
        del rows.paused[sequence]
        self.num_paused -= 1
        self._set_running(rows, sequence)

    def _set_running(self, rows: ClientRows, sequence: Sequence) -> None:
        rows.running[sequence] = None
        rows.last_started = next(self._serial)
        self.num_running += 1
        sequence.job.num_running += 1

    def pause(self, sequence: Sequence) -> None:
        rows = self.client_rows(sequence.job.client)
        del rows.running[sequence]
        rows.paused[sequence] = None
        self.num_running -= 1
        self.num_paused += 1
        sequence.job.num_running -= 1

    def end(self, sequence: Sequence) -> bool:
        """Remove a running or paused row. Returns whether it was paused."""
        client = sequence.job.client
        rows = self.client_rows(client)
        if sequence in rows.running:
            del rows.running[sequence]
            self.num_running -= 1
            sequence.job.num_running -= 1
        was_paused = sequence in rows.paused
        if was_paused:
            del rows.paused[sequence]
            self.num_paused -= 1
        self._drop_if_empty(client)
        return was_paused

    def _drop_if_empty(self, client: str) -> None:
        rows = self.client_rows(client)
        if not (rows.jobs or rows.running or rows.paused):
            del self._clients[client]
