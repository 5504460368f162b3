"""Passes one job's events from the engine client's thread to the thread that writes the answer."""

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
    """A bounded queue of events with one reader.

    Closing it cancels the job. If the client stops reading, the job is cancelled.
    """

    def __init__(self, context: Context, job: Job) -> None:
        self._engine = context.engine
        self._wakeups = context.wakeups
        self._job_id = job.job_id
        self._stall_timeout_s = context.config.stall_timeout_s
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._started: asyncio.Future[JobEvents] | None = None
        """The first events of a session's turn. None for other jobs, whose first events nobody awaits."""
        if any(row.session is not None for row in job.rows):
            self._started = self._loop.create_future()
        self._has_started = False
        self._request_context = current_request()
        self._mailbox: Mailbox[JobEvents] = Mailbox()
        self._last_read: float | None = None
        """None: no writer has started, so none can stall."""
        self._is_over = threading.Event()
        self._closed = False

    def sink(self, events: JobEvents) -> None:
        """Add the events of one step. Runs on the engine client's thread and does not block."""
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
        """Return all waiting events. Waits at most `timeout_s` seconds, then returns []."""
        self._last_read = time.monotonic()
        batch = self._wakeups.take(self._mailbox, timeout_s)
        for events in batch:
            self._request_context.observe(events)
        return batch

    async def wait_started(self, timeout_s: float | None) -> JobEvents | None:
        """Return the first events of a session's turn, which stay in the queue. None after `timeout_s`.

        A turn may fail because of its session, and this shows after a moment. Other admitted jobs rarely fail, so their
        answers start at once.
        """
        if self._started is None:
            return None
        await asyncio.wait([self._started], timeout=timeout_s)
        return self._started.result() if self._started.done() else None

    async def wait_finished(self, timeout_s: float | None) -> bool:
        """Wait for the last event; return whether it has arrived. No limit if `timeout_s` is None."""
        await asyncio.wait([self._finished], timeout=timeout_s)
        return self._finished.done()

    def wait_on_thread(self, timeout_s: float) -> bool:
        """Like `wait_finished`, for threads other than the event loop's."""
        self._last_read = time.monotonic()
        return self._is_over.wait(timeout_s)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if not self._is_over.is_set():
                self._engine.cancel(self._job_id)

    def _finish(self) -> None:
        if not self._finished.done():
            self._finished.set_result(None)

    def _is_stalled(self) -> bool:
        """Return whether the client reads too slowly. A writer that waits for a wake-up is not stalled."""
        last = None if self._mailbox.has_waiting_reader else self._last_read
        idle_s = 0.0 if last is None else time.monotonic() - last
        return idle_s > self._stall_timeout_s or len(self._mailbox.items) > MAX_WAITING_EVENTS


async def submit(context: Context, job: Job) -> EventStream:
    """Submit a job in the client's name and wait until it is admitted. Raises ServiceError if it is refused."""
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
    except asyncio.CancelledError:  # nobody will read the answer
        stream.close()
        raise
    finally:
        del admission  # see `call_engine`
    return stream


def time_limit(config: HttpConfig, given: float | None) -> float | None:
    """Return the time limit of a request in seconds. Raises ServiceError above the allowed maximum."""
    maximum = config.max_timeout_s
    if given is None:
        return min((limit for limit in (config.default_timeout_s, maximum) if limit), default=None)
    if maximum and given > maximum:
        raise invalid("timeout_s", f"must be at most {maximum:g} (--max-timeout-s), got {given:g}", given)
    return given


async def call_engine(context: Context, call: EngineCall[Answer]) -> Answer:
    """Return the engine's answer to a call. Raises ServiceError."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Answer] = loop.create_future()

    context.engine.call(call, _future_callback(loop, answer))
    try:
        return await answer
    finally:
        del answer  # the exception refers to this frame: the cycle would keep the request, with whole files, in memory


def _future_callback(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any]) -> Callable[[Any], None]:
    """Return a callback that settles `future` from another thread. A ServiceError becomes its exception."""

    def set_outcome(value: object) -> None:
        if future.done():
            return  # the caller was cancelled
        if isinstance(value, ServiceError):
            future.set_exception(value)
        else:
            future.set_result(value)

    def reply(value: object) -> None:
        loop.call_soon_threadsafe(set_outcome, value)

    return reply
