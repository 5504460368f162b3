"""An engine without a model. It produces what a real one cannot produce on demand: floods, refusals, failures.

A row's text is its prompt repeated; for a chat, the last user message. A prompt may start with a command:

- "flood": send 64 kB per step
- "break": fail the job in its second step
- "fail@n": fail in step n without any output
- "held": fail when a job "release" comes
- "who": send the model's name
- "die": kill the engine's thread
- "hang": block the engine's thread for ever
- "say": send the rest once, in pieces cut at any byte, and stop
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tqdm  # noqa: F401 - a real engine imports it with torch

from rwkv_batch import load_progress
from rwkv_batch.calls import (
    CancelJobs,
    CheckModel,
    CountJobs,
    EngineCall,
    ExportSession,
    ListAdapters,
    ListSessions,
    ListStates,
    Reply,
)
from rwkv_batch.config import EngineConfig
from rwkv_batch.errors import ErrorInfo, ErrorKind, ServiceError, StartupError
from rwkv_batch.ipc import server  # noqa: F401 - as a real engine does
from rwkv_batch.protocol import OnAdmitted, Sink
from rwkv_batch.request import Delta, Finish, FinishReason, GenerateRequest, Job, JobEvents, Load
from rwkv_batch.tokenizer import Tokenizer
from state_pool.session_key import SessionPage

STEP_S = 0.01
IDLE_STEP_S = 0.2
"""Of an engine without jobs: 100 steps per second would take a hundredth of a core."""
ROWS_PER_STEP = 100
"""More rows make a step longer, as on a device. They would take a core otherwise."""
SAY_CHUNK_BYTES = 7
FLOOD = b"0123456789abcdef" * 4096
LARGE_FILE = 32 << 20
"""Bytes of every session file: more than the buffers of two sockets hold."""
BROKEN = ErrorInfo(kind=ErrorKind.INTERNAL, message="broken on demand")


def _check(call: CheckModel) -> str | ServiceError:
    """Return the result that `start` would have."""
    if Path(call.file).stem != "broken":
        return "a model"
    return ServiceError(ErrorKind.INVALID_FIELD, f"file: {call.file} is not a model", field="file")


def _user_text(prompt: bytes) -> bytes:
    """Return the prompt, or a chat's last user message."""
    return prompt.rpartition(b"User: ")[2].partition(b"\n\nAssistant:")[0]


class _Running:
    def __init__(self, job: Job, sink: Sink, tokenizer: Tokenizer, model: str) -> None:
        self.job, self.sink = job, sink
        texts = [_user_text(tokenizer.decode_bytes(row.prompt)) for row in job.rows]
        self.texts = [b"%s " % model.encode() if text == b"who" else text for text in texts]
        self.steps = 0
        self.cancelled = False
        self.released = False


class FakeEngine:
    """A ManagedEngine with one thread. Each step gives every row `chunk_size` tokens."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._tokenizer = Tokenizer()
        self._jobs: dict[str, _Running] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._submitted = threading.Event()
        self._draining = False
        self._loop_count = 0
        self._stopping = False
        self._delivered: Callable[[], None] = lambda: None

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def loop_count(self) -> int | None:
        return self._loop_count

    @property
    def load(self) -> Load:
        return Load(sum(len(one.texts) for one in list(self._jobs.values())), 0)

    def start(self) -> None:
        """Behave by the model file's name.

        - "broken": cannot be loaded
        - "dying": ends the process
        - "slow": takes its time, after a quarter of its layers
        - "imports": fails with the modules imported since this one
        """
        name = Path(self._config.model_path).stem
        if name == "broken":
            raise StartupError(f"{self._config.model_path} is not a model; give another --model-path")
        if name == "imports":
            raise StartupError(f"imported: {sorted(set(sys.modules) - IMPORTED)}")
        if name == "dying":
            os._exit(3)
        if name == "slow":
            load_progress.report(0.25)
            time.sleep(1.5)
        self._thread.start()

    def drain(self, timeout_s: float) -> None:
        with self._lock:
            self._draining = True
        deadline = time.monotonic() + timeout_s
        while self._jobs and time.monotonic() < deadline:
            time.sleep(0.01)

    def stop(self) -> None:
        self._stopping = True
        self._thread.join(10)  # pending events are sent; a hanging thread is left behind

    def on_delivered(self, callback: Callable[[], None]) -> None:
        self._delivered = callback

    def submit(self, job: Job, sink: Sink, on_admitted: OnAdmitted) -> None:
        with self._lock:  # so that `drain` waits for every admitted job
            if self._draining:
                on_admitted(ServiceError(ErrorKind.DRAINING, "draining"))
                return
            on_admitted(None)
            self._jobs[job.job_id] = _Running(job, sink, self._tokenizer, self._config.model_name)
            self._submitted.set()

    def cancel(self, job_id: str) -> None:
        running = self._jobs.get(job_id)
        if running is not None:
            running.cancelled = True

    def call(self, call: EngineCall[Any], reply: Reply[Any]) -> None:
        running = list(self._jobs.values())
        jobs = Counter(one.job.label for one in running)
        if isinstance(call, ListSessions):
            reply(SessionPage(total=0, in_slots=0, in_host_memory=0, on_disk=0, sessions=[]))
        elif isinstance(call, ListStates | ListAdapters):
            reply([])
        elif isinstance(call, CheckModel):
            reply(_check(call))
        elif isinstance(call, ExportSession):
            reply(bytes(LARGE_FILE))
        elif isinstance(call, CountJobs):
            reply(sum(one.job.label == call.label and call.client in ("", one.job.client) for one in running))
        elif isinstance(call, CancelJobs):
            meant = [one for one in running if one.job.label == call.label and call.client in ("", one.job.client)]
            for one in meant:
                one.cancelled = True
            reply(len(meant))
        else:
            reply(
                {
                    "fingerprint": self._config.model_name,
                    "model": self._config.model_name,
                    "dtype": self._config.dtype,
                    "wkv_state": self._config.wkv_state,
                    "devices": list(self._config.devices),
                    "jobs": dict(jobs),
                    "running_rows": sum(len(one.texts) for one in running),
                    "waiting_rows": 0,
                }
            )

    def _run(self) -> None:
        while not self._stopping:
            if not self._jobs:
                self._submitted.wait(IDLE_STEP_S)
            self._submitted.clear()
            started = time.monotonic()
            self._loop_count += 1
            for running in list(self._jobs.values()):
                self._step(running)
            self._delivered()
            time.sleep(max(0.0, STEP_S * max(1.0, self.load.rows / ROWS_PER_STEP) - (time.monotonic() - started)))

    def _step(self, running: _Running) -> None:
        running.steps += 1
        command = running.texts[0].split(b" ")[0]
        if command == b"die":
            raise SystemExit("died on demand")
        if command == b"hang":
            threading.Event().wait()
        if command == b"break" and running.steps == 2:
            self._send(running, [], error=BROKEN)
            return
        if command == b"release":
            for one in list(self._jobs.values()):
                one.released = True
        if command == b"held" or command.startswith(b"fail@"):
            fails = running.released if command == b"held" else running.steps == int(command[5:])
            if running.cancelled or fails:
                self._send(running, [], error=BROKEN)
            return
        deltas = [self._delta(running, row, request) for row, request in enumerate(running.job.rows)]
        self._send(running, deltas)

    def _delta(self, running: _Running, row: int, request: GenerateRequest) -> Delta:
        if running.texts[row].startswith(b"say "):
            return self._say_delta(running, row, request)
        tokens = max(1, request.chunk_size)
        sampled = running.steps * tokens
        text = FLOOD if running.texts[row].startswith(b"flood") else running.texts[row]
        reason = FinishReason.CANCELLED if running.cancelled else FinishReason.LENGTH
        over = running.cancelled or sampled >= request.max_tokens
        finish = Finish(reason=reason, prompt_tokens=len(request.prompt), completion_tokens=sampled) if over else None
        return Delta(row, text, tokens, finish)

    @staticmethod
    def _say_delta(running: _Running, row: int, request: GenerateRequest) -> Delta:
        said = running.texts[row].removeprefix(b"say ")
        at = (running.steps - 1) * SAY_CHUNK_BYTES
        is_over = at + SAY_CHUNK_BYTES >= len(said)
        counts = {"prompt_tokens": len(request.prompt), "completion_tokens": running.steps}
        finish = Finish(reason=FinishReason.STOP, **counts) if is_over else None
        return Delta(row, said[at : at + SAY_CHUNK_BYTES], 1, finish)

    def _send(self, running: _Running, deltas: list[Delta], error: ErrorInfo | None = None) -> None:
        done = error is not None or all(delta.finish is not None for delta in deltas)
        if done:
            with self._lock:
                self._jobs.pop(running.job.job_id, None)
        running.sink(JobEvents(job_id=running.job.job_id, deltas=deltas, done=done, error=error))


IMPORTED = frozenset(sys.modules)
"""Modules that existed when this module was imported, in the process that engines are forked from."""
