"""All kinds of request failures. Each dialect only decides how to print them.

A message says what was given, what is allowed and what to do.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec


class ErrorKind(enum.StrEnum):
    NOT_JSON = "not_json"
    INVALID_FIELD = "invalid_field"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    MODEL_NOT_FOUND = "model_not_found"
    BODY_TOO_LARGE = "body_too_large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    SESSION_NOT_FOUND = "session_not_found"
    SESSION_BUSY = "session_busy"
    SESSION_UNUSABLE = "session_unusable"
    STATE_NOT_FOUND = "state_not_found"
    ADAPTER_NOT_FOUND = "adapter_not_found"
    NAME_TAKEN = "name_taken"
    OVERLOADED = "overloaded"
    STORAGE_FAILED = "storage_failed"
    DRAINING = "draining"
    ENGINE_LOST = "engine_lost"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


MAY_BE_KEPT = (
    "the turn may have been kept: if /state/status shows its session updated since the request, it was; "
    "send it again only if not"
)
"""Part of the message if the outcome of a session's turn is unknown."""


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A failure as data. It crosses the socket and becomes a JSON body or an SSE event."""

    kind: ErrorKind
    message: str
    field: str | None = None
    given: Any = None
    retry_after_s: float | None = None


class ServiceError(Exception):
    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        field: str | None = None,
        given: Any = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.info = ErrorInfo(kind=kind, message=message, field=field, given=given, retry_after_s=retry_after_s)

    @classmethod
    def from_info(cls, info: ErrorInfo) -> ServiceError:
        return cls(info.kind, info.message, field=info.field, given=info.given, retry_after_s=info.retry_after_s)


def invalid(field: str, message: str, given: object) -> ServiceError:
    return ServiceError(ErrorKind.INVALID_FIELD, f"{field}: {message}", field=field, given=given)


class StartupError(Exception):
    """The configuration cannot be served. The message is one line with the cause and the remedy."""
