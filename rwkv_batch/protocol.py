"""What an engine offers: the same in-process (tests), behind the local socket, behind a cluster later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rwkv_batch.calls import Answer, EngineCall, Reply
from rwkv_batch.errors import ServiceError
from rwkv_batch.request import Job, JobEvents

Sink = Callable[[JobEvents], None]
"""Receives a job's events in order, on a thread of the engine's own; must return at once and not raise."""

Admitted = Callable[[ServiceError | None], None]
"""Receives None (the job was taken) or why it was not; same rules as `Sink`."""


class EngineProtocol(Protocol):
    """What routes may ask. All methods return at once; answers arrive through callbacks."""

    def submit(self, job: Job, sink: Sink, admitted: Admitted) -> None:
        """Hand a job over. `admitted` gets None (taken) or a ServiceError (refused: no events follow)."""

    def cancel(self, job_id: str) -> None:
        """End a job's rows at once; its last event has `done`. Unknown ids are ignored (it may just have ended)."""

    def call(self, call: EngineCall[Answer], reply: Reply[Answer]) -> None:
        """Ask one of `rwkv_batch.calls`."""
