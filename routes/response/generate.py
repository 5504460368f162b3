"""The one way from a Job to an answer: streamed as server-sent events, or whole as JSON.

A dialect only formats. Iterators run on threads of Robyn's pool, one per answer under way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from routes.context import Context
from routes.response.event_stream import EventStream, submit
from routes.response.reply import (
    DONE,
    JSON,
    NATIVE_ERRORS,
    SSE,
    Answer,
    ErrorForm,
    Reply,
    Stream,
    error_answer,
    sse,
    to_json,
)
from routes.response.transcript import RowUpdate, Transcript
from rwkv_batch.errors import ErrorInfo, ErrorKind, ServiceError
from rwkv_batch.request import Finish, Job, JobEvents, TokenLogprob

logger = logging.getLogger(__name__)

PATIENCE_S = 0.25
"""A writer that has nothing to say for so long says that, which shows whether its client is still there."""
HEARTBEAT = b": hb\n\n"
BLANK = b" "

_INTERNAL = ErrorInfo(kind=ErrorKind.INTERNAL, message="the answer could not be written; the server's log says why")


@dataclass(slots=True)
class RowResult:
    """A row that has ended."""

    text: str
    finish: Finish | None
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


class Dialect(Protocol):
    """How one route writes what the engine says."""

    error_form: ErrorForm

    def opening(self) -> bytes:
        """What a stream begins with."""

    def chunk(self, updates: list[RowUpdate]) -> bytes:
        """Updates as server-sent events."""

    def closing(self) -> bytes:
        """What a stream says before [DONE]."""

    def whole(self, rows: list[RowResult]) -> Any:
        """The body of an answer that is not streamed, as a JSON value."""


class PlainDialect:
    """Defaults: nothing around the chunks, native errors."""

    error_form = NATIVE_ERRORS

    def opening(self) -> bytes:
        """See Dialect."""
        return b""

    def closing(self) -> bytes:
        """See Dialect."""
        return b""


class SseChunks:
    """A job as server-sent events; what waits is merged into one chunk."""

    def __init__(self, stream: EventStream, transcript: Transcript, dialect: Dialect) -> None:
        self._stream = stream
        self._transcript = transcript
        self._dialect = dialect
        self._start = dialect.opening()
        self.ended = False

    def __iter__(self) -> SseChunks:
        return self

    def __next__(self) -> bytes:
        if self.ended:
            raise StopIteration
        if self._start:
            start, self._start = self._start, b""
            return start
        try:
            return self._next_chunk()
        except Exception:  # raised here, it would end the stream without a word; the client gets an error event
            logger.exception("a stream failed")
            self.ended = True
            return sse(self._dialect.error_form.body(_INTERNAL)) + DONE

    def close(self) -> None:
        """See Chunks."""
        self._stream.close()

    def _next_chunk(self) -> bytes:
        batch = self._stream.pull(PATIENCE_S)
        if not batch:
            return HEARTBEAT
        updates = self._transcript.read(batch)
        chunk = self._dialect.chunk(updates) if updates else b""
        for row in updates:
            if row.finish is not None and row.finish.error is not None:
                chunk += sse(self._dialect.error_form.body(row.finish.error) | {"index": row.row})
        if batch[-1].done:
            self.ended = True
            chunk += self._end()
        return chunk or HEARTBEAT

    def _end(self) -> bytes:
        if self._transcript.error is not None:
            return sse(self._dialect.error_form.body(self._transcript.error)) + DONE
        return self._dialect.closing() + DONE


class JsonChunks:
    """A JSON answer that takes its time: white space, which JSON allows before a value, until it is there."""

    def __init__(self, stream: EventStream, make: Callable[[], Answer]) -> None:
        self._stream = stream
        self._make = make
        self.ended = False

    def __iter__(self) -> JsonChunks:
        return self

    def __next__(self) -> bytes:
        if self.ended:
            raise StopIteration
        if not self._stream.wait_on_thread(PATIENCE_S):
            return BLANK
        self.ended = True
        return self._make().body

    def close(self) -> None:
        """See Chunks."""
        self._stream.close()


def _results(stream: EventStream, transcript: Transcript, num_rows: int) -> list[RowResult]:
    """All rows of a job that has ended. Raises ServiceError if the job, or every row of it, failed."""
    rows = [RowResult("", None, []) for _ in range(num_rows)]
    for updates in transcript.read(stream.pull(0)):
        rows[updates.row] = RowResult(updates.text, updates.finish, updates.logprobs, updates.prompt_logprobs)
    if transcript.error is not None:
        raise ServiceError.from_info(transcript.error)
    errors = [row.finish.error for row in rows if row.finish is not None and row.finish.error is not None]
    if len(errors) == num_rows:
        raise ServiceError.from_info(errors[0])
    return rows


def _failed_at_once(begun: JobEvents, num_rows: int) -> ErrorInfo | None:
    """Why nothing came of a job whose first events these are; None if something did, or may."""
    errors = [
        delta.finish.error for delta in begun.deltas if delta.finish is not None and delta.finish.error is not None
    ]
    if begun.error is None and len(errors) == num_rows:
        return errors[0]
    return None if any(delta.text for delta in begun.deltas) else begun.error


async def run_whole(
    context: Context, job: Job, transcript: Transcript, whole: Callable[[list[RowResult]], Any], error_form: ErrorForm
) -> Reply:
    """Run a job and answer with one JSON value, which `whole` makes of its rows."""
    events = await submit(context, job)

    def make() -> Answer:
        try:
            return Answer(to_json(whole(_results(events, transcript, job.num_rows))))
        except ServiceError as error:
            return error_answer(error.info, error_form)
        except Exception:  # the status may be out already: the client gets an error body
            logger.exception("an answer could not be written")
            return error_answer(_INTERNAL, error_form)

    try:
        is_whole = await events.wait_finished(context.whole_within_s)
    except asyncio.CancelledError:
        events.close()
        raise
    if is_whole:
        return make()
    return Stream(JsonChunks(events, make), JSON)


async def run(context: Context, job: Job, dialect: Dialect, transcript: Transcript, stream: bool) -> Reply:
    """Run a job and answer as `dialect` writes."""
    if not stream:
        return await run_whole(context, job, transcript, dialect.whole, dialect.error_form)
    events = await submit(context, job)
    begun = await events.wait_begun(context.whole_within_s)
    if begun is not None and (error := _failed_at_once(begun, job.num_rows)) is not None:
        events.close()
        raise ServiceError.from_info(error)
    return Stream(SseChunks(events, transcript, dialect), SSE)
