"""Splits a step's prompt tokens between clients and their jobs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rwkv_batch.core.sequence import RunningJob, Sequence

MIN_TOKENS_PER_JOB = 32
"""Minimum prompt tokens of a job when its turn comes."""


def split_budget(
    reading: list[Sequence], budget: int, chunk: Callable[[Sequence], int], rotation: int
) -> list[tuple[Sequence, int]]:
    """Return the rows that read in this step, with their numbers of tokens.

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
    """A client's rows in turn, one per job and round."""
    queues = deque(jobs.values())
    queues.rotate(-rotation)
    rows: deque[Sequence] = deque()
    while queues:
        queue = queues.popleft()
        rows.append(queue.popleft())
        if queue:
            queues.append(queue)
    return rows
