"""Errors of the library."""

from __future__ import annotations

from typing import Any

from routes.response.http_response import HTTP_STATUS
from rwkv_batch.errors import ErrorInfo, ServiceError


class LLMError(Exception):
    """A call failed. The message names the value given, the limit and the remedy."""

    def __init__(self, message: str, *, status: int = 500, field: str | None = None, given: Any = None) -> None:
        """`status`: HTTP status. `field`: the faulty argument, or None. `given`: its value."""
        super().__init__(message)
        self.status = status
        self.field = field
        self.given = given


def as_llm_error(error: ServiceError | ErrorInfo) -> LLMError:
    """Converts an engine's or request's error."""
    info = error.info if isinstance(error, ServiceError) else error
    return LLMError(info.message, status=HTTP_STATUS[info.kind], field=info.field, given=info.given)
