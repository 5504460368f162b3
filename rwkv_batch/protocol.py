"""The engine's interface. It is the same in-process, over a local socket and in a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rwkv_batch.calls import Answer, EngineCall, Reply
from rwkv_batch.errors import ServiceError
from rwkv_batch.request import Job, JobEvents, Load

Sink = Callable[[JobEvents], None]
"""Receives a job's events in order, on one of the engine's threads. Must not block or raise."""

OnAdmitted = Callable[[ServiceError | None], None]
"""Receives None if the job was admitted, else the error. Same rules as `Sink`."""


class EngineProtocol(Protocol):
    """The calls that routes may make. All return at once; results arrive through callbacks."""

    def submit(self, job: Job, sink: Sink, on_admitted: OnAdmitted) -> None:
        """Submit a job. `on_admitted` gets None, or a ServiceError if the job is refused and sends no events."""

    def cancel(self, job_id: str) -> None:
        """End the job's rows at once. Its last event has `done`. Unknown ids are ignored: the job may have ended."""

    def call(self, call: EngineCall[Answer], reply: Reply[Answer]) -> None: ...


class ManagedEngine(EngineProtocol, Protocol):
    """An engine with its own thread, as this process runs it."""

    def confirm_turn(self, job_id: str) -> None:
        """Let a job's turn be stored (`Job.must_confirm`). Unknown ids are ignored."""

    def on_delivered(self, callback: Callable[[], None]) -> None:
        """Call `callback` after the sinks of each step and after jobs were admitted, on their thread."""

    def start(self) -> None:
        """Returns when the model can serve. Raises StartupError for errors that the user can fix."""

    def drain(self, timeout_s: float) -> None:
        """Refuse new jobs and wait for running ones."""

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread runs. If it ends, the process ends and is restarted."""

    @property
    def loop_count(self) -> int | None:
        """Iterations of its loop, idle or not; None while it loads, compiles or ends."""

    @property
    def load(self) -> Load:
        """Return the engine's queued work. Any thread."""

    def stop(self) -> None:
        """End running rows and store the sessions' states."""
