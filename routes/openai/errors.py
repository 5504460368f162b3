"""Errors in OpenAI's format, which its SDKs turn into exceptions."""

from __future__ import annotations

from typing import Any

from routes.request_context import current_request
from routes.response.http_response import ErrorFormat
from routes.response.http_status import HTTP_STATUS
from rwkv_batch.errors import ErrorInfo, ErrorKind

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


OPENAI_ERRORS = ErrorFormat(_openai_error, OPENAI_STATUS)
