"""The engine's events of a job, and its rows' text and logprobs."""

from __future__ import annotations

import asyncio
import codecs
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from routes.context import Context
from routes.reader_wakeups import Mailbox
from routes.request_context import current_request
from rwkv_batch.errors import ErrorInfo, ErrorKind, ServiceError
from rwkv_batch.request import Finish, FinishReason, Job, JobEvents, TokenLogprob

_new_decoder = codecs.getincrementaldecoder("utf-8")
logger = logging.getLogger(__name__)


class RowDecoder:
    """Decodes the text of one row. Characters stay whole; invalid bytes become U+FFFD."""

    def __init__(self, opening: str = "", strip: bool = False, echoed: bytes = b"") -> None:
        """Create the decoder of one row.

        opening: text of the prompt that belongs to the answer
        strip: drop leading white space
        echoed: the whole prompt, if the answer repeats it; it may end inside a character
        """
        self._decoder = _new_decoder("replace")
        self._opening = opening + self._decoder.decode(echoed)
        self._waits_for_text = not echoed
        self._strip = strip

    def feed(self, piece: bytes, final: bool) -> str:
        """Return the text that `piece` completes."""
        text = self._decoder.decode(piece, final)
        if self._strip:
            text = text.lstrip()
            self._strip = not text
        if self._opening and (text or final or not self._waits_for_text):
            text, self._opening = self._opening + text, ""
        return text


_MIN_LOGPROB = -9999.0
"""OpenAI's replacement of minus infinity, which JSON does not have."""


def clamp_logprob(value: float) -> float:
    """Return the log-probability, at least -9999."""
    return max(value, _MIN_LOGPROB)


@dataclass(slots=True)
class DecodedRow:
    """New output of one row, or all of it."""

    row: int
    text: str = ""
    num_tokens: int = 0
    finish: Finish | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    def scores(self, what: str) -> list[float]:
        """Return the log-probabilities of a scored row's tokens, at least -9999.

        Raises ServiceError if the row failed or timed out. `what`: what it scores, for the message.
        """
        if self.finish is not None and self.finish.error is not None:
            raise ServiceError.from_info(self.finish.error)
        if self.finish is None or self.finish.reason is not FinishReason.LENGTH:
            message = f"not every {what} was scored in time; send fewer per request, or raise timeout_s"
            raise ServiceError(ErrorKind.TIMEOUT, message)
        return [clamp_logprob(token.logprob) for token in self.prompt_logprobs]


class OutputDecoder:
    """Decodes a job's events into one update per row. Events of several steps are merged."""

    def __init__(self, num_rows: int, opening: str = "", strip: bool = False, echoed: Sequence[bytes] = ()) -> None:
        """See RowDecoder; `echoed` has one entry per row, or none."""
        self._row_decoders = [RowDecoder(opening, strip, echo) for echo in echoed or [b""] * num_rows]
        self.error: ErrorInfo | None = None

    def read(self, batch: Iterable[JobEvents]) -> list[DecodedRow]:
        """Return the updates in order of each row's first delta. A job's error is stored in `error`."""
        pieces: dict[int, list[bytes]] = {}
        updates: dict[int, DecodedRow] = {}
        for events in batch:
            self.error = events.error or self.error
            for delta in events.deltas:
                row = updates.setdefault(delta.row, DecodedRow(delta.row))
                pieces.setdefault(delta.row, []).append(delta.text)
                row.num_tokens += delta.num_tokens
                row.finish = delta.finish or row.finish
                row.logprobs += delta.logprobs or ()
                row.prompt_logprobs += delta.prompt_logprobs or ()
        for index, row in updates.items():
            row.text = self._row_decoders[index].feed(b"".join(pieces[index]), row.finish is not None)
        return list(updates.values())


MAX_WAITING_EVENTS = 50_000


LOGPROB_BYTES = 100


class EventStream:
    """A bounded queue of events with one reader.

    Closing it cancels the job. If the client stops reading, the job is cancelled.
    """

    def __init__(self, context: Context, job: Job, awaits_start: bool = False) -> None:
        """`awaits_start`: whether the first events are awaited. Those of a session's turn always may be."""
        self._engine = context.engine
        self._wakeups = context.wakeups
        self._job_id = job.job_id
        self._stall_timeout_s = context.config.stall_timeout_s
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._started: asyncio.Future[JobEvents] | None = None
        """The first events. None if nobody awaits them."""
        if awaits_start or any(row.session is not None for row in job.rows):
            self._started = self._loop.create_future()
        self._has_started = False
        self._request_context = current_request()
        self._mailbox: Mailbox[JobEvents] = Mailbox()
        self._last_read: float | None = None
        """None: no writer has started, so none can stall."""
        self._is_over = False
        self._closed = False

    def sink(self, events: JobEvents) -> None:
        """Add the events of one step. Runs on the engine client's thread and does not block."""
        if self._started is not None and not self._has_started:
            self._has_started = True
            self._loop.call_soon_threadsafe(self._started.set_result, events)
        self._wakeups.put(self._mailbox, events)
        if events.done:
            self._is_over = True
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
        """Return the first events, which stay in the queue. None after `timeout_s`, or at once if they are not awaited.

        A turn may fail because of its session, and this shows after a moment. Other admitted jobs rarely fail, so their
        answers start at once, unless their format needs the status.
        """
        if self._started is None:
            return None
        await asyncio.wait([self._started], timeout=timeout_s)
        return self._started.result() if self._started.done() else None

    async def wait_finished(self, timeout_s: float | None = None) -> bool:
        """Wait for the last event. Return whether it came in time."""
        await asyncio.wait([self._finished], timeout=timeout_s)
        return self._finished.done()

    def num_waiting_bytes(self) -> int:
        """Return about how many bytes of JSON the waiting events become."""
        deltas = [delta for events in self._mailbox.items for delta in events.deltas]
        return sum(len(delta.text) + LOGPROB_BYTES * len(delta.logprobs or ()) for delta in deltas)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if not self._is_over:
                self._engine.cancel(self._job_id)

    def _finish(self) -> None:
        if not self._finished.done():
            self._finished.set_result(None)

    def _is_stalled(self) -> bool:
        """Return whether the client reads too slowly. A writer that waits for a wake-up is not stalled."""
        last = None if self._mailbox.has_waiting_reader else self._last_read
        idle_s = 0.0 if last is None else time.monotonic() - last
        return idle_s > self._stall_timeout_s or len(self._mailbox.items) > MAX_WAITING_EVENTS
