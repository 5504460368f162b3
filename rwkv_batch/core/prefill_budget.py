"""How a step's prompt tokens are shared out between clients and their jobs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rwkv_batch.core.sequence import RunningJob, Sequence

MIN_TOKENS_PER_JOB = 32
"""Prompt tokens that a job gets at its turn, however many have prompts to read."""


def split_budget(
    reading: list[Sequence], budget: int, chunk: Callable[[Sequence], int], turn: int
) -> list[tuple[Sequence, int]]:
    """Tokens for each row that gets any: `chunk` tells the most, `turn` whose turn is first.

    Clients share the budget evenly, and a client's jobs its part; what one leaves the next may use.
    """
    clients: dict[str, dict[RunningJob, deque[Sequence]]] = {}
    for sequence in reading:
        clients.setdefault(sequence.job.client, {}).setdefault(sequence.job, deque()).append(sequence)
    part = budget // max(1, len(clients))
    queues = deque(
        (_round_robin(jobs, turn // len(clients)), max(MIN_TOKENS_PER_JOB, part // len(jobs)))
        for jobs in clients.values()
    )
    queues.rotate(-turn)
    chunks: list[tuple[Sequence, int]] = []
    while queues and budget > 0:
        rows, share = queues.popleft()
        left = min(budget, max(part, share))
        while rows and left > 0:
            sequence = rows.popleft()
            count = min(chunk(sequence), share, left)
            left, budget = left - count, budget - count
            chunks.append((sequence, count))
        if rows:
            queues.append((rows, share))
    return chunks


def _round_robin(jobs: dict[RunningJob, deque[Sequence]], turn: int) -> deque[Sequence]:
    """A client's rows, one per job and round."""
    lines = deque(jobs.values())
    lines.rotate(-turn)
    rows: deque[Sequence] = deque()
    while lines:
        line = lines.popleft()
        rows.append(line.popleft())
        if line:
            lines.append(line)
    return rows
