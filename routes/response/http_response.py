"""Handlers' results, and the formats of errors."""

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
"""Escapes of Unicode's line breaks.

JSON may contain these characters, but clients that split lines at them, such as httpx, would split an event. They only
occur inside strings, where an escape is equivalent.
"""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A complete answer."""

    body: bytes
    status: int = 200
    content_type: str = JSON
    headers: dict[str, str] = field(default_factory=dict)


class Chunks(Iterator[bytes], Protocol):
    """The body of a streamed answer. `__next__` returns within 0.3 s, if need be with a heartbeat."""

    ended: bool
    """Whether the last chunk was returned."""

    def close(self) -> None:
        """Stop the work behind the answer. Called once, also after a disconnect."""


@dataclass(frozen=True, slots=True)
class StreamedResponse:
    """An answer that is sent while it is produced. Its status is 200."""

    chunks: Chunks
    content_type: str = SSE
    headers: dict[str, str] = field(default_factory=dict)


HandlerResponse = HttpResponse | StreamedResponse


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """How a group of routes formats errors."""

    body: Callable[[ErrorInfo], dict[str, Any]]
    statuses: Mapping[ErrorKind, int]


def json_response(value: Any, status: int = 200) -> HttpResponse:
    return HttpResponse(to_json(value), status)


def error_body(info: ErrorInfo) -> dict[str, Any]:
    """Return `{"error": …}`, with the field and its value if the error has one."""
    body: dict[str, Any] = {"error": info.message}
    if info.field is not None:
        body |= {"field": info.field, "given": info.given}
    return body


def _native_error(info: ErrorInfo) -> dict[str, Any]:
    """Return the error body with the request's id."""
    return error_body(info) | ({"request_id": current_request().request_id} if current_request().request_id else {})


NATIVE_ERRORS = ErrorFormat(_native_error, HTTP_STATUS)


def error_response(info: ErrorInfo, error_format: ErrorFormat) -> HttpResponse:
    """Return the answer to a request that failed before any output."""
    headers = {}
    if info.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(info.retry_after_s)))
    elif info.kind is ErrorKind.OVERLOADED:
        headers["Retry-After"] = "1"
    if info.kind is ErrorKind.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return HttpResponse(to_json(error_format.body(info)), error_format.statuses[info.kind], JSON, headers)


def sse(value: Any) -> bytes:
    """Return one server-sent event with a JSON value on a single line."""
    data = to_json(value)
    for character, escape in _UNICODE_LINE_BREAKS:
        data = data.replace(character, escape)
    return b"data: " + data + b"\n\n"
