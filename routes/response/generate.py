"""Runs a job and answers with a stream or JSON.

The engine client's thread passes events to the thread that writes the answer, one per running answer, from Robyn's
pool. Formatters only format.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import msgspec

from routes.config import HttpConfig
from routes.context import Context
from routes.request.jobs import offload_if_large
from routes.request.model_names import TUNED_PREFIX, model_not_found
from routes.request_context import cache_tenant, current_request, reachable_ids
from routes.response import http_response
from routes.response.event_stream import LOGPROB_BYTES, DecodedRow, EventStream, OutputDecoder
from routes.response.task_stream import HEARTBEAT_INTERVAL_S, START_WAIT_S, UNWRITABLE
from rwkv_batch.calls import Answer, EngineCall, FindSession
from rwkv_batch.errors import ErrorInfo, ErrorKind, ServiceError, invalid
from rwkv_batch.request import GenerateRequest, Job, JobEvents

logger = logging.getLogger(__name__)


async def submit(context: Context, job: Job, *, awaits_start: bool = False) -> EventStream:
    """Submit a job in the client's name and wait for its admission. Raises ServiceError if it is refused.

    awaits_start: whether the caller awaits the first events; see `EventStream.wait_started`
    """
    loop = asyncio.get_running_loop()
    admission: asyncio.Future[None] = loop.create_future()
    request_context = current_request()
    job = msgspec.structs.replace(
        job,
        rows=[await _with_stored_session_id(context, row) for row in job.rows],
        client=request_context.client,
        limits=request_context.limits,
        tenant=cache_tenant(context.config),
        priority=request_context.priority or job.priority,
        timeout_s=time_limit(context.config, job.timeout_s),
    )
    if (usage := job.usage) is not None:
        request_context.check_rows(usage.rows, usage.states)  # the key's limit
    request_context.count_job(job)
    stream = EventStream(context, job, awaits_start)
    context.engine.submit(job, stream.sink, _future_callback(loop, admission))
    try:
        await admission
    except asyncio.CancelledError:  # nobody will read the answer
        stream.close()
        raise
    except ServiceError as error:
        raise _blamed_on_model(error, context.config.model_name) from None
    finally:
        del admission  # see `call_engine`
    return stream


def _blamed_on_model(error: ServiceError, served: str) -> ServiceError:
    """Return the error of a row. If the state or adapter of a model `ft:...` is missing, that model is."""
    info, requested = error.info, current_request().tuned_model
    is_missing = info.kind in (ErrorKind.STATE_NOT_FOUND, ErrorKind.ADAPTER_NOT_FOUND)
    if is_missing and requested and str(info.given).startswith(TUNED_PREFIX):
        return model_not_found(requested, [served], "; GET /v1/models lists all names")
    return error


async def _with_stored_session_id(context: Context, row: GenerateRequest) -> GenerateRequest:
    """Return the row with its session's stored id, if it has one.

    The stored id has the API key's name. If the key has no session of this id, the id may name a session without an
    owner. If there is none either, the turn begins a new session of the key.
    """
    if row.session is None:
        return row
    session_ids = reachable_ids(row.session.session_id)
    found = await call_engine(context, FindSession(session_ids)) if len(session_ids) > 1 else None
    turn = msgspec.structs.replace(row.session, session_id=found or session_ids[0])
    return msgspec.structs.replace(row, session=turn)


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


_ROWS_POLL_S = 0.1


class ResponseFormatter:
    """How a route formats the engine's output. By default, nothing is around the chunks, and errors are native."""

    error_format = http_response.NATIVE_ERRORS
    begins_with_output = False
    """Whether a stream's status waits for its first output, so that an error before it has its own status."""
    _has_warned = False

    def first_with_warnings(self, event: dict[str, Any]) -> dict[str, Any]:
        """Return a stream's event. The first one gets the request's warnings."""
        if self._has_warned:
            return event
        self._has_warned = True
        return http_response.with_warnings(event)  # type: ignore[no-any-return]

    def stream_start(self) -> bytes:
        """Return the first bytes of a stream."""
        return b""

    def chunk(self, updates: list[DecodedRow]) -> bytes:
        """Return the updates as the stream's events."""
        raise NotImplementedError

    def stream_end(self) -> bytes:
        """Return the last bytes before the stream's end."""
        return b""

    def full_body(self, rows: list[DecodedRow]) -> Any:
        """Return the body of a non-streamed answer, as a JSON value."""
        raise NotImplementedError


class SseChunks(Iterator[bytes]):
    """A job's output as a stream of its route's format. Waiting events are merged into one chunk."""

    def __init__(self, stream: EventStream, output_decoder: OutputDecoder, formatter: ResponseFormatter) -> None:
        self._stream = stream
        self._decoder = output_decoder
        self._formatter = formatter
        self._format = formatter.error_format.stream
        self._start = formatter.stream_start()
        self.ended = False

    def __next__(self) -> bytes:
        if self.ended:
            raise StopIteration
        if self._start:
            start, self._start = self._start, b""
            return start
        try:
            return self._next_chunk()
        except Exception:  # send an error event: an exception would end the stream without one
            logger.exception("a stream failed")
            self.ended = True
            return self._error_event(UNWRITABLE) + self._format.end

    def close(self) -> None:
        self._stream.close()

    def _next_chunk(self) -> bytes:
        events = self._stream.pull(HEARTBEAT_INTERVAL_S)
        if not events:
            return self._format.heartbeat
        updates = self._decoder.read(events)
        chunk = self._formatter.chunk(updates) if updates else b""
        for update in updates:
            if update.finish is not None and update.finish.error is not None:
                chunk += self._error_event(update.finish.error, index=update.row)
        if events[-1].done:
            self.ended = True
            chunk += self._end()
        return chunk or self._format.heartbeat

    def _end(self) -> bytes:
        error = self._decoder.error
        last = self._formatter.stream_end() if error is None else self._error_event(error)
        return last + self._format.end

    def _error_event(self, info: ErrorInfo, **fields: int) -> bytes:
        return self._format.event(self._formatter.error_format.body(info) | fields)


def _results(stream: EventStream, output_decoder: OutputDecoder, num_rows: int) -> list[DecodedRow]:
    """Return all rows of a finished job. Raises ServiceError if the job or all of its rows failed."""
    rows = [DecodedRow(index) for index in range(num_rows)]
    for row in output_decoder.read(stream.pull(0)):
        rows[row.row] = row
    if output_decoder.error is not None:
        raise ServiceError.from_info(output_decoder.error)
    errors = [row.finish.error for row in rows if row.finish is not None and row.finish.error is not None]
    if len(errors) == num_rows:
        raise ServiceError.from_info(errors[0])
    return rows


def _immediate_error(first_events: JobEvents, num_rows: int) -> ErrorInfo | None:
    """Return the error of a job that fails at once, else None.

    Then its first events end all rows with errors, or end the job before any text.
    """
    errors = [
        delta.finish.error
        for delta in first_events.deltas
        if delta.finish is not None and delta.finish.error is not None
    ]
    if first_events.error is None and len(errors) == num_rows:
        return errors[0]
    return None if any(delta.text for delta in first_events.deltas) else first_events.error


async def finished_rows(context: Context, job: Job, output_decoder: OutputDecoder) -> list[DecodedRow]:
    """Run a job and return its rows. Raises ServiceError if the job or all of its rows failed."""
    stream = await submit(context, job)
    try:
        await stream.wait_finished()
    except asyncio.CancelledError:  # nobody will read the answer
        stream.close()
        raise
    return await offload_if_large(stream.num_waiting_bytes(), _results, stream, output_decoder, job.num_rows)


async def rows_as_they_finish(
    context: Context, job: Job, output_decoder: OutputDecoder
) -> AsyncGenerator[dict[int, DecodedRow]]:
    """Run a job and yield its finished rows by index. Raises ServiceError if the job failed."""
    stream = await submit(context, job)
    rows = [DecodedRow(index) for index in range(job.num_rows)]
    try:
        is_over = False
        while not is_over:
            is_over = await stream.wait_finished(_ROWS_POLL_S)
            finished = dict[int, DecodedRow]()
            for update in output_decoder.read(stream.pull(0)):
                row = rows[update.row]
                row.text, row.finish = row.text + update.text, update.finish
                if row.finish is not None:
                    finished[update.row] = row
            if output_decoder.error is not None:
                raise ServiceError.from_info(output_decoder.error)
            if finished:
                yield finished
    finally:
        stream.close()


async def run_full(
    context: Context, job: Job, output_decoder: OutputDecoder, full_body: Callable[[list[DecodedRow]], Any]
) -> http_response.HandlerResponse:
    """Run a job and answer with one JSON value. `full_body` builds it from the job's rows."""
    rows = await finished_rows(context, job, output_decoder)
    size = sum(len(row.text) for row in rows) + LOGPROB_BYTES * sum(len(row.logprobs) for row in rows)
    return await offload_if_large(size, lambda: http_response.json_response(full_body(rows)))


async def run(
    context: Context, job: Job, formatter: ResponseFormatter, output_decoder: OutputDecoder, is_stream: bool
) -> http_response.HandlerResponse:
    """Run a job and answer in the format of `formatter`."""
    if not is_stream:
        return await run_full(context, job, output_decoder, formatter.full_body)
    stream = await submit(context, job, awaits_start=formatter.begins_with_output)
    limit_s = None if formatter.begins_with_output else START_WAIT_S
    try:
        first_events = await stream.wait_started(limit_s)  # at once None if it does not wait
    except asyncio.CancelledError:
        stream.close()
        raise
    if first_events is not None and (error := _immediate_error(first_events, job.num_rows)) is not None:
        stream.close()
        raise ServiceError.from_info(error)
    content_type = formatter.error_format.stream.content_type
    return http_response.StreamedResponse(SseChunks(stream, output_decoder, formatter), content_type)
