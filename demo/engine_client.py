"""Runs the project's engine in this process and returns greedy answers."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rwkv_batch.config import EngineConfig
from rwkv_batch.engine import Engine
from rwkv_batch.request import Finish, GenerateRequest, Job, JobEvents, SessionTurn
from rwkv_batch.tokenizer import Tokenizer
from sampling.params import SamplingParams
from state_pool.config import PoolConfig

STOP = "\n\n"
STOP_IDS = [261, 24281]
_numbers = itertools.count()
_tokenizer = Tokenizer()


@dataclass(slots=True)
class Answer:
    """A job's answer."""

    texts: list[bytes]
    """by row"""
    times: list[float] = field(default_factory=list)
    """of its events with text, in seconds after the jobs were sent"""
    finishes: dict[int, Finish] = field(default_factory=dict)
    """by row"""

    @property
    def cached_tokens(self) -> int:
        return sum(finish.cached_tokens for finish in self.finishes.values())


def run_jobs(engine: Engine, jobs: Sequence[list[GenerateRequest]]) -> list[Answer]:
    """Run jobs that arrive together, each with these rows. Return their answers in this order.

    Raises RuntimeError if the engine refuses a job or a row fails.
    """
    done, started, errors = threading.Semaphore(0), time.perf_counter(), list[object]()

    def submit(rows: list[GenerateRequest]) -> Answer:
        answer = Answer([b""] * len(rows))

        def sink(events: JobEvents) -> None:
            if events.deltas:
                answer.times.append(time.perf_counter() - started)
            for delta in events.deltas:
                answer.texts[delta.row] += delta.text
                if delta.finish is not None:
                    answer.finishes[delta.row] = delta.finish
                    errors.append(delta.finish.error)
            if events.error is not None:
                errors.append(events.error)
            if events.done:
                done.release()

        def admitted(refusal: object) -> None:
            if refusal is not None:
                errors.append(refusal)
                done.release()

        engine.submit(Job(job_id=f"job-{next(_numbers)}", rows=rows), sink, admitted)
        return answer

    answers = [submit(rows) for rows in jobs]
    for _ in jobs:
        done.acquire()
    for error in filter(None, errors):
        raise RuntimeError(f"the engine failed: {error}")
    return answers


class EngineClient:
    """Greedy answers of one engine, without the stop that ended them."""

    def __init__(self, engine: Engine, state: str = "") -> None:
        """`state`: the tuned state that every prompt starts from; empty for the zero state."""
        self.engine = engine
        self._state = state

    def _request(self, prompt: str, max_tokens: int, session: str = "") -> GenerateRequest:
        turn = SessionTurn(session_id=session, resume_prompt=_tokenizer.encode(STOP + prompt)) if session else None
        return GenerateRequest(
            prompt=_tokenizer.encode(prompt),
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=0),
            stop_ids=STOP_IDS,
            stop_strings=[STOP.encode()],
            state=self._state,
            session=turn,
        )

    def complete(self, prompts: list[str], max_tokens: int) -> list[str]:
        """Answer prompts. Raises RuntimeError, see `run_jobs`."""
        (answer,) = run_jobs(self.engine, [[self._request(prompt, max_tokens) for prompt in prompts]])
        return [_until_stop(text) for text in answer.texts]

    def converse(self, sessions: list[list[str]], max_tokens: int) -> list[list[str]]:
        """Answer each session's prompts in order, with one engine session per list."""
        names = [f"evaluation-session-{next(_numbers)}" for _ in sessions]
        answers: list[list[str]] = [[] for _ in sessions]
        for turn in range(max(len(session) for session in sessions)):
            live = [i for i, session in enumerate(sessions) if turn < len(session)]
            jobs = [[self._request(sessions[i][turn], max_tokens, names[i])] for i in live]
            for i, answer in zip(live, run_jobs(self.engine, jobs), strict=True):
                answers[i].append(_until_stop(answer.texts[0]))
        return answers


def _until_stop(text: bytes) -> str:
    return text.decode("utf-8", "replace").split(STOP)[0]


@contextmanager
def open_engine(
    model: Path,
    *,
    device: str,
    dtype: str = "fp32",
    wkv_state: str = "fp32",
    adapters: Sequence[str] = (),
    states: Sequence[str] = (),
) -> Iterator[EngineClient]:
    """Start an engine and stop it at the end. `adapters` and `states` are values of `--adapter` and `--state`."""
    config = EngineConfig(
        adapters=tuple(adapters),
        states=tuple(states),
        model_path=str(model),
        devices=tuple(device.split(",")),
        dtype=dtype,
        wkv_state=wkv_state,
        pool=PoolConfig(state_db="", l2_sessions=1024),
    )
    engine = Engine(config)
    engine.start()
    try:
        yield EngineClient(engine)
    finally:
        engine.stop()
