"""Runs jobs on an in-process engine and collects what comes back."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from demo.random_weights import write_random_model
from rwkv_batch.calls import AnyCall
from rwkv_batch.config import EngineConfig
from rwkv_batch.engine import Engine
from rwkv_batch.errors import ServiceError
from rwkv_batch.request import Finish, GenerateRequest, Job, JobEvents, SessionTurn, TokenLogprob
from rwkv_batch.tokenizer import Tokenizer
from sampling.params import SamplingParams
from state_pool.config import PoolConfig

TOKENIZER = Tokenizer()
GREEDY = SamplingParams(temperature=0.0)
WAIT_S = 120.0
_ids = itertools.count()
CALLS = {one.__struct_config__.tag: one for one in get_args(AnyCall)}


@dataclass
class RunningJob:
    """A submitted job: its texts and finishes by row, its events."""

    job: Job
    texts: dict[int, bytes] = field(default_factory=dict)
    finishes: dict[int, Finish] = field(default_factory=dict)
    events: list[JobEvents] = field(default_factory=list)
    refusal: ServiceError | None = None
    answered: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    started: threading.Event = field(default_factory=threading.Event)

    def on_admitted(self, refusal: Any) -> None:
        self.refusal = refusal
        self.answered.set()
        if refusal is not None:
            self.done.set()

    def sink(self, events: JobEvents) -> None:
        self.events.append(events)
        for delta in events.deltas:
            self.texts[delta.row] = self.texts.get(delta.row, b"") + delta.text
            if delta.finish is not None:
                assert delta.row not in self.finishes, "a row ended twice"
                self.finishes[delta.row] = delta.finish
        self.started.set()
        if events.done:
            assert not self.done.is_set(), "a job ended twice"
            self.done.set()

    def wait(self) -> RunningJob:
        assert self.done.wait(WAIT_S), "the job did not end"
        return self

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of all rows' sampled tokens."""
        return [entry for events in self.events for delta in events.deltas for entry in delta.logprobs or ()]

    @property
    def all_texts(self) -> list[bytes]:
        return [self.texts[row] for row in range(self.job.num_rows)]


def make_request(prompt: str | list[int], **fields: Any) -> GenerateRequest:
    """Return a row; greedy and 16 tokens by default."""
    ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
    return GenerateRequest(**{"prompt": ids, "max_tokens": 16, "sampling": GREEDY, **fields})


def turn(session_id: str, prompt: str, **fields: Any) -> GenerateRequest:
    """Return a row that continues a session. The prompt is the same whether the session exists or not."""
    session = {k: fields.pop(k) for k in ("branch_from", "wait") if k in fields}
    ids = TOKENIZER.encode(prompt)
    return make_request(ids, session=SessionTurn(session_id=session_id, resume_prompt=ids, **session), **fields)


def submit(engine: Engine, *rows: GenerateRequest, **fields: Any) -> RunningJob:
    running = RunningJob(Job(job_id=f"job{next(_ids)}", rows=list(rows), **fields))
    engine.submit(running.job, running.sink, running.on_admitted)
    return running


@contextmanager
def paused_engine(engine: Engine) -> Iterator[None]:
    """Pause the engine. On exit it receives all submitted jobs at once, in order."""
    resumed = threading.Event()
    engine._inbox.put(lambda: resumed.wait(WAIT_S) and None)
    try:
        yield
    finally:
        resumed.set()


def run(engine: Engine, *rows: GenerateRequest, **fields: Any) -> RunningJob:
    """Run a job to its end. Raises its refusal."""
    running = submit(engine, *rows, **fields).wait()
    if running.refusal is not None:
        raise running.refusal
    return running


def call(engine: Engine, verb: str, **arguments: Any) -> Any:
    """Call the engine by the call's tag and return the answer. Raises a failure."""
    answered, answer = threading.Event(), []
    engine.call(CALLS[verb](**arguments), lambda value: (answer.append(value), answered.set()))
    assert answered.wait(WAIT_S)
    if isinstance(answer[0], ServiceError):
        raise answer[0]
    return answer[0]


def eventually_holds(engine: Engine, check: Callable[[], bool]) -> bool:
    """Return whether the check holds on the engine's thread after pending work."""
    held: list[bool] = []
    deadline = time.monotonic() + WAIT_S
    while not any(held) and time.monotonic() < deadline:
        looked = threading.Event()

        def look(looked: threading.Event = looked) -> None:
            held.append(check())
            looked.set()

        if not engine._inbox.put(look):  # the engine has ended
            return check()
        assert looked.wait(WAIT_S)
        time.sleep(0.01)
    return any(held)


def has_rows_without_job(engine: Engine) -> bool:
    """Whether an idle engine has rows without a job."""
    jobs: Any = engine.jobs
    return bool(jobs._leased or engine.scheduler.has_work) and not jobs._jobs


def free_slots(engine: Engine) -> int:
    """Return the free slots of an idle engine. A turn's end may be reported before its last token is read."""
    assert eventually_holds(engine, lambda: not engine.load.rows)
    return int(call(engine, "status")["free_slots"])


def tiny_model(folder: Path, **fields: Any) -> Path:
    """Write a random model small enough for tests: 3 layers of one head, all 65,536 tokens.

    The output matrix takes most of a step: twice the width takes nearly twice the time.
    """
    return write_random_model(folder / "tiny.safetensors", **{"layers": 3, "width": 64, **fields})


_running: set[int] = set()
"""Engines that `started_engine` started, by id."""


@contextmanager
def started_engine(model: Path, pool: PoolConfig | None = None, **fields: Any) -> Iterator[Engine]:
    """Start an engine (on the CPU by default). On exit, stop it and check that nothing leaks."""
    config = EngineConfig(
        model_path=str(model),
        pool=pool or PoolConfig(state_db=""),
        **{"devices": ("cpu",), "max_running": 64, "prefill_tokens_per_step": 128, "prefill_chunk": 32, **fields},
    )
    if not _running:
        gc.freeze()  # so that the collection below walks this engine's objects, not those of all earlier tests
    engine = Engine(config)
    _running.add(id(engine))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()
        _running.discard(id(engine))
    assert not has_rows_without_job(engine)
    del engine
    gc.collect()  # an engine has reference cycles and hundreds of megabytes
