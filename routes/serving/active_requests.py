"""A request until its last byte: the limiter, the metrics, the log, and the end of streams whose key is removed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from routes.context import Context
from routes.request_context import RequestContext, set_current_request
from routes.response.http_response import BLANK, ErrorFormat, StreamedResponse, to_json
from routes.serving.access import CLIENT_DISCONNECTED, DONE, PROBES, log_access
from routes.serving.connections import Connection
from routes.serving.stream_guard import StreamGuard
from routes.serving.thread_states import keep_state
from rwkv_batch.errors import ErrorInfo, ErrorKind
from rwkv_batch.ipc.wire import Observe

if TYPE_CHECKING:
    from routes.serving.tracing import RequestTracer

KEY_REMOVED = ErrorInfo(
    kind=ErrorKind.UNAUTHORIZED,
    message="the API key of this request was removed from --keys-file while it ran; repeat it with another key",
)
_WORKER_LOST = ErrorInfo(
    kind=ErrorKind.INTERNAL, message="the HTTP worker process of this stream was lost; repeat the request"
)
GUARD_KEY = "stream_guard"
"""Key of the `StreamGuard` in `Context.shared`."""
TRACER_KEY = "tracer"
"""Key of the `RequestTracer` in `Context.shared`, with --otlp-endpoint."""


class ActiveRequest:
    """A request counted by the limiter until its last byte; then it is reported and logged."""

    def __init__(self, context: Context, request_context: RequestContext, client: str, is_generation: bool) -> None:
        """Raises ServiceError at a limit. `client`: the address."""
        self.request_context = request_context
        self._context = context
        self._client = client
        context.limiter.acquire(is_generation, client)

    def release(self) -> None:
        """Release the limiter. Call once."""
        self._context.limiter.release(self._client)

    @property
    def guard(self) -> StreamGuard | None:
        return self._context.shared.get(GUARD_KEY)

    @property
    def has_key_in_force(self) -> bool:
        return self._context.keys.is_in_force(self.request_context.key_digest)

    def report(self, status: int, outcome: str) -> None:
        report(self._context, self.request_context, status, outcome)


def report(context: Context, request_context: RequestContext, status: int, outcome: str) -> None:
    seconds = time.monotonic() - request_context.started
    entry = log_access(request_context, status, outcome) if context.config.access_log else {}
    context.engine.observe(Observe(request_context.route, status, seconds, request_context.first_byte_s, entry))
    if context.config.otlp_endpoint and request_context.route not in PROBES:
        tracer: RequestTracer = context.shared[TRACER_KEY]
        tracer.record(request_context, status, outcome)


class RobynChunks(Iterator[bytes]):
    """A stream for Robyn, which drops it when the client disconnects. This ends the job."""

    def __init__(
        self,
        stream: StreamedResponse,
        active_request: ActiveRequest,
        connection: Connection | None,
        error_format: ErrorFormat,
    ) -> None:
        """`connection`: the client's, None if it is not known."""
        self._chunks = stream.chunks
        self._format = error_format.stream
        self._has_events = stream.content_type == self._format.content_type
        self._active_request = active_request
        self._error_format = error_format
        self._is_key_removed = False
        self._connection = connection if self._has_events else None
        self._has_begun = False
        self._guarded: int | None = None
        """Number of the stream at the guard."""

    def __next__(self) -> bytes:
        keep_state()
        request_context = self._active_request.request_context
        set_current_request(request_context)
        if self._is_key_removed:
            raise StopIteration
        if not self._active_request.has_key_in_force:
            self._is_key_removed = True
            request_context.error_kind = KEY_REMOVED.kind
            self._release_guard()
            return self._last_chunk(KEY_REMOVED)
        chunk = next(self._chunks)
        if self._chunks.ended:
            self._release_guard()
        elif self._has_begun:  # the head is sent
            self._guard()
        self._has_begun = True
        if chunk not in (self._format.heartbeat, BLANK):
            request_context.mark_first_byte()
        return chunk

    def _guard(self) -> None:
        """Let the supervisor end the stream if this process is killed."""
        connection, self._connection = self._connection, None
        guard = self._active_request.guard
        if connection is not None and guard is not None:
            self._guarded = guard.watch(connection, self._last_chunk(_WORKER_LOST))

    def _release_guard(self) -> None:
        number, self._guarded = self._guarded, None
        guard = self._active_request.guard
        if number is not None and guard is not None:
            guard.release(number)

    def _last_chunk(self, info: ErrorInfo) -> bytes:
        body = self._error_format.body(info)
        return self._format.event(body) + self._format.end if self._has_events else b"\n" + to_json(body) + b"\n"

    def __del__(self) -> None:
        self._active_request.release()  # first: a client that sees the end of its rows finds its slot free
        self._release_guard()
        self._chunks.close()
        self._active_request.report(
            200,
            (self._active_request.request_context.error_kind or DONE)
            if self._chunks.ended or self._is_key_removed
            else CLIENT_DISCONNECTED,
        )
