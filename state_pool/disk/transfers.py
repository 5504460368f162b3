"""Threads that do what is asked of a checkpoint store, and what is done about a store that answers nothing at all.

The calls of a folder whose mount hangs neither return nor fail, and no thread can be taken back from them. Whoever
waits for such a job is told after `PATIENCE_S`; the thread goes on with other jobs when the mount is back.
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

PATIENCE_S = 60.0
"""How long a job may take; the requests of S3, tried anew, end before."""
LOOK_S = 1.0
"""Between two looks for jobs that take longer."""

_Outcome = TypeVar("_Outcome")


class Once(Generic[_Outcome]):
    """Tells the first outcome of a job, and makes no other. Any thread."""

    def __init__(self, tell: Callable[[_Outcome], None]) -> None:
        self._tell = tell
        self._is_first = threading.Lock()

    def __call__(self, outcome: Callable[[], _Outcome]) -> bool:
        """Whether it was the first."""
        if not self._is_first.acquire(blocking=False):
            return False
        self._tell(outcome())
        return True


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[], object]
    give_up: Callable[[], object]
    """Called, perhaps several times and beside `work`, when the job takes too long or never begins."""


class _Line:
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

    def take_if(self, nobody_else_will: Callable[[], bool]) -> _Job | None:
        """The first job, unless a thread would take it; None, too, if there is none before the end of a thread."""
        with self._changed:
            if not self._jobs or self._jobs[0] is None or not nobody_else_will():
                return None
            return self._jobs.popleft()


class Workers:
    """Threads that do what is submitted, in order."""

    def __init__(self, name: str, count: int, on_death: Callable[[], None]) -> None:
        self._jobs = _Line()
        self._under_way: list[tuple[float, _Job] | None] = [None] * count
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

    def submit(self, work: Callable[[], object], give_up: Callable[[], object] = lambda: None) -> None:
        """Have `work` done; `give_up` is called by `give_up_hung` if that takes too long."""
        self._jobs.put(_Job(work, give_up))

    def give_up_hung(self) -> None:
        """Give up the jobs that take too long, and those behind them if no thread is left to begin them."""
        for job in self._all_hung():
            job.give_up()
        while (waiting := self._jobs.take_if(self._none_is_left)) is not None:
            waiting.give_up()

    def close(self) -> None:
        """Finish what was asked and end the threads; those that hang are left. Blocks, for a bounded time a job."""
        for _ in self._threads:
            self._jobs.put(None)
        for number, thread in enumerate(self._threads):
            while not thread.join(LOOK_S / 4) and self._hung(number) is None:
                pass

    def _all_hung(self) -> list[_Job]:
        return [job for number in range(len(self._threads)) if (job := self._hung(number)) is not None]

    def _none_is_left(self) -> bool:
        return len(self._all_hung()) == len(self._threads)

    def _hung(self, number: int) -> _Job | None:
        """What that thread has been at for too long."""
        begun = self._under_way[number]
        return None if begun is None or time.monotonic() < begun[0] + PATIENCE_S else begun[1]

    def _run(self, number: int) -> None:
        while (job := self._jobs.take()) is not None:
            self._under_way[number] = (time.monotonic(), job)
            job.work()
            self._under_way[number] = None
