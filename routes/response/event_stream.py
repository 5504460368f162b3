"""One job's events between the engine client's thread and the thread that writes its answer."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from routes.config import HttpConfig
from routes.context import Context
from routes.reader_wakeups import Mailbox
from routes.request_context import current_request
from rwkv_batch.calls import Answer, EngineCall
from rwkv_batch.errors import ServiceError, invalid
from rwkv_batch.request import Job, JobEvents

logger = logging.getLogger(__name__)

MAX_WAITING_EVENTS = 50_000


class EventStream:
    """A bounded queue with one reader. Closing it cancels the job; a reader that stops reading is cut off."""

    def __init__(self, context: Context, job: Job) -> None:
        self._engine = context.engine
        self._wakeups = context.wakeups
        self._job_id = job.job_id
        self._stall_timeout_s = context.config.stall_timeout_s
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._started: asyncio.Future[JobEvents] | None = None
        """the first events of a session's turn; others are not waited for, and the loop is not woken"""
        if any(row.session is not None for row in job.rows):
            self._started = self._loop.create_future()
        self._has_started = False
        self._request_context = current_request()
        self._mailbox: Mailbox[JobEvents] = Mailbox()
        self._last_read: float | None = None
        """None: nobody writes yet, so nobody stalls"""
        self._is_over = threading.Event()
        self._closed = False

    def sink(self, events: JobEvents) -> None:
        """Take what a step brought. Runs on the engine client's thread; returns at once."""
        if self._started is not None and not self._has_started:
            self._has_started = True
            self._loop.call_soon_threadsafe(self._started.set_result, events)
        self._wakeups.put(self._mailbox, events)
        if events.done:
            self._is_over.set()
            self._loop.call_soon_threadsafe(self._finish)
        elif not self._closed and self._is_stalled():
            fields = {"request_id": self._request_context.request_id}
            logger.warning("job %s: its client stopped reading; cancelled", self._job_id, extra={"fields": fields})
            self.close()

    def pull(self, timeout_s: float) -> list[JobEvents]:
        """Everything that waits; waits for at most `timeout_s` seconds, then []."""
        self._last_read = time.monotonic()
        batch = self._wakeups.take(self._mailbox, timeout_s)
        for events in batch:
            self._request_context.observe(events)
        return batch

    async def wait_started(self, timeout_s: float | None) -> JobEvents | None:
        """The first events of a session's turn, which are pulled all the same; None if there are none in that time.

        A turn may fail for its session, which takes a moment to find. All else that is admitted mostly goes well, and
        is not waited for: its first token should find the answer begun.
        """
        if self._started is None:
            return None
        await asyncio.wait([self._started], timeout=timeout_s)
        return self._started.result() if self._started.done() else None

    async def wait_finished(self, timeout_s: float | None) -> bool:
        """Whether the last event is there within `timeout_s` seconds; None: waits until it is."""
        await asyncio.wait([self._finished], timeout=timeout_s)
        return self._finished.done()

    def wait_on_thread(self, timeout_s: float) -> bool:
        """The same for a thread that is not the loop's."""
        self._last_read = time.monotonic()
        return self._is_over.wait(timeout_s)

    def close(self) -> None:
        """Cancel the job unless it has ended."""
        if not self._closed:
            self._closed = True
            if not self._is_over.is_set():
                self._engine.cancel(self._job_id)

    def _finish(self) -> None:
        if not self._finished.done():
            self._finished.set_result(None)

    def _is_stalled(self) -> bool:
        """A writer that waits for its turn is not held up by its client, however long this process stood still."""
        last = None if self._mailbox.has_waiting_reader else self._last_read
        idle = 0.0 if last is None else time.monotonic() - last
        return idle > self._stall_timeout_s or len(self._mailbox.items) > MAX_WAITING_EVENTS


async def submit(context: Context, job: Job) -> EventStream:
    """Hand a job to the engine in the client's name, and wait until it is admitted. Raises ServiceError if not."""
    loop = asyncio.get_running_loop()
    admission: asyncio.Future[None] = loop.create_future()
    request_context = current_request()
    job = msgspec.structs.replace(
        job,
        client=request_context.client,
        limits=request_context.limits,
        priority=request_context.priority or job.priority,
        timeout_s=time_limit(context.config, job.timeout_s),
    )
    request_context.submit(job)
    stream = EventStream(context, job)
    context.engine.submit(job, stream.sink, _future_callback(loop, admission))
    try:
        await admission
    except asyncio.CancelledError:  # nobody will read it
        stream.close()
        raise
    finally:
        del admission  # as in `call_engine`
    return stream


def time_limit(config: HttpConfig, given: float | None) -> float | None:
    """The seconds that a request gets. Raises ServiceError if it asks for more than it may have."""
    most = config.max_timeout_s
    if given is None:
        return min((limit for limit in (config.default_timeout_s, most) if limit), default=None)
    if most and given > most:
        raise invalid("timeout_s", f"must be at most {most:g} (--max-timeout-s), got {given:g}", given)
    return given


async def call_engine(context: Context, call: EngineCall[Answer]) -> Answer:
    """The engine's answer to a call. Raises ServiceError."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Answer] = loop.create_future()

    context.engine.call(call, _future_callback(loop, answer))
    try:
        return await answer
    finally:
        del answer  # its exception knows this frame: with the request, whole files, they would stay as a circle


def _future_callback(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any]) -> Callable[[Any], None]:
    """A callback for another thread that settles `future`: a ServiceError is its exception, all else its result."""

    def set_outcome(value: object) -> None:
        if future.done():
            return  # who asked has given up
        if isinstance(value, ServiceError):
            future.set_exception(value)
        else:
            future.set_result(value)

    def reply(value: object) -> None:
        loop.call_soon_threadsafe(set_outcome, value)

    return reply
