"""The times at which jobs time out. Owned by the engine's thread."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from rwkv_batch.core.sequence import RunningJob

DEADLINES_KEPT = 64
"""Deadlines of ended jobs that may stay in the heap."""


class Deadlines:
    """A heap of jobs by deadline. Its size is limited to twice the number of `jobs`."""

    def __init__(self, jobs: dict[str, RunningJob]) -> None:
        self._jobs = jobs
        self._heap: list[tuple[float, int, RunningJob]] = []
        self._tie = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, job: RunningJob, at: float) -> None:
        """at: the time.monotonic() at which the job times out; one job may have several deadlines"""
        heapq.heappush(self._heap, (at, next(self._tie), job))
        if len(self._heap) > 2 * len(self._jobs) + DEADLINES_KEPT:
            self._heap = [entry for entry in self._heap if self._is_current(entry[2])]
            heapq.heapify(self._heap)

    def pop_due(self, now: float) -> Iterator[RunningJob]:
        while self._heap and self._heap[0][0] <= now:
            _, _, job = heapq.heappop(self._heap)
            if self._is_current(job):
                yield job

    def _is_current(self, job: RunningJob) -> bool:
        return self._jobs.get(job.job_id) is job
