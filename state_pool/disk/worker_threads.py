"""Threads that do what is asked of a checkpoint store, and what is done about a store that answers nothing at all.

The calls of a folder whose mount hangs neither return nor fail, and no thread can be taken back from them. Whoever
waits for such a job is told after `JOB_TIMEOUT_S`; the thread goes on with other jobs when the mount is back.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from state_pool.disk.thread import PoolThread

JOB_TIMEOUT_S = 60.0
"""How long a job may take; the requests of S3, tried anew, end before."""
HUNG_CHECK_INTERVAL_S = 1.0
"""Between two looks for jobs that take longer."""

_Outcome = TypeVar("_Outcome")


class OnceCallback(Generic[_Outcome]):
    """Tells the first outcome of a job, and makes no other. Any thread."""

    def __init__(self, report: Callable[[_Outcome], None]) -> None:
        self._report = report
        self._is_first = threading.Lock()

    def __call__(self, outcome: Callable[[], _Outcome]) -> bool:
        """Whether it was the first."""
        if not self._is_first.acquire(blocking=False):
            return False
        self._report(outcome())
        return True


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[], object]
    on_timeout: Callable[[], object]
    """Called, perhaps several times and beside `work`, when the job takes too long or never begins."""


class _JobQueue:
    """Jobs that no thread has begun, each of which leaves it from the front; None ends the thread that takes it."""

    def __init__(self) -> None:
        self._jobs: deque[_Job | None] = deque()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, job: _Job | None) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()

    def take(self) -> _Job | None:
        """The first, as soon as there is one."""
        with self._changed:
            while not self._jobs:
                self._changed.wait()
            return self._jobs.popleft()

    def take_unless_available(self, no_thread_left: Callable[[], bool]) -> _Job | None:
        """The first job, unless a thread would take it; None, too, if there is none before the end of a thread."""
        with self._changed:
            if not self._jobs or self._jobs[0] is None or not no_thread_left():
                return None
            return self._jobs.popleft()


class WorkerThreads:
    """Threads that do what is submitted, in order."""

    def __init__(self, name: str, count: int, on_death: Callable[[], None]) -> None:
        self._jobs = _JobQueue()
        self._running_jobs: list[tuple[float, _Job] | None] = [None] * count
        """By thread: since when (monotonic), and what."""
        self._threads = [
            PoolThread(f"{name}-{number}", partial(self._run, number), on_death) for number in range(count)
        ]

    @property
    def failure(self) -> str | None:
        """Why one of the threads is gone."""
        return next((thread.failure for thread in self._threads if thread.failure is not None), None)

    @property
    def waiting(self) -> int:
        """Jobs that no thread has begun."""
        return len(self._jobs)

    def submit(self, work: Callable[[], object], on_timeout: Callable[[], object] = lambda: None) -> None:
        """Have `work` done; `on_timeout` is called by `time_out_hung_jobs` if that takes too long."""
        self._jobs.put(_Job(work, on_timeout))

    def time_out_hung_jobs(self) -> None:
        """Give up the jobs that take too long, and those behind them if no thread is left to begin them."""
        for job in self._hung_jobs():
            job.on_timeout()
        while (waiting := self._jobs.take_unless_available(self._all_threads_hung)) is not None:
            waiting.on_timeout()

    def close(self) -> None:
        """Finish what was asked and end the threads; those that hang are left. Blocks, for a bounded time a job."""
        for _ in self._threads:
            self._jobs.put(None)
        for number, thread in enumerate(self._threads):
            while not thread.join(HUNG_CHECK_INTERVAL_S / 4) and self._hung_job(number) is None:
                pass

    def _hung_jobs(self) -> list[_Job]:
        return [job for number in range(len(self._threads)) if (job := self._hung_job(number)) is not None]

    def _all_threads_hung(self) -> bool:
        return len(self._hung_jobs()) == len(self._threads)

    def _hung_job(self, number: int) -> _Job | None:
        """What that thread has been at for too long."""
        begun = self._running_jobs[number]
        return None if begun is None or time.monotonic() < begun[0] + JOB_TIMEOUT_S else begun[1]

    def _run(self, number: int) -> None:
        while (job := self._jobs.take()) is not None:
            self._running_jobs[number] = (time.monotonic(), job)
            job.work()
            self._running_jobs[number] = None
