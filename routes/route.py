"""A route as data: what registration, metrics and the OpenAPI page are made from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from routes.context import Context
from routes.request.bodies import Body, Fields
from routes.response.http_response import JSON, NATIVE_ERRORS, ErrorFormat, HandlerResponse
from rwkv_batch.errors import ErrorKind

SESSION_ERRORS = (ErrorKind.SESSION_NOT_FOUND, ErrorKind.SESSION_BUSY, ErrorKind.SESSION_UNUSABLE)
Handler = Callable[[Context, Any], Awaitable[HandlerResponse]]


@dataclass(frozen=True, slots=True)
class Upload:
    """A validated query, and a file's bytes where the route takes one."""

    query: Any
    content: bytes = b""


@dataclass(frozen=True, slots=True)
class Route:
    """One method on one path. The handler gets the validated body, or the query's fields where `body` is None."""

    method: str
    path: str
    """It may end with a parameter, `{name}`, whose value may have slashes; the query's fields say what it is."""
    handle: Handler
    body: type[Body] | None
    summary: str
    query: type[Fields] | None = None
    """What query and path must say; the handler then gets an `Upload` with these fields."""
    uploads: str = ""
    """Content type of a body that is a file's bytes."""
    takes_form: bool = False
    """The body may be a form (multipart/form-data) with a file, which is the body's field `content` then. It stands in
    the field's text and not in the OpenAPI document: what is no form after all is a 500 of Robyn's own."""
    form: dict[str, str] | None = None
    """A form that works, for the documentation; `@` stands before a file's name."""
    is_admin: bool = False
    """Wants --admin-password where there is one, else the password; API keys do not do."""
    is_about_models: bool = False
    """A `model` in the request is what is asked about, and not whom."""
    is_generation: bool = False
    """Refused while draining and above the limit of answers under way."""
    waits_for_engine: bool = False
    """Waits for an engine that is loading or being restarted (--engine-wait-s) although it is no work."""
    answer: type[BaseModel] | None = None
    """A good answer, where it is JSON."""
    events: tuple[type[BaseModel], ...] = ()
    """What the events of a stream hold beside failures, where the body may ask for one."""
    is_public: bool = False
    """Wants no password."""
    error_format: ErrorFormat = NATIVE_ERRORS
    errors: tuple[ErrorKind, ...] = ()
    """What this route may answer beyond what its other fields imply."""
    content_type: str = JSON
    """Of a good answer that is no stream."""
    example: dict[str, Any] | None = None
    """A body or a query that works, for the documentation."""
