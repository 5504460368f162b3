"""Answers one record: request, retries and outcome."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from dataclasses import dataclass, field
from typing import Any

from programs.backends.backend import UNREACHABLE, Backend, Reply
from programs.batch.sidecar import Sidecar
from programs.batch.tasks import Task, TaskRequest
from programs.record import LineError, Record, RunError

OK = 200
_BUSY = frozenset({UNREACHABLE, 429, 502, 503})
"""Statuses of a busy or lost service. If they persist, the run stops and can be resumed."""
_RETRYABLE = frozenset({500, 504})
_TOO_MANY_REQUESTS = 429
_WAIT_S = 0.5
_MAX_WAIT_S = 30.0


@dataclass(slots=True)
class Outcome:
    """An answer, an error, or both if a glossary term is missing."""

    answer: str | None = None
    problem: str = ""
    status: int = OK
    prompt_tokens: int = 0
    completion_tokens: int = 0
    code: str = ""
    """Error code, or ""."""
    reply: Any = None
    """Body of the error answer."""
    key: bytes | None = None
    """Key of equal lines, if the answer should be kept for them."""


@dataclass(slots=True)
class LineWorker:
    """Answers records. One event loop."""

    backend: Backend
    task: Task
    retry: int
    max_busy_retries: int | None = None
    """Retries while the service is busy or unreachable. None: `retry`."""
    max_refused_s: float = float("inf")
    """Seconds of 429 answers, without any answered line, after which the line fails alone.

    The line may exceed the service's limits.
    """
    answers: Sidecar | None = None
    """Store of the answers to equal lines (--dedupe)."""
    fails_missing_terms: bool = False
    """Whether a translation that lacks a glossary term is reported as failed too. Files of documents have a warning."""
    in_progress: dict[bytes, asyncio.Future[Outcome]] = field(default_factory=dict)
    """Requests whose answers are not in the sidecar yet."""
    answered_at: float = 0.0
    """time.monotonic() of the last answer."""

    async def open(self) -> int:
        """Prepares the backend. Returns the number of lines in flight that keep it busy. Raises RunError."""
        return await self.backend.open()

    async def outcome(self, record: Record) -> Outcome:
        """Returns the record's outcome. Raises RunError if the backend is gone."""
        if record.problem:
            return Outcome(problem=record.problem, status=400)
        try:
            request = self.task.request(record)
        except LineError as error:
            return Outcome(problem=str(error), status=400)
        if self.answers is None:
            return await self._compute(request)
        return await self._deduplicated(request, self.answers)

    async def _deduplicated(self, request: TaskRequest, answers: Sidecar) -> Outcome:
        key = _key(request)
        if (waiting := self.in_progress.get(key)) is not None:
            first = await asyncio.shield(waiting)
            return Outcome(first.answer, first.problem, first.status)
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.in_progress[key] = future
        try:
            known = await asyncio.to_thread(answers.answer, key)
            outcome = Outcome(known) if known is not None else await self._compute(request)
        except BaseException:  # waiters get the error, and the next equal line sends a new request
            self.in_progress.pop(key, None)
            future.cancel()
            raise
        future.set_result(outcome)
        if known is None and outcome.answer is not None and not outcome.problem:
            outcome.key = key
        else:
            del self.in_progress[key]
        return outcome

    def on_committed(self, keys: list[bytes]) -> None:
        """Drops answers that the sidecar has now."""
        for key in keys:
            self.in_progress.pop(key, None)

    async def _compute(self, request: TaskRequest) -> Outcome:
        tries, started = 0, time.monotonic()
        while True:
            reply = await self.backend.request(request.path, request.body)
            tokens = reply.prompt_tokens, reply.completion_tokens
            if reply.status == OK:
                self.answered_at = time.monotonic()
                try:
                    problem = _missing_terms(reply.value) if self.fails_missing_terms else ""
                    return Outcome(self.task.text(reply.value), problem, OK, *tokens)
                except LineError as error:
                    return Outcome(None, str(error), OK, *tokens)
                except (KeyError, IndexError, TypeError):
                    return Outcome(None, f"the answer has an unexpected form: {str(reply.value)[:200]}", 502)
            is_busy = reply.status in _BUSY
            max_retries = self.retry if not is_busy or self.max_busy_retries is None else self.max_busy_retries
            is_refused_for_long = (
                reply.status == _TOO_MANY_REQUESTS
                and time.monotonic() - max(started, self.answered_at) > self.max_refused_s
            )
            if tries >= max_retries or is_refused_for_long or reply.status not in _BUSY | _RETRYABLE:
                break
            await asyncio.sleep(_wait_s(reply, tries))
            tries += 1
        if is_busy and not is_refused_for_long:
            raise RunError(f"{reply.reason}; give the same command again to resume")
        return Outcome(None, reply.reason, reply.status, *tokens, reply=reply.value)


def _missing_terms(answer: Any) -> str:
    """Returns a translation's warning about missing terms, or ""."""
    warnings = answer.get("warnings", ()) if isinstance(answer, dict) else ()
    return next((one["message"] for one in warnings if "lacks the term" in one["message"]), "")


def _wait_s(reply: Reply, tries: int) -> float:
    """Seconds until the next try. Doubles each time, at least Retry-After."""
    return min(_MAX_WAIT_S, max(reply.retry_after_s or 0.0, _WAIT_S * 2.0 ** min(tries, 10)))


def _key(request: TaskRequest) -> bytes:
    """Returns the key of equal requests: everything but the seed."""
    body = {name: value for name, value in request.body.items() if name != "seed"}
    return hashlib.sha256(json.dumps([request.path, body], sort_keys=True).encode()).digest()
