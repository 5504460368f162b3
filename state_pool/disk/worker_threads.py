"""The pool's threads: one that reports its death, several for a checkpoint store, and how long to wait for a server.

Calls to a folder on a hanging mount neither return nor fail, and their threads cannot be interrupted. A waiting job
fails after `JOB_TIMEOUT_S`. The thread continues with other jobs once the mount is back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)


class PoolThread:
    """Runs `work` once on a new thread. If that raises, `failure` has the error.

    `work` must catch the errors of single jobs. Any other error is a bug: jobs would wait forever. So the engine thread
    checks `failure` at every step.
    """

    def __init__(self, name: str, work: Callable[[], None], on_death: Callable[[], None]) -> None:
        """`on_death` is called on the dying thread, to wake the engine."""
        self.failure: str | None = None
        self._work = work
        self._on_death = on_death
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread. Returns whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # SystemExit too: without the thread, jobs wait forever
            name = self._thread.name
            logger.critical("the thread %s has died", name, exc_info=True)
            self.failure = f"the thread {name} has died ({type(error).__name__}: {error})"
            self._on_death()


RECONNECT_TIMEOUT_S = 10.0
"""How long turns wait for a server from its first failure. After that they fail at once."""
RECONNECT_INTERVAL_S = 0.2


class ReconnectTimeout:
    """Retry state of one thread, shared by all its pending jobs."""

    def __init__(self) -> None:
        self._lost_at: float | None = None

    @property
    def is_connected(self) -> bool:
        return self._lost_at is None

    def may_retry(self, started_at: float) -> bool:
        """Whether to try the server once more.

        `started_at`: monotonic time of the first attempt. That attempt may have waited for a server that does not
        answer.
        """
        self._lost_at = self._lost_at or started_at
        return time.monotonic() <= self._lost_at + RECONNECT_TIMEOUT_S

    def reset(self) -> None:
        self._lost_at = None


JOB_TIMEOUT_S = 60.0
"""Limit per job. S3 requests with their retries end earlier."""
HUNG_CHECK_INTERVAL_S = 1.0

_Outcome = TypeVar("_Outcome")


class OnceCallback(Generic[_Outcome]):
    """Reports the first outcome of a job and ignores later ones. Any thread."""

    def __init__(self, report: Callable[[_Outcome], None]) -> None:
        self._report = report
        self._is_first = threading.Lock()

    def __call__(self, outcome: Callable[[], _Outcome]) -> bool:
        """Report the outcome if it is the first. Returns whether it was."""
        if not self._is_first.acquire(blocking=False):
            return False
        self._report(outcome())
        return True


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[], object]
    on_timeout: Callable[[], object]
    """Called when the job takes too long or never starts; perhaps several times, and while `work` runs."""


class _JobQueue:
    """Jobs that no thread has started, in order. None ends the thread that takes it."""

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
        with self._changed:
            while not self._jobs:
                self._changed.wait()
            return self._jobs.popleft()

    def take_unless_available(self, all_threads_hung: Callable[[], bool]) -> _Job | None:
        """Remove and return the first job. None if there is none, or a thread is free to take it."""
        with self._changed:
            if not self._jobs or self._jobs[0] is None or not all_threads_hung():
                return None
            return self._jobs.popleft()


class WorkerThreads:
    def __init__(self, name: str, count: int, on_death: Callable[[], None]) -> None:
        self._jobs = _JobQueue()
        self._running_jobs: list[tuple[float, _Job] | None] = [None] * count
        """by thread: (monotonic start time, job)"""
        self._threads = [
            PoolThread(f"{name}-{number}", partial(self._run, number), on_death) for number in range(count)
        ]

    @property
    def failure(self) -> str | None:
        return next((thread.failure for thread in self._threads if thread.failure is not None), None)

    @property
    def waiting(self) -> int:
        return len(self._jobs)

    def submit(self, work: Callable[[], object], on_timeout: Callable[[], object] = lambda: None) -> None:
        """Queue `work`. `time_out_hung_jobs` calls `on_timeout` if it takes too long."""
        self._jobs.put(_Job(work, on_timeout))

    def time_out_hung_jobs(self) -> None:
        """Time out the jobs that take too long. If all threads hang, time out the queued ones, too."""
        for job in self._hung_jobs():
            job.on_timeout()
        while (waiting := self._jobs.take_unless_available(self._all_threads_hung)) is not None:
            waiting.on_timeout()

    def close(self) -> None:
        """Finish the queued jobs and end the threads, except hung ones. Blocks for a bounded time per job."""
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
        running = self._running_jobs[number]
        return None if running is None or time.monotonic() < running[0] + JOB_TIMEOUT_S else running[1]

    def _run(self, number: int) -> None:
        while (job := self._jobs.take()) is not None:
            self._running_jobs[number] = (time.monotonic(), job)
            job.work()
            self._running_jobs[number] = None
