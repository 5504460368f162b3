"""Handlers' results, errors' formats and HTTP statuses, and files as streams."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, BinaryIO, NoReturn, Protocol

import msgspec

from routes.request_context import current_request
from rwkv_batch.errors import MAY_BE_KEPT, ErrorInfo, ErrorKind
from rwkv_batch.line_breaks import escape_line_breaks

HTTP_STATUS = {
    ErrorKind.NOT_JSON: 400,
    ErrorKind.INVALID_FIELD: 422,
    ErrorKind.UNAUTHORIZED: 401,
    ErrorKind.FORBIDDEN: 403,
    ErrorKind.NOT_FOUND: 404,
    ErrorKind.METHOD_NOT_ALLOWED: 405,
    ErrorKind.MODEL_NOT_FOUND: 404,
    ErrorKind.BODY_TOO_LARGE: 413,
    ErrorKind.UNSUPPORTED_MEDIA_TYPE: 415,
    ErrorKind.SESSION_NOT_FOUND: 404,
    ErrorKind.SESSION_BUSY: 409,
    ErrorKind.SESSION_UNUSABLE: 409,
    ErrorKind.STATE_NOT_FOUND: 404,
    ErrorKind.ADAPTER_NOT_FOUND: 404,
    ErrorKind.NAME_TAKEN: 409,
    ErrorKind.OVERLOADED: 429,
    ErrorKind.STORAGE_FAILED: 503,
    ErrorKind.DRAINING: 503,
    ErrorKind.ENGINE_LOST: 503,
    ErrorKind.TIMEOUT: 504,
    ErrorKind.CANCELLED: 409,
    ErrorKind.INTERNAL: 500,
}


NO_CONTENT = 204
JSON = "application/json"
SSE = "text/event-stream"
FILE = "application/octet-stream"
XML = "application/xml"
NDJSON = "application/x-ndjson"
DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": hb\n\n"
BLANK = b" "

to_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A complete answer."""

    body: bytes
    status: int = 200
    content_type: str = JSON
    headers: dict[str, str] = field(default_factory=dict)
    gzipped: bytes = b""
    """The body for clients that accept gzip. Empty: there is none."""


_GZIP = re.compile(r"(?:^|[\s,])gzip(?!\s*;\s*q=0(?:\.0*)?\s*(?:,|$))", re.IGNORECASE)
"""Matches an Accept-Encoding that allows gzip."""


def in_accepted_coding(answer: HttpResponse, accepted: str) -> HttpResponse:
    """Return the answer, with gzip if it has such a body and `accepted` allows it. Each coding has its own ETag."""
    if not answer.gzipped or _GZIP.search(accepted) is None:
        return answer
    headers = {**answer.headers, "Content-Encoding": "gzip"}
    if "ETag" in headers:
        headers["ETag"] = headers["ETag"].removesuffix('"') + '-gzip"'
    return HttpResponse(answer.gzipped, answer.status, answer.content_type, headers)


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


def sse(value: Any) -> bytes:
    """Return one server-sent event with a JSON value on a single line."""
    return b"data: " + escape_line_breaks(to_json(value)) + b"\n\n"


def named_sse(value: dict[str, Any]) -> bytes:
    """Return one server-sent event that has the name in the value's `type`."""
    return b"event: " + str(value["type"]).encode() + b"\n" + sse(value)


def json_line(value: Any) -> bytes:
    """Return a JSON value on a line of its own."""
    return escape_line_breaks(to_json(value)) + b"\n"


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """How a stream's values become bytes."""

    content_type: str = SSE
    event: Callable[[Any], bytes] = sse
    end: bytes = DONE
    heartbeat: bytes = HEARTBEAT


NDJSON_STREAM = StreamFormat(NDJSON, json_line, b"", BLANK)
"""Its heartbeat is white space before the next value: a blank line would be no JSON value."""


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """How a group of routes formats errors and its streams' events."""

    body: Callable[[ErrorInfo], dict[str, Any]]
    statuses: Mapping[ErrorKind, int]
    schema: str
    """Name of the body's model in the documentation."""
    stream: StreamFormat = StreamFormat()


def with_warnings(value: Any) -> Any:
    """Return an answer's body with the request's warnings, if any. A body that is no object stays unchanged."""
    warnings = current_request().warnings
    return {**value, "warnings": warnings} if warnings and isinstance(value, dict) else value


def timestamp(seconds: float) -> str:
    """Return a Unix time in the form of RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def json_response(value: Any, status: int = 200) -> HttpResponse:
    return HttpResponse(to_json(with_warnings(value)), status)


def error_body(info: ErrorInfo) -> dict[str, Any]:
    """Return `{"error": …}`, with the field and its value if the error has one."""
    body: dict[str, Any] = {"error": info.message}
    if info.field is not None:
        body |= {"field": info.field, "given": info.given}
    return body


def _native_error(info: ErrorInfo) -> dict[str, Any]:
    """Return the error body with the request's id."""
    return error_body(info) | ({"request_id": current_request().request_id} if current_request().request_id else {})


NATIVE_ERRORS = ErrorFormat(_native_error, HTTP_STATUS, "Error")


def error_response(info: ErrorInfo, error_format: ErrorFormat) -> HttpResponse:
    """Return the answer to a request that failed before any output."""
    headers = {}
    if info.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(info.retry_after_s)))
    elif info.kind is ErrorKind.OVERLOADED:
        headers["Retry-After"] = "1"
    if info.kind is ErrorKind.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    if MAY_BE_KEPT in info.message or info.kind is ErrorKind.SESSION_UNUSABLE:
        headers["x-should-retry"] = "false"  # OpenAI's clients would send the turn again by themselves
    return HttpResponse(to_json(error_format.body(info)), error_format.statuses[info.kind], JSON, headers)


PREFIX = "/openai/"
"""All paths under this prefix use this format."""
_TYPES = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error", 429: "rate_limit_error"}
_CODES = {ErrorKind.UNAUTHORIZED: "invalid_api_key", ErrorKind.OVERLOADED: "rate_limit_exceeded"}
_SERVER_ERROR = 500
OPENAI_STATUS = HTTP_STATUS | {ErrorKind.INVALID_FIELD: 400}
"""OpenAI answers 400 to every invalid body, and SDKs rely on it."""


def _openai_error(info: ErrorInfo) -> dict[str, Any]:
    """Return `{"error": {"message", "type", "param", "code"}}`."""
    status = OPENAI_STATUS[info.kind]
    kind = "server_error" if status >= _SERVER_ERROR else _TYPES.get(status, "invalid_request_error")
    code = _CODES.get(info.kind, info.kind.value)
    error: dict[str, Any] = {"message": info.message, "type": kind, "param": info.field, "code": code}
    return {"error": error | ({"request_id": current_request().request_id} if current_request().request_id else {})}


OPENAI_ERRORS = ErrorFormat(_openai_error, OPENAI_STATUS, "OpenAIError")


DEEPL_STATUS = HTTP_STATUS | {ErrorKind.UNAUTHORIZED: 403, ErrorKind.INVALID_FIELD: 400}
DEEPL_ERRORS = ErrorFormat(lambda info: {"message": info.message}, DEEPL_STATUS, "DeepLError")


logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 18
"""Bytes per chunk passed to Robyn."""


class FileChunks(Iterator[bytes]):
    """Implements `Chunks`. Calls `on_close` once, when the file has been read or the client has left.

    If the disk fails, the last line is a JSON error: Robyn cannot end a stream as failed.
    """

    def __init__(self, file: BinaryIO, on_close: Callable[[], None] = lambda: None) -> None:
        self._file = file
        self._on_close: Callable[[], None] | None = on_close
        self.ended = False

    def __next__(self) -> bytes:
        if self.ended:
            return self._end()
        try:
            piece = self._file.read(CHUNK_BYTES)
        except OSError as error:
            logger.error("a file cannot be read to its end: %s", error)
            current_request().error_kind = ErrorKind.INTERNAL
            self.ended = True
            message = f"the file cannot be read to its end: {error}; fetch it again"
            return b"\n" + to_json(error_body(ErrorInfo(kind=ErrorKind.INTERNAL, message=message))) + b"\n"
        self.ended = len(piece) < CHUNK_BYTES
        return piece or self._end()

    def close(self) -> None:
        self._file.close()
        self._call_on_close()

    def _end(self) -> NoReturn:
        """End the stream. Raises StopIteration.

        `on_close` runs before the client sees the end: a client that has the whole file finds its slot free.
        """
        self._call_on_close()
        raise StopIteration

    def _call_on_close(self) -> None:
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()
