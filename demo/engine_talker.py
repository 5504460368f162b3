"""A talker over the project's own engine, in this process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from demo import vocabulary
from demo.talker import STOP
from rwkv_batch.config import EngineConfig
from rwkv_batch.engine import Engine
from rwkv_batch.request import GenerateRequest, Job, JobEvents, SessionTurn
from sampling.params import SamplingParams
from state_pool.config import PoolConfig

STOP_IDS = [261, 24281]
_numbers = itertools.count()


class _Waiting:
    """The texts of a job on their way."""

    def __init__(self, rows: int) -> None:
        self._bytes = [b""] * rows
        self._ended = threading.Event()
        self._failed: list[Any] = []

    def sink(self, events: JobEvents) -> None:
        """Take a step's updates."""
        for delta in events.deltas:
            self._bytes[delta.row] += delta.text
            if delta.finish and delta.finish.error:
                self._failed.append(delta.finish.error)
        if events.error:
            self._failed.append(events.error)
        if events.done:
            self._ended.set()

    def admitted(self, refusal: Any) -> None:
        """Hear whether the job was taken."""
        if refusal is not None:
            self._failed.append(refusal)
            self._ended.set()

    def texts(self) -> list[str]:
        """Wait for the end; the answers without their stops."""
        self._ended.wait()
        if self._failed:
            raise RuntimeError(f"the engine failed: {self._failed[0]}")
        return [text.decode("utf-8", "replace").split(STOP)[0] for text in self._bytes]


class EngineTalker:
    """See `demo.talker.Talker`."""

    def __init__(self, engine: Engine, state: str = "") -> None:
        """`state`: the tuned state that prompts are read from; "": none."""
        self.engine = engine
        self._state = state

    def _row(self, prompt: str, max_tokens: int, session: str = "") -> GenerateRequest:
        ids = vocabulary.encode(prompt)
        return GenerateRequest(
            prompt=ids,
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=0),
            stop_ids=STOP_IDS,
            stop_strings=[STOP.encode()],
            state=self._state,
            session=SessionTurn(session_id=session, resume_prompt=vocabulary.encode(STOP + prompt))
            if session
            else None,
        )

    def _start(self, rows: list[GenerateRequest]) -> _Waiting:
        job = Job(job_id=f"evaluation-{next(_numbers)}", rows=rows)
        waiting = _Waiting(len(rows))
        self.engine.submit(job, waiting.sink, waiting.admitted)
        return waiting

    def complete(self, prompts: list[str], max_tokens: int) -> list[str]:
        """See `Talker`."""
        return self._start([self._row(prompt, max_tokens) for prompt in prompts]).texts()

    def converse(self, sessions: list[list[str]], max_tokens: int) -> list[list[str]]:
        """See `Talker`; each session is one of the engine's."""
        names = [f"evaluation-session-{next(_numbers)}" for _ in sessions]
        answers: list[list[str]] = [[] for _ in sessions]
        for turn in range(max(len(session) for session in sessions)):
            live = [i for i, session in enumerate(sessions) if turn < len(session)]
            jobs = [self._start([self._row(sessions[i][turn], max_tokens, names[i])]) for i in live]
            for i, job in zip(live, jobs, strict=True):
                answers[i] += job.texts()
        return answers


@contextmanager
def engine_talker(
    model: Path,
    *,
    device: str,
    dtype: str,
    wkv_state: str,
    adapters: Sequence[str] = (),
    states: Sequence[str] = (),
) -> Iterator[EngineTalker]:
    """A started engine, stopped at the end; its sessions live in memory. The last two as `--adapter` and `--state`."""
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
        yield EngineTalker(engine)
    finally:
        engine.stop()
