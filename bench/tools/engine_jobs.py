"""Jobs that arrive at an engine together, and their answers."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rwkv_batch.engine import Engine
from rwkv_batch.request import Finish, GenerateRequest, Job, JobEvents

_numbers = itertools.count()


@dataclass(slots=True)
class Answer:
    """A job's answer. Its first text came `first_s` seconds after the jobs were sent."""

    first_s: float = 0.0
    text: bytes = b""
    finishes: dict[int, Finish] = field(default_factory=dict)
    """by row"""

    @property
    def cached_tokens(self) -> int:
        return sum(finish.cached_tokens for finish in self.finishes.values())


def run_jobs(engine: Engine, jobs: Sequence[list[GenerateRequest]]) -> list[Answer]:
    """Run jobs, each with these rows. Returns their answers in this order."""
    done, started = threading.Semaphore(0), time.perf_counter()

    def submit(rows: list[GenerateRequest]) -> Answer:
        answer = Answer()

        def sink(events: JobEvents) -> None:
            for delta in events.deltas:
                answer.first_s = answer.first_s or time.perf_counter() - started
                answer.text += delta.text
                if delta.finish is not None:
                    answer.finishes[delta.row] = delta.finish
            if events.done:
                done.release()

        engine.submit(Job(job_id=f"bench-{next(_numbers)}", rows=rows), sink, lambda refusal: None)
        return answer

    answers = [submit(rows) for rows in jobs]
    for _ in jobs:
        done.acquire()
    return answers
