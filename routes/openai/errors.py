"""OpenAI's error object: what its SDKs turn into their exception classes."""

from __future__ import annotations

from typing import Any

from routes.request_context import current_request
from routes.response.http_response import ErrorFormat
from routes.response.http_status import HTTP_STATUS
from rwkv_batch.errors import ErrorInfo, ErrorKind

PREFIX = "/openai/"
"""Every path under it answers in this form."""
_TYPES = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error", 429: "rate_limit_error"}
_CODES = {ErrorKind.UNAUTHORIZED: "invalid_api_key", ErrorKind.OVERLOADED: "rate_limit_exceeded"}
_SERVER_ERROR = 500
OPENAI_STATUS = HTTP_STATUS | {ErrorKind.INVALID_FIELD: 400}
"""OpenAI answers every mistake in a body with 400; its SDKs and those of others look for that."""


def _openai_error(info: ErrorInfo) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`."""
    status = OPENAI_STATUS[info.kind]
    kind = "server_error" if status >= _SERVER_ERROR else _TYPES.get(status, "invalid_request_error")
    code = _CODES.get(info.kind, info.kind.value)
    error: dict[str, Any] = {"message": info.message, "type": kind, "param": info.field, "code": code}
    return {"error": error | ({"request_id": current_request().request_id} if current_request().request_id else {})}


OPENAI_ERRORS = ErrorFormat(_openai_error, OPENAI_STATUS)
