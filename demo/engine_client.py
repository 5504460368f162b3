"""Runs the project's engine in this process and returns greedy answers."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from demo import vocabulary
from rwkv_batch.config import EngineConfig
from rwkv_batch.engine import Engine
from rwkv_batch.request import GenerateRequest, Job, JobEvents, SessionTurn
from sampling.params import SamplingParams
from state_pool.config import PoolConfig

STOP = "\n\n"
STOP_IDS = [261, 24281]
_numbers = itertools.count()


class _Job:
    def __init__(self, rows: int) -> None:
        self._bytes = [b""] * rows
        self._done = threading.Event()
        self._errors: list[Any] = []

    def on_events(self, events: JobEvents) -> None:
        for delta in events.deltas:
            self._bytes[delta.row] += delta.text
            if delta.finish and delta.finish.error:
                self._errors.append(delta.finish.error)
        if events.error:
            self._errors.append(events.error)
        if events.done:
            self._done.set()

    def on_admission(self, refusal: Any) -> None:
        if refusal is not None:
            self._errors.append(refusal)
            self._done.set()

    def texts(self) -> list[str]:
        """Wait for the job; return each row's text before the stop. Raises RuntimeError if the engine failed."""
        self._done.wait()
        if self._errors:
            raise RuntimeError(f"the engine failed: {self._errors[0]}")
        return [text.decode("utf-8", "replace").split(STOP)[0] for text in self._bytes]


class EngineClient:
    """Greedy answers of one engine, without the stop that ended them."""

    def __init__(self, engine: Engine, state: str = "") -> None:
        """`state`: the tuned state that every prompt starts from; empty for the zero state."""
        self.engine = engine
        self._state = state

    def _request(self, prompt: str, max_tokens: int, session: str = "") -> GenerateRequest:
        turn = SessionTurn(session_id=session, resume_prompt=vocabulary.encode(STOP + prompt)) if session else None
        return GenerateRequest(
            prompt=vocabulary.encode(prompt),
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=0),
            stop_ids=STOP_IDS,
            stop_strings=[STOP.encode()],
            state=self._state,
            session=turn,
        )

    def _submit(self, rows: list[GenerateRequest]) -> _Job:
        job = _Job(len(rows))
        self.engine.submit(Job(job_id=f"evaluation-{next(_numbers)}", rows=rows), job.on_events, job.on_admission)
        return job

    def complete(self, prompts: list[str], max_tokens: int) -> list[str]:
        return self._submit([self._request(prompt, max_tokens) for prompt in prompts]).texts()

    def converse(self, sessions: list[list[str]], max_tokens: int) -> list[list[str]]:
        """Answer each session's prompts in order, with one engine session per list."""
        names = [f"evaluation-session-{next(_numbers)}" for _ in sessions]
        answers: list[list[str]] = [[] for _ in sessions]
        for turn in range(max(len(session) for session in sessions)):
            live = [i for i, session in enumerate(sessions) if turn < len(session)]
            jobs = [self._submit([self._request(sessions[i][turn], max_tokens, names[i])]) for i in live]
            for i, job in zip(live, jobs, strict=True):
                answers[i] += job.texts()
        return answers


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
