"""The engine's face: the same in-process (tests), behind the local socket, behind a cluster later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rwkv_batch.request import Job, JobEvents

Sink = Callable[[JobEvents], None]
"""Receives a job's events in order, on a thread of the face's own; must return at once and not raise."""

Reply = Callable[[Any], None]
"""Receives the answer of `call` (plain data), or a ServiceError; same rules as `Sink`."""


class EngineProtocol(Protocol):
    """What routes may ask. All methods return at once; answers arrive through callbacks.

    `call` verbs, each with keyword arguments of plain data and a plain-data answer:
    `status()`, `session_status(limit, offset)`, `session_delete(session_id, delete_prefix)`,
    `session_export(session_id, dialogue)` -> a session file's bytes, `session_import(session_id, content)` -> the
    tokens it stands for, `cancel_label(label)` -> number of jobs cancelled.
    """

    def submit(self, job: Job, sink: Sink, admitted: Reply) -> None:
        """Hand a job over. `admitted` gets None (taken) or a ServiceError (refused: no events follow)."""

    def cancel(self, job_id: str) -> None:
        """End a job's rows at once; its last event has `done`. Unknown ids are ignored (it may just have ended)."""

    def call(self, verb: str, arguments: dict[str, Any], reply: Reply) -> None:
        """Ask something else of the engine."""
