"""What a handler returns, and the one table of how failures are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from routes.request_context import current_request
from routes.response.http_status import HTTP_STATUS
from rwkv_batch.errors import ErrorInfo, ErrorKind

JSON = "application/json"
SSE = "text/event-stream"
FILE = "application/octet-stream"
DONE = b"data: [DONE]\n\n"

to_json = msgspec.json.Encoder().encode
_UNICODE_LINE_BREAKS = [(character.encode(), f"\\u{ord(character):04x}".encode()) for character in "\u0085\u2028\u2029"]
"""JSON may have these as they are, and clients that split at Unicode's line breaks, as httpx, would cut an event there;
they stand in strings only, so their bytes may be replaced by their escapes."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A whole answer."""

    body: bytes
    status: int = 200
    content_type: str = JSON
    headers: dict[str, str] = field(default_factory=dict)


class Chunks(Iterator[bytes], Protocol):
    """The body of a streamed answer. `__next__` returns within a fraction of a second, if only a sign of life."""

    ended: bool
    """Whether the last chunk was given."""

    def close(self) -> None:
        """End the work behind it; called once, also when the client has gone."""


@dataclass(frozen=True, slots=True)
class StreamedResponse:
    """An answer that is written while it is made. Its status is 200."""

    chunks: Chunks
    content_type: str = SSE
    headers: dict[str, str] = field(default_factory=dict)


HandlerResponse = HttpResponse | StreamedResponse


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """How a dialect writes failures."""

    body: Callable[[ErrorInfo], dict[str, Any]]
    statuses: Mapping[ErrorKind, int]


def json_response(value: Any, status: int = 200) -> HttpResponse:
    """An answer with a JSON body."""
    return HttpResponse(to_json(value), status)


def failure(info: ErrorInfo) -> dict[str, Any]:
    """`{"error": …}`, with the field and its value where one is at fault."""
    body: dict[str, Any] = {"error": info.message}
    if info.field is not None:
        body |= {"field": info.field, "given": info.given}
    return body


def _native_error(info: ErrorInfo) -> dict[str, Any]:
    """The failure of a request, with the request's id."""
    return failure(info) | ({"request_id": current_request().request_id} if current_request().request_id else {})


NATIVE_ERRORS = ErrorFormat(_native_error, HTTP_STATUS)


def error_response(info: ErrorInfo, error_format: ErrorFormat) -> HttpResponse:
    """A failure before anything was written."""
    headers = {}
    if info.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(info.retry_after_s)))
    elif info.kind is ErrorKind.OVERLOADED:
        headers["Retry-After"] = "1"
    if info.kind is ErrorKind.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return HttpResponse(to_json(error_format.body(info)), error_format.statuses[info.kind], JSON, headers)


def sse(value: Any) -> bytes:
    """One server-sent event with a JSON value, in one line by any reading."""
    data = to_json(value)
    for character, escape in _UNICODE_LINE_BREAKS:
        data = data.replace(character, escape)
    return b"data: " + data + b"\n\n"
