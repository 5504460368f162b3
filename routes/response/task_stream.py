"""Answers of a running task: JSON whose head is sent early, and streams of the task's own events."""

from __future__ import annotations

import asyncio
import logging
import queue
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from routes.request_context import current_request
from routes.response.http_response import (
    BLANK,
    JSON,
    ErrorFormat,
    HandlerResponse,
    HttpResponse,
    StreamedResponse,
    StreamFormat,
    to_json,
)
from rwkv_batch.errors import ErrorInfo, ErrorKind, ServiceError

logger = logging.getLogger(__name__)
HEARTBEAT_INTERVAL_S = 0.25
"""Longest pause between two writes. A write shows whether the client is still connected."""
START_WAIT_S = 2.0
"""How long a stream waits for its first output before its status is sent."""
UNWRITABLE = ErrorInfo(kind=ErrorKind.INTERNAL, message="the answer could not be written; the server's log says why")
Result = TypeVar("Result")
_JSON_STREAM = StreamFormat(JSON, to_json, b"", BLANK)
"""White space until the one value is ready."""


async def with_early_head(
    answer: Coroutine[Any, Any, HttpResponse], error_format: ErrorFormat, head_after_s: float
) -> HandlerResponse:
    """Await an answer. After `head_after_s` seconds, status 200 and the headers are sent.

    For clients that give up without them and send the request again. Raises ServiceError before that time.
    """
    chunks = EventChunks(replace(error_format, stream=_JSON_STREAM))
    task = chunks.run(answer)
    try:
        await asyncio.wait([task], timeout=head_after_s)
    except asyncio.CancelledError:  # nobody will read the answer
        task.cancel()
        raise
    return task.result() if task.done() else StreamedResponse(chunks, JSON)


class SharedAnswers:
    """Answers that are being made, by request. A repeated request gets the answer of the first. One loop."""

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Task[HttpResponse]] = {}
        self._waiting: Counter[Hashable] = Counter()

    async def get(self, request: Hashable, make: Callable[[], Coroutine[Any, Any, HttpResponse]]) -> HttpResponse:
        """Return the answer. `make` starts it, unless it runs; it is cancelled when the last client leaves."""
        task = self._running.get(request)
        if task is None:
            task = self._running[request] = asyncio.ensure_future(make())
        self._waiting[request] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._waiting[request] -= 1
            if not self._waiting[request]:
                del self._waiting[request], self._running[request]
                task.cancel()


class EventChunks(Iterator[bytes]):
    """A stream of a task's events. The last one is the task's answer, or its error."""

    def __init__(self, error_format: ErrorFormat) -> None:
        self._format = error_format
        self._events: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Any] | None = None
        self.started = asyncio.Event()
        """Set by the first event."""
        self.ended = False

    def __next__(self) -> bytes:
        if self.ended:
            raise StopIteration
        try:
            event = self._events.get(timeout=HEARTBEAT_INTERVAL_S)
        except queue.Empty:
            return self._format.stream.heartbeat
        if event is not None:
            return event
        self.ended = True
        return self._last_event() + self._format.stream.end

    def send(self, event: Any) -> None:
        """Add an event. Runs on the loop's thread and does not block."""
        self._events.put(self._format.stream.event(event))
        self.started.set()

    def run(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Start the task, which may call `send`. The stream ends with it."""
        self._task = task = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self._events.put(None))
        return task

    def close(self) -> None:
        if self._task is not None and not self._task.done():
            self._loop.call_soon_threadsafe(self._task.cancel)

    def _last_event(self) -> bytes:
        assert self._task is not None
        if self._task.cancelled():
            return b""
        error = self._task.exception()
        if error is None:
            answer = self._task.result()
            return answer.body if isinstance(answer, HttpResponse) else b""  # its status comes too late: 200 is sent
        info = error.info if isinstance(error, ServiceError) else UNWRITABLE
        if info is UNWRITABLE:
            logger.error("a stream failed", exc_info=error)
        current_request().error_kind = info.kind
        return self._format.stream.event(self._format.body(info))


async def stream_events(
    work: Callable[[Callable[[Any], None]], Coroutine[Any, Any, None]], error_format: ErrorFormat
) -> HandlerResponse:
    """Answer with the events that `work` sends. Raises ServiceError if it fails before its first one.

    work: gets a function that sends an event, to be called on the loop's thread
    """
    chunks = EventChunks(error_format)
    task = chunks.run(work(chunks.send))
    started = asyncio.ensure_future(chunks.started.wait())
    try:
        await asyncio.wait([task, started], timeout=START_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:  # nobody will read the answer
        task.cancel()
        raise
    finally:
        started.cancel()
    if task.done() and not chunks.started.is_set():
        task.result()
    return StreamedResponse(chunks, error_format.stream.content_type)
