"""Jobs that arrive at an engine together, and their answers."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rwkv_batch.engine import Engine
from rwkv_batch.request import Finish, GenerateRequest, Job, JobEvents
from sampling.params import SamplingParams

PENALTIES = SamplingParams(top_k=50, top_p=0.6, presence_penalty=2.0, frequency_penalty=0.2, penalty_decay=0.996)
_numbers = itertools.count()


@dataclass(slots=True)
class Answer:
    """A job's answer."""

    times: list[float] = field(default_factory=list)
    """of its events with text, in seconds after the jobs were sent"""
    text: bytes = b""
    finishes: dict[int, Finish] = field(default_factory=dict)
    """by row"""

    @property
    def cached_tokens(self) -> int:
        return sum(finish.cached_tokens for finish in self.finishes.values())


def run_jobs(engine: Engine, jobs: Sequence[list[GenerateRequest]]) -> list[Answer]:
    """Run jobs, each with these rows. Returns their answers in this order. Raises RuntimeError if one is refused."""
    done, started, refusals = threading.Semaphore(0), time.perf_counter(), list[object]()

    def submit(rows: list[GenerateRequest]) -> Answer:
        answer = Answer()

        def sink(events: JobEvents) -> None:
            if events.deltas:
                answer.times.append(time.perf_counter() - started)
            for delta in events.deltas:
                answer.text += delta.text
                if delta.finish is not None:
                    answer.finishes[delta.row] = delta.finish
            if events.done:
                done.release()

        def admitted(refusal: object) -> None:
            if refusal is not None:
                refusals.append(refusal)
                done.release()

        engine.submit(Job(job_id=f"bench-{next(_numbers)}", rows=rows), sink, admitted)
        return answer

    answers = [submit(rows) for rows in jobs]
    for _ in jobs:
        done.acquire()
    if refusals:
        raise RuntimeError(f"the engine refused the rows: {refusals[0]}")
    return answers
